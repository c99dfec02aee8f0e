"""The ring: every rank sends to its right neighbour and receives from its left one, all at the same time.

No link carries more than any other, and each rank sends 2(n-1)/n S for an all-reduce of S bytes: less than twice the
tensor, however many ranks there are. No algorithm can do with less (Patarasuk and Yuan, Bandwidth optimal all-reduce
algorithms for clusters of workstations, 2009). The price is the number of steps, which grows with n.
"""

from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from lecture_lib.collectives.agreement import collective
from lecture_lib.collectives.exchange import accumulate, average, exchange, place, root_in, split


@collective
def ring_all_reduce(tensor: Tensor, op: ReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None) -> None:
    """Reduce-scatter around the ring, then all-gather around the ring.

    2(n-1) steps; each rank sends one chunk a step: 2(n-1) messages and 2(n-1)/n S.
    """
    n, rank = place(group)
    right, left = (rank + 1) % n, (rank - 1) % n
    chunks = split(tensor, n)  # n of (about count / n,)
    incoming = tensor.new_empty(chunks[0].shape)

    for step in range(n - 1):  # each chunk goes round and grows; it is whole on the rank before the one it began on
        outgoing, growing = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        arriving = incoming[: growing.numel()]
        exchange(group, sends=[(outgoing, right)], receives=[(arriving, left)])
        accumulate(growing, arriving, op)
    average(chunks[(rank + 1) % n], op, n)

    for step in range(n - 1):  # each whole chunk goes round and is copied
        outgoing, missing = chunks[(rank + 1 - step) % n], chunks[(rank - step) % n]
        exchange(group, sends=[(outgoing, right)], receives=[(missing, left)])


@collective
def ring_reduce_scatter(
    output: Tensor, input: Tensor, op: ReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None
) -> None:
    """The first half of the all-reduce, with chunks numbered so that rank r ends up with chunk r.

    input (n k, ...) -> output (k, ...). n - 1 steps; with an input of S bytes each rank sends n - 1 messages and
    (n-1)/n S.
    """
    n, rank = place(group)
    right, left = (rank + 1) % n, (rank - 1) % n
    chunks = split(input, n)
    growing = chunks[(rank - 1) % n].clone()
    arriving = growing.new_empty(growing.shape)
    for step in range(n - 1):
        exchange(group, sends=[(growing, right)], receives=[(arriving, left)])
        growing, arriving = arriving, growing
        accumulate(growing, chunks[(rank - step - 2) % n], op)
    average(growing, op, n)
    output.view(-1).copy_(growing)


@collective
def ring_all_gather(output: Tensor, input: Tensor, group: ProcessGroup | None = None) -> None:
    """The second half of the all-reduce.

    input (k, ...) -> output (n k, ...). n - 1 steps; with an input of S bytes each rank sends n - 1 messages, (n-1) S.
    """
    n, rank = place(group)
    right, left = (rank + 1) % n, (rank - 1) % n
    chunks = split(output, n)
    chunks[rank].copy_(input.view(-1))
    for step in range(n - 1):
        outgoing, missing = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        exchange(group, sends=[(outgoing, right)], receives=[(missing, left)])


@collective
def ring_broadcast(tensor: Tensor, src: int = 0, group: ProcessGroup | None = None) -> None:
    """A chain from the root through all ranks. The tensor goes in n chunks, so that a rank passes one on while it
    receives the next.

    2n - 2 steps; every rank but the last sends n messages and S bytes.
    """
    n, rank = place(group)
    position = (rank - root_in(group, src)) % n  # in the chain
    chunks = split(tensor, n)
    for step in range(n + 1):
        receives = [(chunks[step], (rank - 1) % n)] if step < n and position > 0 else []
        sends = [(chunks[step - 1], (rank + 1) % n)] if step > 0 and position < n - 1 else []
        exchange(group, sends=sends, receives=receives)


@collective
def ring_reduce(tensor: Tensor, dst: int = 0, op: ReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None) -> None:
    """The same chain towards the root: each rank adds its own to what comes in, and passes it on.

    2n - 2 steps; every rank but the root sends n messages and S bytes. The other ranks keep what they had.
    """
    n, rank = place(group)
    position = (rank - root_in(group, dst) - 1) % n  # the root is last in the chain
    chunks = split(tensor, n)
    arriving = [tensor.new_empty(chunk.shape) for chunk in chunks] if position > 0 else chunks
    for step in range(n + 1):
        receives = [(arriving[step], (rank - 1) % n)] if step < n and position > 0 else []
        sends = [(arriving[step - 1], (rank + 1) % n)] if step > 0 and position < n - 1 else []
        exchange(group, sends=sends, receives=receives)
        if receives:
            accumulate(arriving[step], chunks[step], op)
    if position == n - 1 and n > 1:
        for chunk, whole in zip(chunks, arriving, strict=True):
            chunk.copy_(whole)
        average(tensor, op, n)
