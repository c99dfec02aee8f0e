"""The tree: after each step twice as many ranks have the data. log2(n) steps instead of n - 1.

The tree is binomial: in step k every rank that has the data sends it 2^k ranks further. Counted from the root, so any
rank can be the root. Few steps, so it wins for small tensors; but the whole tensor travels in each step.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from lecture_lib.collectives.agreement import collective
from lecture_lib.collectives.exchange import accumulate, average, exchange, place, root_in


@collective
def tree_broadcast(tensor: Tensor, src: int = 0, group: ProcessGroup | None = None) -> None:
    """ceil(log2 n) steps and n - 1 messages; the root sends ceil(log2 n) S, all ranks together (n-1) S."""
    _broadcast(tensor, root_in(group, src), group)


@collective
def tree_reduce(tensor: Tensor, dst: int = 0, op: ReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None) -> None:
    """The broadcast backwards. ceil(log2 n) steps and n - 1 messages; every rank but the root sends S. The other ranks
    keep what they had."""
    (_, rank), root = place(group), root_in(group, dst)
    total = tensor if rank == root else tensor.clone()
    _reduce(total, root, op, group)


@collective
def tree_all_reduce(tensor: Tensor, op: ReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None) -> None:
    """Reduce to rank 0, then broadcast from it. 2 ceil(log2 n) steps, 2(n-1) messages and 2(n-1) S in all; the busiest
    rank, 0, sends ceil(log2 n) S and receives as much."""
    _reduce(tensor, 0, op, group)
    _broadcast(tensor, 0, group)


@collective
def tree_scatter(
    tensor: Tensor, scatter_list: list[Tensor] | None = None, src: int = 0, group: ProcessGroup | None = None
) -> None:
    """The root sends half of the pieces to the rank half way round, which does the same with its half, and so on.

    ceil(log2 n) steps and n - 1 messages; the root sends (n-1) S with a piece of S bytes: each piece leaves it once.
    """
    n, rank = place(group)
    root = root_in(group, src)
    v = (rank - root) % n  # place in the tree; the root is 0
    pieces = tensor.new_empty(n, tensor.numel())  # by place in the tree
    if v == 0:
        torch.stack([scatter_list[(root + i) % n].view(-1) for i in range(n)], out=pieces)
    for distance in reversed(_distances(n)):
        if v % (2 * distance) == 0 and v + distance < n:
            exchange(group, sends=[(pieces[v + distance : v + 2 * distance], (rank + distance) % n)])
        elif v % (2 * distance) == distance:
            exchange(group, receives=[(pieces[v : v + distance], (rank - distance) % n)])
    tensor.view(-1).copy_(pieces[v])


@collective
def tree_gather(
    tensor: Tensor, gather_list: list[Tensor] | None = None, dst: int = 0, group: ProcessGroup | None = None
) -> None:
    """The scatter backwards: pieces are collected on the way. ceil(log2 n) steps and n - 1 messages; a rank sends its
    piece of S bytes and those that it has collected, all ranks together at most n/2 log2(n) S."""
    n, rank = place(group)
    root = root_in(group, dst)
    v = (rank - root) % n
    pieces = tensor.new_empty(n, tensor.numel())
    pieces[v].copy_(tensor.view(-1))
    for distance in _distances(n):
        if v % (2 * distance) == 0 and v + distance < n:
            exchange(group, receives=[(pieces[v + distance : v + 2 * distance], (rank + distance) % n)])
        elif v % (2 * distance) == distance:
            exchange(group, sends=[(pieces[v : v + distance], (rank - distance) % n)])
    if v == 0:
        for i in range(n):
            gather_list[(root + i) % n].view(-1).copy_(pieces[i])


def _distances(n: int) -> list[int]:
    """1, 2, 4, ... below n."""
    return [1 << k for k in range((n - 1).bit_length())]


def _broadcast(tensor: Tensor, root: int, group) -> None:
    n, rank = place(group)
    v = (rank - root) % n
    for distance in _distances(n):
        if v < distance and v + distance < n:
            exchange(group, sends=[(tensor, (rank + distance) % n)])
        elif distance <= v < 2 * distance:
            exchange(group, receives=[(tensor, (rank - distance) % n)])


def _reduce(total: Tensor, root: int, op: ReduceOp, group) -> None:
    n, rank = place(group)
    v = (rank - root) % n
    incoming = total.new_empty(total.shape)
    for distance in reversed(_distances(n)):
        if v < distance and v + distance < n:
            exchange(group, receives=[(incoming, (rank + distance) % n)])
            accumulate(total, incoming, op)
        elif distance <= v < 2 * distance:
            exchange(group, sends=[(total, (rank - distance) % n)])
    if v == 0:
        average(total, op, n)
