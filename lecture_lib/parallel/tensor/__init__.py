"""Tensor parallelism: every matrix split over the ranks, and the activations moved.

Read in this order:

    moves.py       six moves into and out of a part where each rank computes something else, each with its backward
    linear.py      one matmul, split by columns or by rows
    overlap.py     the matmul and its collective at the same time
    vocabulary.py  embedding and cross-entropy, split by vocabulary
    split.py       attention by heads, the MLP, sequence parallelism; a whole model split, and gathered again

``group`` is everywhere the process group that shares the work, all ranks if it is None. Sizes and bytes are counted in
it, so it may be one axis of a mesh.
"""

from lecture_lib.parallel.tensor.linear import ColumnParallelLinear, ColumnShard, RowParallelLinear
from lecture_lib.parallel.tensor.moves import (
    copy_to_group,
    gather_from_group,
    gather_to_group,
    reduce_from_group,
    reduce_scatter_from_group,
    split_to_group,
)
from lecture_lib.parallel.tensor.overlap import linear_of_copy, linear_then_reduce
from lecture_lib.parallel.tensor.split import (
    ParallelAttention,
    ParallelSwiGLU,
    SequenceParallelNorm,
    all_gather_mlp,
    gather_full_gradients,
    gather_full_state_dict,
    tensor_parallel,
)
from lecture_lib.parallel.tensor.vocabulary import ParallelEmbedding, parallel_cross_entropy

__all__ = [
    "ColumnParallelLinear",
    "ColumnShard",
    "ParallelAttention",
    "ParallelEmbedding",
    "ParallelSwiGLU",
    "RowParallelLinear",
    "SequenceParallelNorm",
    "all_gather_mlp",
    "copy_to_group",
    "gather_from_group",
    "gather_full_gradients",
    "gather_full_state_dict",
    "gather_to_group",
    "linear_of_copy",
    "linear_then_reduce",
    "parallel_cross_entropy",
    "reduce_from_group",
    "reduce_scatter_from_group",
    "split_to_group",
    "tensor_parallel",
]
