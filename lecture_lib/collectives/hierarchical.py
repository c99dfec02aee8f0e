"""Two levels: within each node, where links are fast, then across nodes, with as few bytes as possible.

Ranks 0 to k-1 are the first node, k to 2k-1 the second, and so on, as torchrun numbers them; k divides n. Unless you
say how many ranks_per_node there are, it is as many as torchrun says (LOCAL_WORLD_SIZE), or all n in a smaller group.
All k ranks of a node send across at the same time, each its own slice, so k network cards work in parallel; and only
2(m-1) steps of an all-reduce cross nodes, m = n/k of them, where a ring over all ranks has 2(n-1).
"""

from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from lecture_lib.collectives.agreement import collective
from lecture_lib.collectives.exchange import accumulate, average, exchange, place, ranks_of_a_node, split


@collective
def hierarchical_all_reduce(
    tensor: Tensor, op: ReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None, ranks_per_node: int | None = None
) -> None:
    """Reduce-scatter within the node, all-reduce across nodes, all-gather within the node, each around a ring.

    2(k-1) + 2(m-1) steps, k ranks per node and m nodes; each rank sends 2(k-1)/k S inside its node and 2(m-1)/m S/k to
    other nodes: 2(n-1)/n S together.
    """
    n, rank = place(group)
    node, across = _levels(n, rank, ranks_per_node)
    slices = split(tensor, len(node))
    _reduce_scatter(slices, node, rank, op, group)
    mine = slices[(node.index(rank) + 1) % len(node)]
    pieces = split(mine, len(across))
    _reduce_scatter(pieces, across, rank, op, group)
    average(pieces[(across.index(rank) + 1) % len(across)], op, n)
    _all_gather(pieces, across, rank, group, ahead=1)
    _all_gather(slices, node, rank, group, ahead=1)


@collective
def hierarchical_all_gather(
    output: Tensor, input: Tensor, group: ProcessGroup | None = None, ranks_per_node: int | None = None
) -> None:
    """All-gather across nodes first, then within the node, so that each byte enters a node once.

    input (rows, ...) -> output (n rows, ...). (m-1) + m(k-1) steps, one message each; with an input of S bytes each
    rank sends (m-1) S to other nodes and (k-1) m S inside its node: (n-1) S together.
    """
    n, rank = place(group)
    node, across = _levels(n, rank, ranks_per_node)
    blocks = split(output, n)
    blocks[rank].copy_(input.view(-1))
    _all_gather([blocks[other] for other in across], across, rank, group)
    for i in range(len(across)):  # node i's blocks, of which each rank of my node has one
        _all_gather(list(blocks[i * len(node) : (i + 1) * len(node)]), node, rank, group)


def _levels(n: int, rank: int, ranks_per_node: int | None) -> tuple[list[int], list[int]]:
    """The ranks of my node, and the ranks at my place in each node."""
    k = ranks_per_node or ranks_of_a_node(n)
    return list(range(rank - rank % k, rank - rank % k + k)), list(range(rank % k, n, k))


def _reduce_scatter(chunks: list[Tensor], ring: list[int], rank: int, op: ReduceOp, group) -> None:
    """Around the ring of these ranks. Chunk i + 1 is whole on the ring's rank i."""
    n, i = len(ring), ring.index(rank)
    for step in range(n - 1):
        growing = chunks[(i - step - 1) % n]
        arriving = growing.new_empty(growing.shape)
        outgoing = chunks[(i - step) % n]
        exchange(group, sends=[(outgoing, ring[(i + 1) % n])], receives=[(arriving, ring[i - 1])])
        accumulate(growing, arriving, op)


def _all_gather(chunks: list[Tensor], ring: list[int], rank: int, group, ahead: int = 0) -> None:
    """Around the ring of these ranks, of which rank i begins with chunk i + ahead."""
    n, i = len(ring), ring.index(rank)
    for step in range(n - 1):
        outgoing, missing = chunks[(i + ahead - step) % n], chunks[(i + ahead - step - 1) % n]
        exchange(group, sends=[(outgoing, ring[(i + 1) % n])], receives=[(missing, ring[i - 1])])
