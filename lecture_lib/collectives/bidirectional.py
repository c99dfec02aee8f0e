"""Two rings at once: half of the tensor goes right, the other half goes left.

Each rank sends as many bytes as on one ring, half of them each way. That pays where a rank has a link of its own to
each neighbour, as in a ring or torus of chips: then each link carries half. Through one port of a switch, or one
network card, all of it passes the same link, and nothing is gained.
"""

from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from lecture_lib.collectives.agreement import collective
from lecture_lib.collectives.exchange import accumulate, average, exchange, place, split


@collective
def bidirectional_ring_all_reduce(
    tensor: Tensor, op: ReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None
) -> None:
    """2(n-1) steps; each rank sends 4(n-1) messages and 2(n-1)/n S, half of it in each direction."""
    n, rank = place(group)
    rings = [split(half, n) for half in split(tensor, 2)]  # 2 of n chunks
    _reduce_scatter(rings, rank, n, op, group)
    for chunks, direction in zip(rings, (1, -1), strict=True):
        average(chunks[(rank + direction) % n], op, n)
    _all_gather(rings, rank, n, group, ahead=1)


@collective
def bidirectional_ring_reduce_scatter(
    output: Tensor, input: Tensor, op: ReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None
) -> None:
    """input (n k, ...) -> output (k, ...). n - 1 steps; with an input of S bytes each rank sends 2(n-1) messages and
    (n-1)/n S, half of it in each direction."""
    n, rank = place(group)
    halves = [split(chunk, 2) for chunk in split(input.clone(), n)]  # n of 2
    rings = [[halves[(i - 1) % n][0] for i in range(n)], [halves[(i + 1) % n][1] for i in range(n)]]
    _reduce_scatter(rings, rank, n, op, group)
    for mine, half in zip(split(output, 2), halves[rank], strict=True):
        mine.copy_(half)
    average(output, op, n)


@collective
def bidirectional_ring_all_gather(output: Tensor, input: Tensor, group: ProcessGroup | None = None) -> None:
    """input (k, ...) -> output (n k, ...). n - 1 steps; with an input of S bytes each rank sends 2(n-1) messages and
    (n-1) S, half of it in each direction."""
    n, rank = place(group)
    chunks = split(output, n)
    chunks[rank].copy_(input.view(-1))
    halves = [split(chunk, 2) for chunk in chunks]  # n of 2
    _all_gather([[half[0] for half in halves], [half[1] for half in halves]], rank, n, group, ahead=0)


def _reduce_scatter(rings: list, rank: int, n: int, op: ReduceOp, group) -> None:
    """Afterwards chunk rank + 1 of the ring to the right and chunk rank - 1 of the ring to the left are whole here."""
    for step in range(n - 1):
        sends, receives, growing = [], [], []
        for chunks, direction in zip(rings, (1, -1), strict=True):
            growing.append(chunks[(rank - direction * (step + 1)) % n])
            sends.append((chunks[(rank - direction * step) % n], (rank + direction) % n))
            receives.append((growing[-1].new_empty(growing[-1].shape), (rank - direction) % n))
        exchange(group, sends=sends, receives=receives)
        for into, (arrived, _) in zip(growing, receives, strict=True):
            accumulate(into, arrived, op)


def _all_gather(rings: list, rank: int, n: int, group, ahead: int) -> None:
    """``ahead``: how far ahead of its own number, in the ring's direction, the chunk is that a rank begins with."""
    for step in range(n - 1):
        sends, receives = [], []
        for chunks, direction in zip(rings, (1, -1), strict=True):
            sends.append((chunks[(rank + direction * (ahead - step)) % n], (rank + direction) % n))
            receives.append((chunks[(rank + direction * (ahead - step - 1)) % n], (rank - direction) % n))
        exchange(group, sends=sends, receives=receives)
