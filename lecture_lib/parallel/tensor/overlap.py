"""A matmul and its collective at the same time.

A collective that nobody waits for yet costs nothing but the link. There are two places where there is something else to
do meanwhile:

- on the way back through a column layer, the gradient of x has to be summed over the ranks before the layer below can
  go on, but the gradient of the weight needs no other rank (Megatron-LM calls it "async tensor-model-parallel
  all-reduce");
- on the way through a row layer, the all-reduce of the first rows can run while the next rows are multiplied.

Both functions move the bytes of the plain ones: only the order differs. On a GPU, NCCL has its own stream, and the
matmul leaves it a few multiprocessors; on a CPU, gloo's threads need a core of their own to gain from it.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup


def linear_of_copy(x: Tensor, weight: Tensor, bias: Tensor | None = None, group: ProcessGroup | None = None) -> Tensor:
    """``F.linear(copy_to_group(x, group), weight, bias)``, with the all-reduce beside the weight's gradient.

    x: (..., in), weight: (out / n, in), bias: (out / n,) -> (..., out / n). Backward, if x needs a gradient: 2(n-1)/n S
    for the S bytes of x.
    """
    return _LinearOfCopy.apply(*_as_autocast_would(x, weight, bias), group)


def linear_then_reduce(x: Tensor, weight: Tensor, group: ProcessGroup | None = None, chunks: int = 1) -> Tensor:
    """``reduce_from_group(F.linear(x, weight), group)``, summed in place, ``chunks`` parts of the rows one by one.

    x: (..., in / n), weight: (out, in / n) -> (..., out). Forward: 2(n-1)/n S for the S bytes of the output, in
    ``chunks`` calls (fewer where there are fewer rows).
    """
    return _LinearThenReduce.apply(*_as_autocast_would(x, weight), group, chunks)


class _LinearOfCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # (..., out / n)
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = work = None
        if need_x:
            grad_x = (_rows(grad) @ weight).view(x.shape)  # (..., in), this rank's part of the sum
            work = _start_all_reduce(grad_x, ctx.group)
        if need_weight:
            grad_weight = _rows(grad).t() @ _rows(x)  # (out / n, in)
        if need_bias:
            grad_bias = _rows(grad).sum(0)
        if work is not None:
            work.wait()
        return grad_x, grad_weight, grad_bias, None


class _LinearThenReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, group, chunks):
        ctx.save_for_backward(x, weight)
        y = x.new_empty(*x.shape[:-1], weight.shape[0])  # (..., out)
        works = []
        for rows, sums in zip(_rows(x).chunk(chunks), _rows(y).chunk(chunks), strict=True):
            torch.mm(rows, weight.t(), out=sums)
            works.append(_start_all_reduce(sums, group))
        for work in filter(None, works):
            work.wait()
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # (..., out), the same on all ranks
        x, weight = ctx.saved_tensors
        grad_x = (_rows(grad) @ weight).view(x.shape) if ctx.needs_input_grad[0] else None  # (..., in / n)
        grad_weight = _rows(grad).t() @ _rows(x) if ctx.needs_input_grad[1] else None  # (out, in / n)
        return grad_x, grad_weight, None, None


def _start_all_reduce(x: Tensor, group: ProcessGroup | None) -> dist.Work | None:
    return dist.all_reduce(x, group=group, async_op=True) if dist.get_world_size(group) > 1 else None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])  # (rows, features)


def _as_autocast_would(x: Tensor, *others: Tensor | None) -> list[Tensor | None]:
    """In a region of autocast, what F.linear would cast its arguments to; else as they are."""
    if not torch.is_autocast_enabled(x.device.type):
        return [x, *others]
    dtype = torch.get_autocast_dtype(x.device.type)
    return [None if tensor is None else tensor.to(dtype) for tensor in (x, *others)]
