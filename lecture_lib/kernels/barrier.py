"""A barrier among the processes of one machine: one byte there and one byte back, through pipes.

Every rank tells the group's rank 0 that it has arrived, and rank 0 tells all to go on:

    rank 1 ---\\             /---> rank 1
    rank 2 -----> rank 0 ------> rank 2
    rank 3 ---/             \\---> rank 3

Pipes do three things that flags in shared memory leave to be done. A rank that waits is asleep and leaves its core to
others, which counts where ranks outnumber cores. What was written to memory before the byte was sent is there for who
has read it, on every processor. And a pipe whose writer is gone says so at once, so nobody waits for the dead.
"""

import os
import select
import sys
import tempfile
import uuid
import weakref

import torch.distributed as dist

from lecture_lib.kernels.agree import together, world_rank

GO = b"\0"  # from rank 0 to all others; 1 + r instead says that rank r is gone


class Barrier:
    """``barrier = Barrier(group)``, made by all ranks of a group together; ``barrier()`` returns once all have called
    it. 2 (n - 1) messages of one byte among n ranks.

    When called, it raises RuntimeError if a rank is gone: its process has ended, or it has closed the barrier. All
    ranks learn which.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.names = [world_rank(rank, group) for rank in range(dist.get_world_size(group))]
        self.rank = dist.get_rank(group)
        self.closed = False
        self._in: dict[int, int] = {}  # rank -> where I read what it says; both by rank in the group
        self._out: dict[int, int] = {}  # rank -> where I write what it reads
        self._poll = select.poll()
        weakref.finalize(self, _close, self._in, self._out)
        _barriers.add(self)
        self._paths: dict[int, str] = {}  # where others write what I read
        try:
            paths = together(self._listen, group)
            together(lambda: self._connect(paths), group)
        finally:
            forget(self._paths.values())

    def _listen(self) -> dict[int, str]:
        for rank in range(1, len(self.names)) if self.rank == 0 else [0]:
            self._in[rank], self._paths[rank] = make_pipe()
            self._poll.register(self._in[rank], select.POLLIN)
        return self._paths

    def _connect(self, paths: list[dict[int, str]]) -> None:
        for rank in self._in:
            self._out[rank] = os.open(paths[rank][self.rank], os.O_WRONLY)

    def __call__(self) -> None:
        if self.closed:
            raise RuntimeError("this barrier is closed: make a new SymmetricBuffer, on all ranks.")
        if self.rank == 0:
            missing = len(self._in)
            while missing:
                for fd, _ in self._poll.poll():  # those that have said something, or are gone
                    if not os.read(fd, 1):
                        self._tell_all_and_fail(fd)
                    missing -= 1
            self._tell_all(GO)
        else:
            try:
                os.write(self._out[0], GO)
            except BrokenPipeError:
                pass  # rank 0 is gone; it may have said why
            answer = os.read(self._in[0], 1)
            if answer != GO:
                self._fail(answer)

    def _tell_all(self, word: bytes) -> None:
        for fd in self._out.values():
            try:
                os.write(fd, word)
            except BrokenPipeError:
                pass  # it is gone, as the next barrier will say

    def _tell_all_and_fail(self, fd: int) -> None:
        gone = next(rank for rank in self._in if self._in[rank] == fd)
        word = bytes([1 + gone])
        self._tell_all(word)
        self._fail(word)

    def _fail(self, word: bytes) -> None:
        gone = word[0] - 1 if word else 0  # rank 0 says nothing if it is gone itself
        self.close()
        raise RuntimeError(
            f"rank {self.names[gone]} is gone (Broken pipe): its process has ended, or it has closed its "
            "SymmetricBuffer. Make a new one, on ranks that are there."
        )

    def close(self) -> None:
        self.closed = True
        _close(self._in, self._out)


def _close(*ends: dict[int, int]) -> None:
    for fds in ends:
        while fds:
            os.close(fds.popitem()[1])


# A process that a rank forks, such as a DataLoader's worker, is not that rank. It must not keep its pipes open either:
# the others would wait for the worker to end.
_barriers: weakref.WeakSet[Barrier] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [barrier.close() for barrier in list(_barriers)])


# ---- what two processes share, by path -------------------------------------------------------------------------------


def make_pipe() -> tuple[int, str]:
    """A file descriptor that reads from a new pipe, and the path at which other processes open it to write."""
    if sys.platform == "linux":
        fd, writing = os.pipe()
        os.close(writing)
        return fd, path_of(fd)
    path = os.path.join(tempfile.gettempdir(), f"lecture_lib-{uuid.uuid4()}")
    os.mkfifo(path, 0o600)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # otherwise this would wait for a writer
    os.set_blocking(fd, True)
    return fd, path


def path_of(fd: int) -> str:
    """Where other processes of this user find what this process has open (Linux). It has no name in any folder, so
    nothing of it can be left behind, however the process ends."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def forget(paths) -> None:
    """Remove the names, where there are any, once everyone has opened what they name."""
    for path in paths:
        if not path.startswith("/proc/"):
            os.unlink(path)
