"""One transformer on a mesh of ranks: every kind of parallelism at once.

    mesh = Mesh(pp=2, dp_shard=2, tp=2)                         # 8 ranks
    model = ParallelTransformer(Transformer(), mesh, micro_batches=4)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model.step(tokens, targets)                          # the whole batch; the gradients are there
    model.clip_gradients(1.0)
    optimizer.step(); optimizer.zero_grad()

Read in this order:

    axes.py      the mesh: who shares what with whom, and what each axis sends
    model.py     the model, built from the inside out by parts that each know one axis; one step
    stage.py     neighbouring layers: their dtype, and when their gradients travel
    pieces.py    what this rank holds of each parameter: norms that count all once, whole tensors and back
    dropout.py   where ranks need the same random numbers, and where they must not have them
"""

from lecture_lib.parallel.mesh.axes import AXES, Mesh
from lecture_lib.parallel.mesh.dropout import drop, seed_of
from lecture_lib.parallel.mesh.model import SCHEDULES, ParallelTransformer
from lecture_lib.parallel.mesh.pieces import Piece, full_state_dict, gather, global_norm, part_of

__all__ = [
    "AXES",
    "SCHEDULES",
    "Mesh",
    "ParallelTransformer",
    "Piece",
    "drop",
    "full_state_dict",
    "gather",
    "global_norm",
    "part_of",
    "seed_of",
]
