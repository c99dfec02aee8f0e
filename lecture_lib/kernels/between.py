"""Kernels that read and write the memory of other ranks: collectives without a message.

A SymmetricBuffer lies at a known address in every rank, so a kernel can load from a neighbour's memory as it loads from
its own. What is left to do is to know when: each rank raises flags in the others' memory, and waits for theirs.

Every rank launches the same grid. Program p of a rank only ever signals program p of the others, so each waits for no
more than it needs. Flags count up and are never reset: a rank that is ahead cannot be mistaken for one that is behind.

The same source is compiled for GPUs and interpreted on CPU, where the ranks are processes that share memory. In it,
tl.multiple_of(address, 16) promises the compiler that 16 bytes can be loaded at once, which it cannot know of a number.
"""

import os

import torch

from lecture_lib.kernels.agree import world_rank
from lecture_lib.kernels.language import INTERPRETED, check_devices, tl, triton
from lecture_lib.kernels.symmetric import SLOTS, SymmetricBuffer

# Interpreted, each operation takes as long for 1 element as for 1000, so take many at once.
BLOCK_BYTES = 65536 if INTERPRETED else 8192  # what a program loads at once
PROGRAMS = 2 if INTERPRETED else SLOTS  # at most

# ---- flags -----------------------------------------------------------------------------------------------------------

if INTERPRETED:
    _buffer = None  # of the kernel that runs
    _gone = None  # the rank that was gone at the last look

    def _rest(rank):
        """While a kernel waits for a flag of ``rank``. An interpreted kernel is Python, so this is a call like any
        other, and leaves the core to that rank. Raises if it is gone and, at the next look, still has raised no flag.
        """
        global _gone
        rank = int(rank)
        if rank == _gone:
            name = world_rank(rank, _buffer.group)
            raise RuntimeError(f"rank {name} is gone (remote process exited), and others wait for its flag.")
        _gone = None if _buffer.is_alive(rank) else rank
        os.sched_yield()

else:

    @triton.jit
    def _rest(rank):
        """While a kernel waits: a GPU has nothing better to do."""


@triton.jit
def _meet(flags, rank, meeting, RANKS: tl.constexpr):
    """Program p of every rank waits here for program p of all ranks. What any of them stored before, all see after."""
    mine = tl.program_id(0) * RANKS
    tl.debug_barrier()  # all threads of this program are here. What they have stored is released with the flag:
    for peer in range(RANKS):
        there = tl.load(flags + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(there + mine + rank, meeting, sem="release", scope="sys")
    here = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    for peer in range(RANKS):
        while tl.atomic_add(here + mine + peer, 0, sem="acquire", scope="sys") < meeting:
            _rest(peer)
    tl.debug_barrier()


# ---- all-reduce, in one step or in two -------------------------------------------------------------------------------


@triton.jit
def _one_shot_all_reduce(
    addresses, flags, out, n, rank, meeting,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr, TOTAL: tl.constexpr,
):  # fmt: skip
    _meet(flags, rank, meeting, RANKS)  # every rank has written its buffer
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)  # (BLOCK,)
        total = tl.full((BLOCK,), 0, TOTAL)
        for peer in range(RANKS):  # in the same order on every rank, so all get the same bits
            theirs = tl.multiple_of(tl.load(addresses + peer).to(tl.pointer_type(DTYPE)), 16)
            total += tl.load(theirs + i, mask=i < n, other=0).to(TOTAL)
        tl.store(out + i, total, mask=i < n)
    _meet(flags, rank, meeting + 1, RANKS)  # every rank has read mine: I may write it again


@triton.jit
def _two_shot_all_reduce(
    addresses, flags, n, share, rank, meeting,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr, TOTAL: tl.constexpr,
):  # fmt: skip
    _meet(flags, rank, meeting, RANKS)  # every rank has written its buffer
    first = share * rank  # my share of the elements: only I read it, so I can overwrite it everywhere
    last = min(first + share, n)
    for start in range(first + tl.program_id(0) * BLOCK, last, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)  # (BLOCK,)
        total = tl.full((BLOCK,), 0, TOTAL)
        for peer in range(RANKS):
            theirs = tl.multiple_of(tl.load(addresses + peer).to(tl.pointer_type(DTYPE)), 16)
            total += tl.load(theirs + i, mask=i < last, other=0).to(TOTAL)
        for peer in range(RANKS):
            theirs = tl.multiple_of(tl.load(addresses + peer).to(tl.pointer_type(DTYPE)), 16)
            tl.store(theirs + i, total.to(DTYPE), mask=i < last)
    _meet(flags, rank, meeting + 1, RANKS)  # every rank has written its share into mine


def one_shot_all_reduce(buffer: SymmetricBuffer) -> torch.Tensor:
    """The sum of ``buffer.local`` over all ranks, as a new tensor on every rank. All ranks call it.

    Each rank loads the whole buffer of every rank and adds up: it reads (ranks - 1) n elements from others. One step,
    so it suits small buffers, where each step costs more than the bytes. Integers of any width, float16, bfloat16
    (both summed in float32), float32, float64; exact for integers.

    The algorithm of torch.ops.symm_mem.one_shot_all_reduce. Raises TypeError for another dtype, RuntimeError for a
    closed buffer and, interpreted, if a rank is gone.
    """
    _check_open(buffer)
    out = torch.empty(buffer.shape, dtype=buffer.dtype, device=buffer.device)
    n = out.numel()
    _launch_together(_one_shot_all_reduce, buffer, out, n, TOTAL=_total(buffer))
    return out


def two_shot_all_reduce(buffer: SymmetricBuffer) -> torch.Tensor:
    """Replace ``buffer.local`` on every rank by the sum over all ranks, and return it. All ranks call it.

    Each rank adds up its share, n / ranks elements, and stores the result in the buffer of every rank: a reduce-scatter
    and an all-gather in one kernel. It reads (ranks - 1) / ranks n elements from others and writes as many to them,
    which is as little as an all-reduce can move, in two steps. Dtypes, exactness and errors as ``one_shot_all_reduce``.
    Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH", section 4.
    """
    _check_open(buffer)
    n = buffer.local.numel()
    share = 16 * triton.cdiv(n, 16 * buffer.ranks)  # a multiple of 16, so that loads are aligned; the last may be short
    _launch_together(_two_shot_all_reduce, buffer, n, share, TOTAL=_total(buffer))
    return buffer.local


# ---- all-gather ------------------------------------------------------------------------------------------------------


@triton.jit
def _all_gather(
    addresses, flags, out, n, rank, meeting, RANKS: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    _meet(flags, rank, meeting, RANKS)
    for peer in range(RANKS):
        theirs = tl.multiple_of(tl.load(addresses + peer).to(tl.pointer_type(DTYPE)), 16)
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
            i = start + tl.arange(0, BLOCK)  # (BLOCK,)
            tl.store(out + i, tl.load(theirs + i, mask=i < n), mask=i < n)
        out += n
    _meet(flags, rank, meeting + 1, RANKS)


def all_gather(buffer: SymmetricBuffer) -> torch.Tensor:
    """The buffers of all ranks, (ranks, *shape), as a new tensor on every rank. All ranks call it.

    Each rank reads (ranks - 1) n elements from others. Dtypes and errors as ``one_shot_all_reduce``.
    """
    _check_open(buffer)
    out = torch.empty(buffer.ranks, *buffer.shape, dtype=buffer.dtype, device=buffer.device)
    _launch_together(_all_gather, buffer, out, buffer.local.numel())
    return out


# ---- put and get: two ranks alone ------------------------------------------------------------------------------------


@triton.jit
def _put(
    addresses, flags, source, n, rank, to, count, RANKS: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    theirs = tl.multiple_of(tl.load(addresses + to).to(tl.pointer_type(DTYPE)), 16)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)  # (BLOCK,)
        tl.store(theirs + i, tl.load(source + i, mask=i < n), mask=i < n)
    tl.debug_barrier()  # the flag comes after the data
    there = tl.load(flags + to).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(there + tl.program_id(0) * RANKS + rank, count, sem="release", scope="sys")


@triton.jit
def _get(
    addresses, flags, out, n, rank, owner, count, RANKS: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    here = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    while tl.atomic_add(here + tl.program_id(0) * RANKS + owner, 0, sem="acquire", scope="sys") < count:
        _rest(owner)
    tl.debug_barrier()  # the data comes after the flag
    theirs = tl.multiple_of(tl.load(addresses + owner).to(tl.pointer_type(DTYPE)), 16)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)  # (BLOCK,)
        tl.store(out + i, tl.load(theirs + i, mask=i < n), mask=i < n)


def put(buffer: SymmetricBuffer, tensor: torch.Tensor, to: int) -> None:
    """Write ``tensor`` into the buffer of rank ``to``, then raise this rank's flag there. Only this rank calls it.

    Rank ``to`` calls ``wait(buffer, this_rank)`` and then finds it in ``buffer.local``. Writes n elements to the other
    rank. Before the next put there, let it say that it has read: ``signal`` there, ``wait`` here.

    Raises ValueError for a rank that is not in the group, or a tensor of another shape, dtype or device; RuntimeError
    for a closed buffer.
    """
    _check(buffer, to)
    if tensor.shape != buffer.shape or tensor.dtype != buffer.dtype or tensor.device != buffer.device:
        raise ValueError(
            f"the buffer is {buffer.dtype} {tuple(buffer.shape)} on {buffer.device} and the tensor is {tensor.dtype} "
            f"{tuple(tensor.shape)} on {tensor.device}: they must be the same."
        )
    _signal(buffer, tensor.contiguous(), to)


def signal(buffer: SymmetricBuffer, to: int) -> None:
    """Raise this rank's flag at rank ``to``: a put without data. It says "mine is ready" or "I have read yours"."""
    _check(buffer, to)
    _signal(buffer, buffer.local.new_empty(0), to)


def get(buffer: SymmetricBuffer, owner: int) -> torch.Tensor:
    """Wait for the flag of rank ``owner``, then read its buffer into a new tensor. Only this rank calls it.

    ``owner`` calls ``signal(buffer, this_rank)`` when its buffer is ready. Reads n elements from the other rank.
    Raises ValueError for a rank that is not in the group; RuntimeError for a closed buffer and, interpreted, if a rank
    is gone. Waits as long as it takes for one that is there.
    """
    _check(buffer, owner)
    out = torch.empty(buffer.shape, dtype=buffer.dtype, device=buffer.device)
    _await(buffer, out, owner)
    return out


def wait(buffer: SymmetricBuffer, source: int) -> torch.Tensor:
    """Wait until rank ``source`` has put or signalled here once more than was waited for so far; ``buffer.local``."""
    _check(buffer, source)
    _await(buffer, buffer.local.new_empty(0), source)
    return buffer.local


def _signal(buffer: SymmetricBuffer, source: torch.Tensor, to: int) -> None:
    buffer.sent[to] += 1
    _launch(_put, buffer, buffer.flag_addresses[1], source, source.numel(), buffer.rank, to, buffer.sent[to])


def _await(buffer: SymmetricBuffer, out: torch.Tensor, owner: int) -> None:
    buffer.awaited[owner] += 1
    _launch(_get, buffer, buffer.flag_addresses[1], out, out.numel(), buffer.rank, owner, buffer.awaited[owner])


# ---- launching -------------------------------------------------------------------------------------------------------


def _launch_together(kernel, buffer: SymmetricBuffer, *arguments, **constants) -> None:
    """Launch a kernel in which the ranks meet twice."""
    if INTERPRETED:
        buffer.barrier()  # waiting costs nothing here, and keeps a core busy in a kernel
    buffer.meetings += 2
    _launch(kernel, buffer, buffer.flag_addresses[0], *arguments, buffer.rank, buffer.meetings - 1, **constants)


def _launch(kernel, buffer: SymmetricBuffer, flags: torch.Tensor, *arguments, **constants) -> None:
    """Only addresses of shared memory go to the kernel, never a tensor that lies in it: the interpreter copies tensors
    back when it is done, over what other ranks have written meanwhile."""
    check_devices(buffer.local)
    block = BLOCK_BYTES // buffer.dtype.itemsize
    programs = min(PROGRAMS, triton.cdiv(buffer.local.numel(), block))
    constants |= {"RANKS": buffer.ranks, "BLOCK": block, "DTYPE": _dtype(buffer)}
    if INTERPRETED:
        _interpret(kernel[(programs,)], buffer, buffer.addresses, flags, *arguments, **constants)
    else:
        kernel[(programs,)](buffer.addresses, flags, *arguments, **constants)


def _interpret(run, buffer: SymmetricBuffer, *arguments, **constants) -> None:
    global _buffer, _gone
    _buffer, _gone = buffer, None
    try:
        run(*arguments, **constants)
    except triton.runtime.errors.InterpreterError as error:
        while isinstance(error, triton.runtime.errors.InterpreterError):
            error = error.__cause__  # what was raised in the kernel, without its wrapping
        raise error from None
    finally:
        _buffer = None


DTYPES = ("int8", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")


def _dtype(buffer: SymmetricBuffer):
    """Triton's name for what the buffer holds."""
    name = str(buffer.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise TypeError(f"kernels between ranks take {', '.join(DTYPES)} and got {name}: convert to one of them.")
    return getattr(tl, name)


def _total(buffer: SymmetricBuffer):
    """What sums are held in: float16 and bfloat16 would lose a bit at each addition."""
    return tl.float32 if buffer.dtype in (torch.float16, torch.bfloat16) else _dtype(buffer)


def _check_open(buffer: SymmetricBuffer) -> None:
    if buffer.closed:
        raise RuntimeError("this SymmetricBuffer is closed: make a new one, on all ranks.")


def _check(buffer: SymmetricBuffer, rank: int) -> None:
    _check_open(buffer)
    if not 0 <= rank < buffer.ranks:
        raise ValueError(f"rank {rank} is not one of the buffer's {buffer.ranks} ranks, 0 to {buffer.ranks - 1}.")
