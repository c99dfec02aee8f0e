"""Collectives without messages: every rank reads and writes the memory of all others.

The data lives in a SymmetricBuffer, which all ranks of a machine have mapped. A barrier takes the place of the
messages: after it, what the others wrote can be read. Each byte is touched as often as it must be, in pieces that stay
in the cache between being added and being written.

There is no agreement beforehand, as agreement.py has it, since that would take longer than the rest: all ranks have to
ask for the same.

    buffer = SymmetricBuffer((1 << 20,), torch.float32)
    buffer.local.copy_(gradients)
    shared.all_reduce(buffer)                     # buffer.local holds the sum, on every rank
"""

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from lecture_lib.collectives.agreement import OPERATORS
from lecture_lib.collectives.exchange import average, combine, split
from lecture_lib.kernels import SymmetricBuffer

PIECE = 1 << 18  # bytes; the sum of a piece is still in the core's cache when it is written


def all_reduce(buffer: SymmetricBuffer, op: ReduceOp = ReduceOp.SUM) -> None:
    """Two shots: rank r reduces slice r of all buffers and writes the result into all of them. In place.

    2 barriers; of S bytes in a buffer each rank reads S and writes S, of which (n-1)/n in other ranks' memory.
    Raises ValueError for an operator that is none of SUM, AVG, MIN, MAX, PRODUCT.
    """
    _check(op, buffer)
    buffer.barrier()  # all have written what is to be summed
    slices = [split(peer, buffer.ranks)[buffer.rank] for peer in buffer.peers]  # n of (about count / n,)
    scratch = _scratch(slices[0])
    for pieces in _pieces(slices):
        total = _reduce(pieces, op, scratch)
        for piece in pieces:
            piece.copy_(total)
    buffer.barrier()  # all have written what is to be read


def reduce_scatter(output: Tensor, buffer: SymmetricBuffer, op: ReduceOp = ReduceOp.SUM) -> None:
    """The first half: slice r of the sum on rank r, (n k, ...) -> (k, ...). Leaves the buffers as they are.

    2 barriers; each rank reads S bytes and writes S/n. Raises ValueError if the output is not an nth of the buffer.
    """
    _check(op, buffer)
    _divisible(buffer)
    _check_output(output, buffer.local.numel() // buffer.ranks, buffer)
    buffer.barrier()
    slices = [split(peer, buffer.ranks)[buffer.rank] for peer in buffer.peers]
    scratch = _scratch(slices[0])
    for *pieces, into in _pieces([*slices, output.view(-1)]):
        into.copy_(_reduce(pieces, op, scratch))
    buffer.barrier()  # the others may write again only when I have read


def all_gather(buffer: SymmetricBuffer) -> None:
    """The second half: slice r of rank r's buffer goes into every buffer. In place.

    2 barriers; each rank reads (n-1)/n S bytes from other ranks' memory and writes as much into its own.
    Raises ValueError if n does not divide the elements.
    """
    _divisible(buffer)
    buffer.barrier()
    mine = split(buffer.local, buffer.ranks)
    for step in range(1, buffer.ranks):
        other = (buffer.rank + step) % buffer.ranks  # not all from the same rank at the same time
        mine[other].copy_(split(buffer.peers[other], buffer.ranks)[other])
    buffer.barrier()


def broadcast(buffer: SymmetricBuffer, src: int = 0) -> None:
    """Every rank copies the buffer of the root. In place. ``src``: its global rank.

    2 barriers; every rank but the root reads and writes S bytes.
    """
    members = dist.get_process_group_ranks(buffer.group or dist.group.WORLD)
    if src not in members:
        raise ValueError(f"shared.broadcast: src is {src}, and the buffer belongs to ranks {members}.")
    root = members.index(src)
    buffer.barrier()
    if buffer.rank != root:
        buffer.local.copy_(buffer.peers[root])
    buffer.barrier()


def all_to_all(output: Tensor, buffer: SymmetricBuffer) -> None:
    """Slice r of every rank's buffer, by rank: (n k, ...) -> (n k, ...). Leaves the buffers as they are.

    2 barriers; each rank reads and writes S bytes, of which (n-1)/n S are read from other ranks' memory.
    Raises ValueError if n does not divide the elements, or the output has not as many.
    """
    _divisible(buffer)
    _check_output(output, buffer.local.numel(), buffer)
    buffer.barrier()
    parts = split(output, buffer.ranks)
    for step in range(buffer.ranks):
        other = (buffer.rank + step) % buffer.ranks
        parts[other].copy_(split(buffer.peers[other], buffer.ranks)[buffer.rank])
    buffer.barrier()


def _pieces(slices: list[Tensor]):
    """The same piece of every slice, one piece after the other: PIECE bytes of each."""
    size = PIECE // slices[0].element_size()
    for start in range(0, slices[0].numel(), size):
        yield [part[start : start + size] for part in slices]


def _scratch(part: Tensor) -> Tensor:
    """Where pieces are added up, one after the other, so that it stays in the cache."""
    return part.new_empty(PIECE // part.element_size())


def _reduce(pieces: list[Tensor], op: ReduceOp, scratch: Tensor) -> Tensor:
    """Added in the order of the ranks, so that any rank would get the same bits."""
    first, *others = pieces
    total = scratch[: first.numel()]
    for piece in others:
        combine(first, piece, op, out=total)
        first = total
    average(first, op, len(pieces))
    return first


def _check(op: ReduceOp, buffer: SymmetricBuffer) -> None:
    if op not in OPERATORS:
        raise ValueError(f"{op} was asked for; SUM, AVG, MIN, MAX and PRODUCT exist here.")
    if op == ReduceOp.AVG and not (buffer.dtype.is_floating_point or buffer.dtype.is_complex):
        raise ValueError(
            f"AVG was asked for, of {buffer.dtype}; it needs a floating-point buffer, so use SUM and divide."
        )


def _check_output(output: Tensor, elements: int, buffer: SymmetricBuffer) -> None:
    if output.numel() != elements or output.dtype != buffer.dtype:
        raise ValueError(
            f"an output of {output.numel()} elements, {output.dtype}, does not fit a buffer of {buffer.local.numel()} "
            f"on {buffer.ranks} ranks, {buffer.dtype}; it needs {elements} elements of that dtype."
        )


def _divisible(buffer: SymmetricBuffer) -> None:
    if buffer.local.numel() % buffer.ranks:
        raise ValueError(
            f"a buffer of {buffer.local.numel()} elements cannot be shared equally by {buffer.ranks} ranks; make it a "
            f"multiple of {buffer.ranks} elements long."
        )
