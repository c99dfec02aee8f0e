"""Recursive doubling: partners 1, 2, 4, ... apart exchange all they have. log2(n) steps, and nobody is idle.

In step k ranks whose numbers differ in bit k are partners. Where n is no power of two, the ranks that are too many give
their tensor to a neighbour first and get the result from it in the end.
Source: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH, 2005, sections 4.
"""

from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from lecture_lib.collectives.agreement import collective
from lecture_lib.collectives.exchange import accumulate, average, exchange, place, split


@collective
def recursive_doubling_all_reduce(
    tensor: Tensor, op: ReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None
) -> None:
    """log2 n steps; each rank sends log2(n) messages of S bytes. Where n is no power of two, p is the next lower one:
    log2(p) + 2 steps, and the n - p ranks that fold in send S once."""
    n, rank = place(group)
    incoming = tensor.new_empty(tensor.shape)
    me, p = fold(tensor, incoming, op, group)
    if me is not None:
        distance = 1
        while distance < p:
            partner = unfolded(me ^ distance, n, p)
            exchange(group, sends=[(tensor, partner)], receives=[(incoming, partner)])
            accumulate(tensor, incoming, op)
            distance *= 2
    unfold(tensor, me, group)
    average(tensor, op, n)


@collective
def recursive_doubling_all_gather(output: Tensor, input: Tensor, group: ProcessGroup | None = None) -> None:
    """Each rank collects from the rank 1, 2, 4, ... ahead of it all that one has. Any n works, since ranks count around
    the circle (Bruck et al., Efficient algorithms for all-to-all communications, 1997, section 4).

    input (k, ...) -> output (n k, ...). ceil(log2 n) steps; with an input of S bytes each rank sends (n-1) S.
    """
    n, rank = place(group)
    blocks = output.new_empty(n, input.numel())  # mine first, then those of the ranks ahead of me
    blocks[0].copy_(input.view(-1))
    have = 1
    while have < n:
        more = min(have, n - have)
        behind, ahead = (rank - have) % n, (rank + have) % n
        exchange(group, sends=[(blocks[:more], behind)], receives=[(blocks[have : have + more], ahead)])
        have += more
    for i, part in enumerate(split(output, n)):
        part.copy_(blocks[(i - rank) % n])


# ---- when n is no power of two ---------------------------------------------------------------------------------------


def fold(tensor: Tensor, incoming: Tensor, op: ReduceOp, group) -> tuple[int | None, int]:
    """Of the first 2(n-p) ranks, p the highest power of two up to n, each even one gives its tensor to the odd one
    beside it. Returns (number among the p that go on, or None; p)."""
    n, rank = place(group)
    p = 1 << (n.bit_length() - 1)
    extra = n - p
    if rank >= 2 * extra:
        return rank - extra, p
    if rank % 2 == 0:
        exchange(group, sends=[(tensor, rank + 1)])
        return None, p
    exchange(group, receives=[(incoming, rank - 1)])
    accumulate(tensor, incoming, op)
    return rank // 2, p


def unfolded(number: int, n: int, p: int) -> int:
    """The rank behind a number among those that go on."""
    extra = n - p
    return 2 * number + 1 if number < extra else number + extra


def unfold(tensor: Tensor, me: int | None, group) -> None:
    """The ranks that had folded in get the result."""
    n, rank = place(group)
    if me is None:
        exchange(group, receives=[(tensor, rank + 1)])
    elif me < n - (1 << (n.bit_length() - 1)):
        exchange(group, sends=[(tensor, rank - 1)])
