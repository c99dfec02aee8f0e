"""Recursive halving: partners n/2, n/4, ... apart exchange half, a quarter, ... of the tensor.

As few steps as a tree and as few bytes as a ring, for n a power of two. Each step's partner is another one, though, so
the network must be as fast between far ranks as between neighbours.
Source: Rabenseifner, Optimization of Collective Reduction Operations, 2004, section 4; Thakur et al., 2005.
"""

from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from lecture_lib.collectives.agreement import collective
from lecture_lib.collectives.doubling import fold, unfold, unfolded
from lecture_lib.collectives.exchange import accumulate, average, exchange, place


@collective
def halving_doubling_all_reduce(tensor: Tensor, op: ReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None) -> None:
    """Reduce-scatter by halving, then all-gather by doubling.

    2 log2(n) steps; each rank sends 2 log2(n) messages and 2(n-1)/n S. Where n is no power of two, p is the next lower
    one: 2 log2(p) + 2 steps, 2(p-1)/p S, and S more between the ranks that fold in and their neighbours.
    """
    n, _ = place(group)
    flat = tensor.view(-1)
    incoming = flat.new_empty(flat.shape)
    me, p = fold(flat, incoming, op, group)
    if me is not None:
        ends = [flat.numel() * i // p for i in range(p + 1)]  # piece i of p is flat[ends[i]:ends[i + 1]]
        _halve(flat, incoming, ends, me, n, p, op, group)
        average(flat[ends[me] : ends[me + 1]], op, n)
        _double(flat, ends, me, n, p, group)
    unfold(flat, me, group)


@collective
def recursive_halving_reduce_scatter(
    output: Tensor, input: Tensor, op: ReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None
) -> None:
    """input (n k, ...) -> output (k, ...). log2(n) steps; with an input of S bytes each rank sends (n-1)/n S.

    Where n is no power of two, ranks fold in first, and their neighbours reduce two slices, one for each of them.
    """
    n, rank = place(group)
    flat, k = input.clone().view(-1), output.numel()
    incoming = flat.new_empty(flat.shape)
    me, p = fold(flat, incoming, op, group)
    extra = n - p
    if me is not None:
        ends = [k * (2 * i if i < extra else i + extra) for i in range(p + 1)]
        _halve(flat, incoming, ends, me, n, p, op, group)
    mine = flat[k * rank : k * (rank + 1)]
    if me is None:
        exchange(group, receives=[(mine, rank + 1)])
    elif me < extra:
        exchange(group, sends=[(flat[k * (rank - 1) : k * rank], rank - 1)])
    output.view(-1).copy_(mine)
    average(output, op, n)


def _halve(flat: Tensor, incoming: Tensor, ends: list[int], me: int, n: int, p: int, op: ReduceOp, group) -> None:
    """Afterwards flat[ends[me]:ends[me + 1]] is whole. ``me`` is one of p, a power of two."""
    low, high = 0, p  # pieces that are still mine
    while high - low > 1:
        half = (high - low) // 2
        middle = low + half
        partner = unfolded(me ^ half, n, p)
        (keep, give) = ((low, middle), (middle, high)) if me < middle else ((middle, high), (low, middle))
        mine, theirs = flat[ends[keep[0]] : ends[keep[1]]], flat[ends[give[0]] : ends[give[1]]]
        arriving = incoming[: mine.numel()]
        exchange(group, sends=[(theirs, partner)], receives=[(arriving, partner)])
        accumulate(mine, arriving, op)
        low, high = keep


def _double(flat: Tensor, ends: list[int], me: int, n: int, p: int, group) -> None:
    """The way back: each exchange doubles what is whole here."""
    low, distance = me, 1  # pieces low to low + distance are whole
    while distance < p:
        partner = unfolded(me ^ distance, n, p)
        other = low ^ distance
        have = flat[ends[low] : ends[low + distance]]
        missing = flat[ends[other] : ends[other + distance]]
        exchange(group, sends=[(have, partner)], receives=[(missing, partner)])
        low, distance = min(low, other), 2 * distance
