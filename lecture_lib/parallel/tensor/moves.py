"""How a tensor gets into a part of the model where every rank computes something else, and out of it again.

n ranks, S bytes in the whole tensor. "To the group" leads in, "from the group" leads out:

    into the parallel part   forward      backward         out of it                   forward          backward
    copy_to_group            nothing      all-reduce       reduce_from_group           all-reduce       nothing
    split_to_group           own slice    all-gather       gather_from_group           all-gather       own slice
    gather_to_group          all-gather   reduce-scatter   reduce_scatter_from_group   reduce-scatter   all-gather

    bytes that a rank sends:   all-reduce 2(n-1)/n S   all-gather (n-1)/n S   reduce-scatter (n-1)/n S   else 0

In each line one is the backward of the other. copy and reduce are f and g of Megatron-LM (Shoeybi et al. 2019, section
3, figure 3); gather_to and reduce_scatter_from are g and g-bar of sequence parallelism (Korthikanti et al. 2022,
Reducing Activation Recomputation in Large Transformer Models, section 4.2.2).

What makes them right: outside, all ranks hold the same tensor and the same gradient, or each its slice of both. Inside,
each rank's gradient is what its own part adds to the whole gradient; so on the way back it is summed where it leaves
the part. The two all-gathers differ in just that: after gather_from_group all ranks compute the same, and each keeps
its slice of the gradient; after gather_to_group each computes something else, and the slices are sums.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def copy_to_group(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """x, the same on all ranks, as it is. Backward: the gradient is summed over the ranks, 2(n-1)/n S.

    For activations, and for a weight that all ranks hold alike and use on different data.
    """
    return _Move.apply(x, _keep, partial(_all_reduce, group=group))


def reduce_from_group(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """The sum of all ranks' x, as a new tensor: 2(n-1)/n S. Backward: nothing moves."""
    return _Move.apply(x, partial(_all_reduce, group=group), _keep)


def split_to_group(x: Tensor, dim: int, group: ProcessGroup | None = None) -> Tensor:
    """This rank's slice of x, which is the same on all ranks, along ``dim``. Backward: all-gather, (n-1)/n S.

    Raises ValueError if the ranks cannot share ``dim`` equally.
    """
    return _Move.apply(x, partial(_own_slice, dim=dim, group=group), partial(_all_gather, dim=dim, group=group))


def gather_from_group(x: Tensor, dim: int, group: ProcessGroup | None = None) -> Tensor:
    """All ranks' x, side by side along ``dim``: (n-1)/n S, S all of it. Backward: each takes its slice."""
    return _Move.apply(x, partial(_all_gather, dim=dim, group=group), partial(_own_slice, dim=dim, group=group))


def gather_to_group(x: Tensor, dim: int, group: ProcessGroup | None = None) -> Tensor:
    """All ranks' x, side by side along ``dim``: (n-1)/n S, S all of it. Backward: reduce-scatter, as much."""
    return _Move.apply(x, partial(_all_gather, dim=dim, group=group), partial(_reduce_scatter, dim=dim, group=group))


def reduce_scatter_from_group(x: Tensor, dim: int, group: ProcessGroup | None = None) -> Tensor:
    """This rank's slice along ``dim`` of the sum of all ranks' x: (n-1)/n S. Backward: all-gather, as much.

    Raises ValueError if the ranks cannot share ``dim`` equally.
    """
    return _Move.apply(x, partial(_reduce_scatter, dim=dim, group=group), partial(_all_gather, dim=dim, group=group))


class _Move(torch.autograd.Function):
    """There in the forward pass, back in the backward pass, and there again in the backward of the backward."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.there, ctx.back = there, back
        return there(x)

    @staticmethod
    def backward(ctx, grad):
        return _Move.apply(grad, ctx.back, ctx.there), None, None


# ---- the same without autograd ---------------------------------------------------------------------------------------


def _keep(x: Tensor) -> Tensor:
    return x


def _all_reduce(x: Tensor, group) -> Tensor:
    if dist.get_world_size(group) == 1:
        return x
    total = x.clone(memory_format=torch.contiguous_format)  # x may be needed elsewhere
    dist.all_reduce(total, group=group)
    return total


def _own_slice(x: Tensor, dim: int, group) -> Tensor:
    n = _ranks_that_share(x, dim, group)
    return x.chunk(n, dim)[dist.get_rank(group)].clone() if n > 1 else x  # a view would keep all of x in memory


def _all_gather(x: Tensor, dim: int, group) -> Tensor:  # (..., k, ...) -> (..., n k, ...)
    n, dim = dist.get_world_size(group), dim % x.dim()
    if n == 1:
        return x
    slices = x.new_empty(n, *x.shape)
    dist.all_gather_single(slices.flatten(0, 1), x.contiguous(), group=group)
    return slices.movedim(0, dim).flatten(dim, dim + 1)  # a copy, unless dim is 0


def _reduce_scatter(x: Tensor, dim: int, group) -> Tensor:  # (..., n k, ...) -> (..., k, ...)
    n, dim = _ranks_that_share(x, dim, group), dim % x.dim()
    if n == 1:
        return x
    slices = x.unflatten(dim, (n, -1)).movedim(dim, 0).contiguous()  # (n, ..., k, ...), a copy, unless dim is 0
    own = x.new_empty(slices.shape[1:])
    dist.reduce_scatter_single(own, slices.flatten(0, 1), group=group)
    return own


def _ranks_that_share(x: Tensor, dim: int, group) -> int:
    """How many ranks share ``dim`` of x. Raises ValueError if they cannot share it equally."""
    n = dist.get_world_size(group)
    if x.shape[dim] % n:
        raise ValueError(
            f"{n} ranks cannot share dimension {dim % x.dim()} of a tensor of shape {tuple(x.shape)} equally; choose a "
            f"multiple of {n}, such as {x.shape[dim] + -x.shape[dim] % n}."
        )
    return n
