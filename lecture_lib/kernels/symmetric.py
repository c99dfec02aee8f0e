"""SymmetricBuffer: the same buffer on every rank, and every rank can read and write all of them.

On CPU it is memory that the processes share. Between GPUs it is the symmetric memory of torch, over NVLink. Where ranks
share one GPU it is that GPU's memory, opened in every process. All three look the same from here on: one piece of
memory per rank, mapped into all of them:

    | flags, 2 x 64 x ranks, int32 | nothing, to the next page | the buffer, shape and dtype |
"""

import math
import os
import sys
import tempfile
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lecture_lib.kernels.agree import machine, together, world_rank
from lecture_lib.kernels.barrier import Barrier, forget, path_of

SLOTS = 64  # of flags for each rank: as many programs of a kernel can signal each other
PAGE = 4096  # bytes; the buffer starts on a page of its own


class SymmetricBuffer:
    """The same buffer on every rank of a group. All of its ranks make it together, with the same shape and dtype.

        buffer = SymmetricBuffer((1024,), torch.float32)
        buffer.local.fill_(dist.get_rank())
        buffer.barrier()                          # now all have written
        total = sum(buffer.peers)                 # reads the memory of the other ranks: no message is sent
        buffer.barrier()                          # now all have read, and may write again

    Args:
        shape: an int or ints, all at least 1.
        dtype: of the elements.
        group: ranks of one machine; None for all.

    It lies on the rank's GPU where torch's default device is one, or the group's backend is NCCL; otherwise in memory.

    Attributes:
        local: this rank's own buffer, a tensor of ``shape`` that starts as 0.
        peers: the buffers of all ranks, by rank in the group; ``peers[rank]`` is ``local``.
        addresses: (ranks,), int64: where each of ``peers`` begins, for kernels.
        flags: (2, 64, ranks), int32: for kernels that signal each other. [0] is for all ranks to meet, [1] for two to
            pass something on; [:, p, r] is written by program p of rank r only.
        flag_addresses: (2, ranks), int64: where the two halves of each rank's flags begin.
        rank, ranks, shape, dtype, device, group.

    Memory is zero at first, and given back when ``close()`` or the garbage collector has been here and no tensor that
    was taken from it is left. Nothing of it has a name in a folder, so nothing can be left when a rank is killed.

    Raises, on every rank: ValueError or TypeError for a shape or dtype that cannot be, or is not the same on all ranks;
    MemoryError if there is not enough memory; RuntimeError without a process group, on a rank outside ``group`` (there
    only) and for ranks on more than one machine.
    """

    def __init__(self, shape, dtype: torch.dtype = torch.float32, group: dist.ProcessGroup | None = None):
        if not dist.is_initialized():
            raise RuntimeError("SymmetricBuffer needs a process group: make it inside a rank, as in World(4).run(fn).")
        if dist.get_rank(group) < 0:
            raise RuntimeError(f"rank {dist.get_rank()} is not in the group that makes this SymmetricBuffer.")
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        asked = together(lambda: _ask(shape, dtype, group), group)
        _check_same(asked, group)
        self.shape, self.dtype, self.device = asked[0].shape, dtype, _device(group)
        self._on_gpu = self.device.type == "cuda"
        self._pids = [each.pid for each in asked]

        self._barrier = Barrier(group)
        start, size = _layout(self.shape, self.dtype, self.ranks)
        memories, self._keep = _map(size, self.device, group)  # [rank] -> (size,), uint8
        self.peers = [memory[start:].view(self.dtype).view(self.shape) for memory in memories]
        flags = [memory[:start].view(torch.int32)[: 2 * SLOTS * self.ranks] for memory in memories]
        self.peer_flags = [each.view(2, SLOTS, self.ranks) for each in flags]
        self.local, self.flags = self.peers[self.rank], self.peer_flags[self.rank]
        self.addresses = self._addresses(self.peers)
        self.flag_addresses = torch.stack([self._addresses(f[half] for f in self.peer_flags) for half in (0, 1)])

        # How often this rank has signalled and waited: what flags are compared with, so that none is ever reset.
        self.meetings = 0
        self.sent, self.awaited = [0] * self.ranks, [0] * self.ranks
        self.barrier()

    def barrier(self) -> None:
        """Return once every rank of the group has called this, and all that they have written is there for all.

        On a GPU, what this rank has launched on the current stream is finished, too. Raises RuntimeError, within
        milliseconds, if a rank is gone: its process has ended or it has closed the buffer.
        """
        if self._on_gpu:
            torch.cuda.current_stream(self.device).synchronize()
        self._barrier()

    def is_alive(self, rank: int) -> bool:
        """Whether the process of a rank is still there; whether it has closed its buffer does not matter."""
        try:
            os.kill(self._pids[rank], 0)  # sends nothing
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        """Give up this rank's part, and its view of the others'. Others keep theirs, but cannot meet any more."""
        if self._on_gpu and not self.closed:
            torch.cuda.synchronize(self.device)  # kernels that use it may still run
        self._barrier.close()
        self.local = self.flags = self.addresses = self.flag_addresses = None
        self.peers, self.peer_flags, self._keep = [], [], None

    @property
    def closed(self) -> bool:
        return self._barrier.closed

    def _addresses(self, tensors) -> torch.Tensor:
        return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device=self.device)

    def __repr__(self):
        what = f"{_name(self.shape, self.dtype, self.device.type)} of each of {self.ranks} ranks"
        return f"SymmetricBuffer: {what}{', closed' if self.closed else ''}"


# ---- all ranks ask for the same --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Asked:
    """What one rank asks for, and where it is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    machine: str
    pid: int

    def __str__(self):
        return _name(self.shape, self.dtype, self.device)


def _ask(shape, dtype, group) -> _Asked:
    asked = _Asked(_checked_shape(shape), _checked_dtype(dtype), _device(group).type, machine(), os.getpid())
    if asked.device == "cpu":
        ranks = dist.get_world_size(group)
        _check_available(_layout(asked.shape, dtype, ranks)[1], ranks)  # before any rank takes some
    return asked


def _check_same(asked: list[_Asked], group) -> None:
    first = asked[0]
    for rank, other in enumerate(asked):
        names = world_rank(0, group), world_rank(rank, group)
        if other.machine != first.machine:
            raise RuntimeError(
                f"ranks {names[0]} and {names[1]} are on different machines or in different containers, which share no "
                "memory: use a group of ranks on one machine."
            )
        if str(other) != str(first):
            raise ValueError(
                f"rank {names[0]} asks for {first} and rank {names[1]} for {other}: every rank must ask for the same "
                "SymmetricBuffer."
            )


def _layout(shape: tuple[int, ...], dtype: torch.dtype, ranks: int) -> tuple[int, int]:
    """Where the buffer starts in each rank's memory, and how much memory that is, in bytes."""
    flags = 2 * SLOTS * ranks * 4
    start = math.ceil(flags / PAGE) * PAGE
    return start, start + math.prod(shape) * dtype.itemsize


def _checked_shape(shape) -> tuple[int, ...]:
    sizes = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    if not all(isinstance(size, int) for size in sizes):
        raise TypeError(f"the shape of a SymmetricBuffer must be ints, and is {shape!r}.")
    if any(size < 1 for size in sizes):
        raise ValueError(f"a SymmetricBuffer of shape {sizes} has no elements: give sizes of at least 1.")
    return sizes


def _checked_dtype(dtype) -> torch.dtype:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(
            f"the dtype of a SymmetricBuffer must be a torch.dtype such as torch.float32, and is {dtype!r}."
        )
    return dtype


def _device(group) -> torch.device:
    default = torch.get_default_device()
    if default.type == "cuda" or dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _name(shape, dtype, device: str) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"


# ---- memory that all ranks see ---------------------------------------------------------------------------------------
# Each returns the memory of every rank, by rank in the group, (size,) and uint8 and 0; and what must live as long.


def _map(size: int, device: torch.device, group) -> tuple[list[torch.Tensor], object]:
    if device.type == "cpu":
        return _shared_memory(size, group)
    gpus = together(lambda: str(torch.cuda.get_device_properties(device).uuid), group)
    if len(set(gpus)) == len(gpus):
        return _symmetric_memory(size, device, group)
    return _memory_of_one_gpu(size, device, group)


def _shared_memory(size: int, group):
    mine, memories = [], []
    try:
        paths = together(lambda: _make_memory(size, mine), group)
        together(lambda: memories.extend(_open_memory(path, size) for path in paths), group)
    finally:
        for fd, path in mine:
            os.close(fd)
            forget([path])
    return memories, None


def _check_available(size: int, ranks: int) -> None:
    if sys.platform != "linux":
        return
    with open("/proc/meminfo") as lines:
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    if size * ranks > available:
        raise MemoryError(
            f"a SymmetricBuffer needs {size / 1e9:.3g} GB on each of {ranks} ranks, {size * ranks / 1e9:.3g} GB in "
            f"all, and this machine has {available / 1e9:.3g} GB to give: ask for less."
        )


def _make_memory(size: int, mine: list) -> str:
    """The path at which others open it. Memory, not a file in /dev/shm: containers often allow 64 MB there."""
    if sys.platform == "linux":
        fd = os.memfd_create("lecture_lib")
        mine.append((fd, path_of(fd)))
        os.posix_fallocate(fd, 0, size)  # or an error now; the first write to what is not there would end the process
    else:
        mine.append(tempfile.mkstemp(prefix="lecture_lib-"))
        os.ftruncate(mine[0][0], size)
    return mine[0][1]


def _open_memory(path: str, size: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8, device="cpu")


def _symmetric_memory(size: int, device: torch.device, group):
    import torch.distributed._symmetric_memory as symmetric_memory

    mine = symmetric_memory.empty(size, dtype=torch.uint8, device=device).zero_()
    handle = symmetric_memory.rendezvous(mine, group or dist.group.WORLD)
    ranks = range(dist.get_world_size(group))
    return [handle.get_buffer(rank, (size,), torch.uint8) for rank in ranks], (mine, handle)


def _memory_of_one_gpu(size: int, device: torch.device, group):
    """CUDA's handles for memory of another process (IPC), as torch.multiprocessing sends tensors."""
    from torch.multiprocessing.reductions import reduce_tensor

    rank, ranks = dist.get_rank(group), range(dist.get_world_size(group))
    mine = torch.zeros(size, dtype=torch.uint8, device=device)
    # One handle for each of the others: torch counts them, and keeps the memory until the last one is given back.
    handles = together(lambda: [None if r == rank else reduce_tensor(mine) for r in ranks], group)
    memories = []
    for owner in ranks:
        if owner == rank:
            memories.append(mine)
        else:
            rebuild, arguments = handles[owner][rank]
            memories.append(rebuild(*arguments))
    return memories, None
