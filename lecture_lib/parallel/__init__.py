"""A model and its batch, spread over ranks: what is copied, what is split, what travels.

Read in this order:

    model.py     the two models that are trained: a deep MLP and a small transformer
    data.py      the batch is split, the gradients travel
    sharded/     and no rank holds everything: ZeRO 1, 2 and 3
    tensor/      every matrix is split, the activations travel
    pipeline/    the layers are split, micro-batches travel
    context/     the sequence is split, keys and values travel
    expert.py    the experts are split, tokens travel to them
    recompute.py activations that are computed again, and not kept
    mesh/        all of them at once, in one transformer

agree.py is what all of them begin with: the ranks compare what they bring.
"""

from lecture_lib.parallel import context, expert, pipeline
from lecture_lib.parallel.data import DataParallel
from lecture_lib.parallel.sharded import FullyShardedDataParallel, ShardedOptimizer
from lecture_lib.parallel.tensor import ColumnParallelLinear, RowParallelLinear

__all__ = [
    "ColumnParallelLinear",
    "DataParallel",
    "FullyShardedDataParallel",
    "RowParallelLinear",
    "ShardedOptimizer",
    "context",
    "expert",
    "pipeline",
]
