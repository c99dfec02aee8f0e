"""One matmul, split over ranks: by the columns of the matrix, or by its rows.

The lecture writes y = x A. Split A by columns, and each rank makes some of the features of y from all of x. Split A by
rows, and each rank makes a part of every feature from some of the features of x, and y is the sum of the parts:

    column   [y_0 | y_1] = x [A_0 | A_1]                  row   y = [x_0 | x_1] [A_0 ; A_1] = x_0 A_0 + x_1 A_1

One after the other, with an elementwise function between them, they need one all-reduce: the features that the column
layer leaves on a rank are those that the row layer wants there (Shoeybi et al. 2019, Megatron-LM, section 3). The same
on the way back: one all-reduce, of the gradient of x.

nn.Linear stores the transpose, weight = Aᵀ of (out, in): columns of A are rows of weight, its dimension 0.

A trap: ``nn.Linear(k, m // n)`` on every rank is not a shard of a layer. With the same seed on all ranks, all shards
are equal, stay equal, and the layer has n times fewer different features. With different seeds, what should be alike
(a norm, a bias, the layers of the next group) is not. So a shard here is cut from a whole layer, the one that the first
rank of the group has. Its values are those of one process with that rank's seed.

A layer compares what the ranks bring, and gets the first rank's values, when it is made by itself. Made as a part of a
larger one, which has done so for all its parts at once, it is given these ``values``, and sends nothing.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lecture_lib.parallel.agree import agree, broadcast_from_first, facts_of, several_devices
from lecture_lib.parallel.tensor.moves import (
    copy_to_group,
    gather_from_group,
    gather_to_group,
    reduce_scatter_from_group,
    split_to_group,
)
from lecture_lib.parallel.tensor.overlap import linear_of_copy, linear_then_reduce

Values = dict[nn.Parameter, Tensor]  # of whole parameters: those of the first rank of a group


class ColumnShard(nn.Module):
    """This rank's output features of a linear layer. x is already here, the output stays here: nothing moves.

    x: (..., in) -> (..., out / n). For layers that share the move that brings x in, as query, key and value do.

    replicas: neighbouring ranks of the group that hold the same shard, when there are more ranks than shards; this
    rank's are given as a group of its own. The gradient of the weight is summed over them: 2(r-1)/r of its bytes, r
    ranks. options: those of a layer made from this one, on which the ranks must agree too.

    Raises ValueError, the same on every rank, if the ranks cannot share the features equally, or bring layers that
    differ in shape or dtype.
    """

    sharded = {"weight": 0, "bias": 0}  # parameter: the dimension that is split, for gather_full_state_dict

    def __init__(
        self,
        linear: nn.Linear,
        group: ProcessGroup | None = None,
        replicas: ProcessGroup | None = None,
        values: Values | None = None,
        **options,
    ):
        super().__init__()
        who = type(self).__name__
        values = values or values_of_first_rank(who, linear, nn.Linear, group, **options)
        self.group, self.replicas = group, replicas
        self.copies = 1 if replicas is None else dist.get_world_size(replicas)
        shards, shard = dist.get_world_size(group) // self.copies, dist.get_rank(group) // self.copies
        share_equally(who, linear.out_features, "output features", shards)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = shard_of(linear.weight, values, 0, shards, shard)  # (out / n, in)
        self.bias = None if linear.bias is None else shard_of(linear.bias, values, 0, shards, shard)  # (out / n,)

    def forward(self, x: Tensor) -> Tensor:
        if self.replicas is None:
            return F.linear(x, self.weight, self.bias)
        bias = None if self.bias is None else copy_to_group(self.bias, self.replicas)
        return F.linear(x, copy_to_group(self.weight, self.replicas), bias)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.weight.shape[0]} of {self.out_features}"


class ColumnParallelLinear(ColumnShard):
    """A linear layer split by output features. S_x, S_y: bytes of the whole x (..., in) and y (..., out) of n ranks.

    What x is:                                      forward          backward
        (default)        all of x on every rank     nothing          2(n-1)/n S_x   all-reduce, if x needs a gradient
        gather_input     this rank's features       (n-1)/n S_x      (n-1)/n S_x    all-gather, reduce-scatter
        sequence_dim     this rank's slice along    (n-1)/n S_x      (n-1)/n S_x    all-gather, reduce-scatter
                         that dimension
    What y is:
        (default)        this rank's features       nothing          nothing
        gather_output    all of y on every rank     (n-1)/n S_y      nothing        all-gather

    The all-reduce of the gradient of x runs while the gradient of the weight is computed.
    """

    def __init__(
        self,
        linear: nn.Linear,
        group: ProcessGroup | None = None,
        *,
        gather_input: bool = False,
        gather_output: bool = False,
        sequence_dim: int | None = None,
        values: Values | None = None,
    ):
        options = {"gather_input": gather_input, "gather_output": gather_output, "sequence_dim": sequence_dim}
        super().__init__(linear, group, values=values, **options)
        if gather_input and sequence_dim is not None:
            raise ValueError(
                "ColumnParallelLinear: x is split by features (gather_input) or along sequence_dim; pass one."
            )
        self.gather_dim = -1 if gather_input else sequence_dim
        self.gather_output = gather_output

    def forward(self, x: Tensor) -> Tensor:
        if self.gather_dim is None:
            y = linear_of_copy(x, self.weight, self.bias, self.group)
        else:
            y = F.linear(gather_to_group(x, self.gather_dim, self.group), self.weight, self.bias)  # (..., out / n)
        return gather_from_group(y, -1, self.group) if self.gather_output else y


class RowParallelLinear(nn.Module):
    """A linear layer split by input features. S_x, S_y: bytes of the whole x (..., in) and y (..., out) of n ranks.

    What x is:                                      forward          backward
        (default)        this rank's features       nothing          nothing
        split_input      all of x on every rank     nothing          (n-1)/n S_x      all-gather, if x needs a gradient
    What y is:
        (default)        all of y on every rank     2(n-1)/n S_y     nothing          all-reduce
        sequence_dim     this rank's slice along    (n-1)/n S_y      (n-1)/n S_y      reduce-scatter, all-gather
                         that dimension

    The bias is added once, to the sum. With sequence_dim each rank adds it to its own slice, so its gradient is summed
    over the ranks, 2(n-1)/n of its bytes. chunks: the rows of x in so many parts; the all-reduce of one runs while the
    next is multiplied: as many bytes, ``chunks`` times as many calls.

    Raises ValueError, the same on every rank, if the ranks cannot share the features equally, or bring layers that
    differ in shape or dtype.
    """

    sharded = {"weight": 1}

    def __init__(
        self,
        linear: nn.Linear,
        group: ProcessGroup | None = None,
        *,
        split_input: bool = False,
        sequence_dim: int | None = None,
        chunks: int = 1,
        values: Values | None = None,
    ):
        super().__init__()
        options = {"split_input": split_input, "sequence_dim": sequence_dim, "chunks": chunks}
        values = values or values_of_first_rank("RowParallelLinear", linear, nn.Linear, group, **options)
        if chunks < 1 or (chunks > 1 and sequence_dim is not None):
            raise ValueError(
                f"RowParallelLinear: chunks={chunks} cut an all-reduce; use 1, or more without sequence_dim."
            )
        n, rank = dist.get_world_size(group), dist.get_rank(group)
        share_equally("RowParallelLinear", linear.in_features, "input features", n)
        self.group, self.split_input, self.sequence_dim, self.chunks = group, split_input, sequence_dim, chunks
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = shard_of(linear.weight, values, 1, n, rank)  # (out, in / n)
        self.bias = None if linear.bias is None else shard_of(linear.bias, values, 0, 1, 0)  # (out,) on every rank

    def forward(self, x: Tensor) -> Tensor:
        if self.split_input:
            x = split_to_group(x, -1, self.group)  # (..., in) -> (..., in / n)
        bias = self.bias
        if self.sequence_dim is None:
            y = linear_then_reduce(x, self.weight, self.group, self.chunks)
        else:
            y = reduce_scatter_from_group(F.linear(x, self.weight), self.sequence_dim, self.group)
            bias = None if bias is None else copy_to_group(bias, self.group)
        return y if bias is None else y + bias

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} of {self.in_features} -> {self.out_features}"


# ---- from a whole layer ----------------------------------------------------------------------------------------------


def values_of_first_rank(who: str, whole: nn.Module, kind: type, group: ProcessGroup | None, **options) -> Values:
    """What the first rank of the group has. All ranks bring a ``kind`` of the same shapes and dtypes, and the same
    options, or all raise one ValueError."""
    if isinstance(whole, kind):
        facts = [*(f"{name}={value}" for name, value in options.items()), *facts_of(whole)]
        agree(who, facts, group, several_devices(whole.named_parameters()))
    else:
        agree(who, [], group, f"brought a {type(whole).__name__}, where {kind.__name__} is needed.")
    return from_first_rank(whole, group)


def from_first_rank(whole: nn.Module, group: ProcessGroup | None) -> Values:
    """All parameters as the first rank of the group has them, in new tensors. It sends S bytes, as do all others but
    the last; one broadcast for each dtype."""
    values = {parameter: parameter.detach().clone() for parameter in whole.parameters()}
    if dist.get_world_size(group) > 1 and values:
        broadcast_from_first(list(values.values()), group)
    return values


def share_equally(who: str, count: int, what: str, ranks: int) -> None:
    if count % ranks:
        raise ValueError(
            f"{who}: {count} {what} cannot be shared equally by {ranks} ranks; take fewer ranks, or "
            f"a multiple of {ranks}, such as {count + -count % ranks}."
        )


def shard_of(whole: nn.Parameter, values: Values, dim: int, shards: int, shard: int) -> nn.Parameter:
    """One of ``shards`` equal slices of a parameter along ``dim``; frozen if the whole is."""
    own = values[whole].chunk(shards, dim)[shard]
    return nn.Parameter(own.clone(memory_format=torch.contiguous_format), requires_grad=whole.requires_grad)
