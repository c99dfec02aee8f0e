"""Everything to one rank and back: right, short, and as slow as that one rank.

n ranks, a tensor of S bytes. The root's link carries (n-1) S in each direction while all others wait.
"""

from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from lecture_lib.collectives.agreement import collective
from lecture_lib.collectives.exchange import accumulate, average, exchange, place, root_in, split


@collective
def naive_broadcast(tensor: Tensor, src: int = 0, group: ProcessGroup | None = None) -> None:
    """The root sends its tensor to each other rank. n - 1 messages; the root sends (n-1) S, the others nothing."""
    _broadcast(tensor, root_in(group, src), group)


@collective
def naive_scatter(
    tensor: Tensor, scatter_list: list[Tensor] | None = None, src: int = 0, group: ProcessGroup | None = None
) -> None:
    """The root sends each rank its own tensor. n - 1 messages; the root sends (n-1) S, the others nothing."""
    (n, rank), root = place(group), root_in(group, src)
    if rank == root:
        tensor.copy_(scatter_list[rank])
        exchange(group, sends=[(scatter_list[other], other) for other in range(n) if other != rank])
    else:
        exchange(group, receives=[(tensor, root)])


@collective
def naive_gather(
    tensor: Tensor, gather_list: list[Tensor] | None = None, dst: int = 0, group: ProcessGroup | None = None
) -> None:
    """Each rank sends its tensor to the root. n - 1 messages; the root sends nothing, the others S each."""
    (n, rank), root = place(group), root_in(group, dst)
    if rank == root:
        gather_list[rank].copy_(tensor)
        exchange(group, receives=[(gather_list[other], other) for other in range(n) if other != rank])
    else:
        exchange(group, sends=[(tensor, root)])


@collective
def naive_reduce(tensor: Tensor, dst: int = 0, op: ReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None) -> None:
    """Each rank sends its tensor to the root, which adds them up. n - 1 messages; the root sends nothing, the others S
    each. The other ranks keep what they had."""
    _reduce(tensor, root_in(group, dst), op, group)


@collective
def naive_all_reduce(tensor: Tensor, op: ReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None) -> None:
    """Reduce to rank 0, then broadcast from it. 2(n-1) messages; rank 0 sends (n-1) S, the others S each."""
    _reduce(tensor, 0, op, group)
    _broadcast(tensor, 0, group)


@collective
def naive_all_gather(output: Tensor, input: Tensor, group: ProcessGroup | None = None) -> None:
    """Gather to rank 0, then broadcast from it. 2(n-1) messages; with an input of S bytes rank 0 sends (n-1) n S, the
    others S.

    input (k, ...) -> output (n k, ...), the ranks' inputs one after the other.
    """
    n, rank = place(group)
    parts = split(output, n)
    parts[rank].copy_(input.view(-1))
    if rank == 0:
        exchange(group, receives=[(parts[other], other) for other in range(1, n)])
    else:
        exchange(group, sends=[(parts[rank], 0)])
    _broadcast(output, 0, group)


@collective
def naive_reduce_scatter(
    output: Tensor, input: Tensor, op: ReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None
) -> None:
    """Reduce to rank 0, then scatter from it. 2(n-1) messages; with an input of S bytes rank 0 sends (n-1)/n S,
    the others S.

    input (n k, ...) -> output (k, ...), slice r of the sum on rank r.
    """
    n, rank = place(group)
    total = input.clone()
    _reduce(total, 0, op, group)
    parts = split(total, n)
    if rank == 0:
        exchange(group, sends=[(parts[other], other) for other in range(1, n)])
    else:
        exchange(group, receives=[(parts[rank], 0)])
    output.view(-1).copy_(parts[rank])


@collective
def naive_all_to_all(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: ProcessGroup | None = None,
) -> None:
    """Every rank sends a piece to every other, all at the same time. n(n-1) messages; each rank sends (n-1)/n S if the
    pieces are equal.

    input (rows, ...), of which the first input_split_sizes[0] rows go to rank 0, and so on -> output (rows, ...).
    """
    n, rank = place(group)
    outgoing = input.split(input_split_sizes or [input.shape[0] // n] * n)
    incoming = output.split(output_split_sizes or [output.shape[0] // n] * n)
    incoming[rank].copy_(outgoing[rank])
    others = [other for other in range(n) if other != rank]
    exchange(
        group,
        sends=[(outgoing[other], other) for other in others],
        receives=[(incoming[other], other) for other in others],
    )


def _broadcast(tensor: Tensor, root: int, group) -> None:
    n, rank = place(group)
    if rank == root:
        exchange(group, sends=[(tensor, other) for other in range(n) if other != root])
    else:
        exchange(group, receives=[(tensor, root)])


def _reduce(tensor: Tensor, root: int, op: ReduceOp, group) -> None:
    n, rank = place(group)
    if rank != root:
        return exchange(group, sends=[(tensor, root)])
    incoming = tensor.new_empty(tensor.shape)
    for other in range(n):
        if other != root:
            exchange(group, receives=[(incoming, other)])
            accumulate(tensor, incoming, op)
    average(tensor, op, n)
