"""Dropout on a mesh: ranks that hold the same activations must drop the same numbers, all others must not.

What two ranks hold of the residual stream, if they differ in this axis only, and so their seeds:

    pp                           other layers                differ
    dp_replicate, dp_shard, cp   other samples or tokens     differ
    tp                           the same                    are equal: else each would go on with another model
    tp, with sequence parallel   other tokens                differ

Megatron-LM keeps two random states for this, one that its tensor-parallel ranks share and one that is each rank's own
(Shoeybi et al. 2019, appendix B.2). Here all dropout is on the residual stream, where one is enough. The numbers that
fall out are not those of one process; their share, and what is expected of the loss, are.
"""

import numpy as np
import torch.nn.functional as F

from lecture_lib.parallel.mesh.axes import AXES, Mesh
from lecture_lib.parallel.model import Block


def drop(block: Block, p: float) -> None:
    """Let a share ``p`` of what attention and the MLP add to the residual stream fall out, in training."""
    for part in (block.attention, block.mlp):
        part.register_forward_hook(lambda module, _, y: F.dropout(y, p, module.training))


def seed_of(mesh: Mesh, sequence_parallel: bool, *numbers: int) -> int:
    """A seed for this rank, from ``numbers`` (a seed, a step) and from its place in the mesh where that matters."""
    own = [mesh.place[axis] for axis in AXES if axis != "tp" or sequence_parallel]
    return int(np.random.SeedSequence([*numbers, *own]).generate_state(1)[0])
