"""Ring attention: keys and values go around, and each rank's queries meet them block by block.

Each rank keeps its queries. In n steps it sees the keys and values of all ranks: while it works with one rank's, it
passes them on to its right neighbour, and receives the next from its left one (Liu et al. 2023, Ring Attention with
Blockwise Transformers, section 3). The blocks are put together as they come (block.py), so the order does not matter.

On the way back they go around again. The gradients of q stay. Those of k and v belong to the rank that k and v are
from: they follow them around the ring, each rank adds its part, and after n - 1 passes they are at home.

    step 0: rank 0 has k_0    1: k_3, and adds to dk_3    2: k_2, and adds to dk_2    3: k_1, and adds to dk_1
            and keeps dk_0       dk_3 on to rank 1           dk_2 on to rank 1           dk_1 on to rank 1: at home
"""

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import P2POp, ProcessGroup

from lecture_lib.parallel.context.block import attend, flash_attend, flash_gradients, gradients, merge
from lecture_lib.parallel.context.sequence import Layout, agreed, blocks, zigzag
from lecture_lib.trace import region


@agreed
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    group: ProcessGroup | None = None,
    layout: Layout = zigzag,
    *,
    tile: int | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v over the tokens of all ranks, for the queries of this one.

    q: (batch, heads, seq / n, head_dim), k and v: (batch, kv_heads, seq / n, head_dim), one dtype -> as q. What rank r
    holds are the chunks layout(n)[r] of 2n, one after the other. Sums over blocks are in float32, or float64.

    tile: a number computes the formulas of block.py, in blocks of at most so many queries and keys. None is the fastest
    that is here: torch's flash kernel for the CPU, a chunk by a chunk; elsewhere tiles of 1024.

    Sends, S_k bytes in all ranks' k: forward (n-1)/n 2 S_k in n - 1 messages, of k and v together; backward as much in
    n - 1 messages for k and v, and as much in n - 1 messages for their gradients, in float32. Keeps for the backward
    pass q, k, v, the output, and L: batch x heads x seq / n numbers. Besides, it holds at most two ranks' k and v, and
    on the way back their gradients four times: those for the keys at work, those that leave and that arrive, its own.

    Raises ValueError, the same on every rank, for shapes that do not fit, or that differ between ranks.
    """
    return _Ring.apply(q, k, v, causal, group, layout, tile)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, group, layout, tile):
        n, rank, size = dist.get_world_size(group), dist.get_rank(group), q.shape[2] // 2
        q, chunks, (compute, backward, tile) = q.contiguous(), layout(n), kernels(q, tile)
        o = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))
        L = o.new_full(o.shape[:-1], -math.inf)  # nothing seen yet

        kv = torch.stack((k, v))  # (2, batch, kv_heads, seq / n, head_dim)
        for step in range(n):
            owner = (rank - step) % n
            following = pass_on(kv if step < n - 1 else None, group)
            with following as next_kv, region(f"keys of rank {owner}"), torch.autocast(q.device.type, enabled=False):
                for rows, columns, diagonal in blocks(chunks[rank], chunks[owner], size, tile, causal):
                    block = compute(q[..., rows, :], *kv[..., columns, :], diagonal)
                    merge(o[..., rows, :], L[..., rows], *block)
            kv = next_kv

        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, L)
        ctx.options = causal, group, layout, backward, tile
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        q, k, v, o, L = ctx.saved_tensors
        causal, group, layout, compute, tile = ctx.options
        n, rank, size = dist.get_world_size(group), dist.get_rank(group), q.shape[2] // 2
        g, chunks, dq = g.contiguous(), layout(n), torch.zeros_like(q, dtype=L.dtype)

        kv, own, leaving = torch.stack((k, v)), None, None
        for step in range(n):
            owner = (rank - step) % n
            with (
                pass_on(kv if step < n - 1 else None, group) as next_kv,
                pass_on(leaving, group) as arrived,
                region(f"gradients of keys of rank {owner}"),
                torch.autocast(q.device.type, enabled=False),
            ):
                dkv = torch.zeros_like(kv, dtype=L.dtype)
                for rows, columns, diagonal in blocks(chunks[rank], chunks[owner], size, tile, causal):
                    mine = g[..., rows, :], q[..., rows, :]
                    block = compute(*mine, *kv[..., columns, :], o[..., rows, :], L[..., rows], diagonal)
                    for total, part in zip((dq[..., rows, :], *dkv[..., columns, :]), block, strict=True):
                        total += part
            if step == 0:
                own = dkv  # is at home, and is added in the end
            else:
                leaving = dkv if arrived is None else dkv.add_(arrived)
            kv = next_kv

        with pass_on(leaving, group) as arrived:
            pass
        if arrived is not None:
            own += arrived
        dk, dv = own.to(k.dtype)
        return dq.to(q.dtype), dk, dv, None, None, None, None


def kernels(q: Tensor, tile: int | None) -> tuple[Callable, Callable, int]:
    """What computes a block, forward and backward, and how many queries and keys it has at most."""
    if tile is None and q.device.type == "cpu":
        return flash_attend, flash_gradients, q.shape[2] // 2  # a chunk
    return attend, gradients, tile or 1024


@contextlib.contextmanager
def pass_on(tensor: Tensor | None, group: ProcessGroup | None) -> Iterator[Tensor | None]:
    """During the block, send to the right neighbour and receive as much from the left one: what is given is there when
    the block has ended. Its end is waited for even if the block fails: half a message would be met by the next one.
    Nothing is sent of None."""
    if tensor is None:
        yield None
        return
    n, rank, arriving = dist.get_world_size(group), dist.get_rank(group), torch.empty_like(tensor)
    transfers = [
        P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % n),
        P2POp(dist.irecv, arriving, group=group, group_peer=(rank - 1) % n),
    ]
    works = dist.batch_isend_irecv(transfers)
    try:
        yield arriving
    finally:
        for work in works:
            work.wait()
