"""Who computes what, in which order, while every rank computes whole backward passes (B).

With p ranks and m micro-batches, from the schedule that everybody would write first to the one that most train with:

    naive          one micro-batch at a time           1 rank of p works
    gpipe          all forward, then all backward      bubble (p-1)/m of the work, m micro-batches held
    one_f_one_b    backward as soon as possible        same bubble, at most p held
    interleaved    v short stages a rank, not one      bubble (p-1)/(v m), v times as many messages

A bubble is idle time over busy time here, as in the papers; as a share of all time it is x/(1+x): (p-1)/(m+p-1).
"""

from numbers import Integral

from lecture_lib.parallel.pipeline.table import Action, Schedule


def naive(ranks: int, micro_batches: int = 1) -> Schedule:
    """Each micro-batch goes forward and backward through all stages before the next begins: one rank works at once."""
    at_least_one(ranks=ranks, micro_batches=micro_batches)
    rows = [[Action(rank, kind, i) for i in range(micro_batches) for kind in "FB"] for rank in range(ranks)]
    return schedule("naive", rows)


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """All forward passes, then all backward passes (Huang et al. 2019, GPipe, section 2.3).

    Every rank holds all m micro-batches when the last forward pass is done. The paper draws the backward passes in
    reverse order; here, as in torch, they follow the forward order: time and memory are the same.
    """
    at_least_one(ranks=ranks, micro_batches=micro_batches)
    rows = [[Action(rank, kind, i) for kind in "FB" for i in range(micro_batches)] for rank in range(ranks)]
    return schedule("gpipe", rows)


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """After p-1-r forward passes, rank r does one forward, one backward in turn (Narayanan et al. 2021, Efficient
    large-scale language model training on GPU clusters using Megatron-LM, section 2.2.1; PipeDream-Flush).

    Rank r then holds min(m, p-r) micro-batches, however many there are.
    """
    return interleaved(ranks, micro_batches, virtual=1, name="one_f_one_b")


def interleaved(ranks: int, micro_batches: int, virtual: int = 2, name: str = "interleaved") -> Schedule:
    """1F1B with v stages on each rank: rank r holds stages r, r+p, r+2p, ... (Narayanan et al. 2021, section 2.2.2).

    Micro-batches go in rounds of p: a round passes through a rank's first stage, then through its second, and so on.
    The paper asks for a multiple of p micro-batches. Here, as in torch, other numbers give rounds of a little more than
    p, or one shorter round, and a larger bubble.
    """
    at_least_one(ranks=ranks, micro_batches=micro_batches, virtual=virtual)
    p, m, v = ranks, micro_batches, virtual
    rounds = _shares(m, max(1, m // p))
    order = [(part, i) for round_ in rounds for part in range(v) for i in round_]  # in which a rank goes forward
    rows = []
    for rank in range(p):
        forward = [Action(part * p + rank, "F", i) for part, i in order]
        backward = [Action((v - 1 - part) * p + rank, "B", i) for part, i in order]
        # The last rank can begin to go backward when it has brought one micro-batch through all its stages; each rank
        # before it hands two more on by then: one for the way there, one for the way back.
        warm_up = (v - 1) * len(rounds[0]) + (2 if v > 1 else 1) * (p - 1 - rank)
        rows.append(_alternate(forward, backward, warm_up))
    return schedule(name, rows)


def schedule(name: str, rows) -> Schedule:
    """The table of these rows, one a rank: any iterables of actions."""
    return Schedule(name, tuple(map(tuple, rows)))


def _alternate(forward: list, backward: list, warm_up: int) -> list:
    """``warm_up`` forward, then one forward, one backward in turn, then what is left backward."""
    warm_up = min(warm_up, len(forward))
    steady = [action for pair in zip(forward[warm_up:], backward) for action in pair]
    return [*forward[:warm_up], *steady, *backward[len(forward) - warm_up :]]


def _shares(count: int, parts: int) -> list[range]:
    """0 to count - 1 in neighbouring ranges, the first of them longer by one where they cannot all be equal."""
    each, left = divmod(count, parts)
    cuts = [each * i + min(i, left) for i in range(parts + 1)]
    return [range(a, b) for a, b in zip(cuts, cuts[1:])]


def at_least_one(**counts: int) -> None:
    for name, count in counts.items():
        if not isinstance(count, Integral) or count < 1:
            raise ValueError(f"{name}={count!r}: a pipeline needs at least one, and a whole number of them.")
