"""How fast this machine's memories are: bandwidth, and the time one load takes, from the first cache to the last GPU.

Python is too slow to touch a cache line by line, so each measurement is one call that works in C for a while:

    read     The maximum of one small buffer that a stride of zero repeats thousands of times: the same bytes are read
             over and over from wherever they fit, with the processor's vector instructions.
    copy     The same with memmove: an element of the array is the whole buffer.
    latency  A chain of loads. ``np.take(table, steps[:-1], out=steps[1:])`` reads in a table where it should read next
             and writes the answer where it then looks: no load can begin before the last one has ended.

All numbers are medians after a warm-up, on one thread.
"""

import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lecture_lib.hardware import echo
from lecture_lib.hardware.detect import Machine, detect, size

LINE = 64  # bytes between the places of a chain; at least a cache line on most processors
STEPS = 1024  # loads in one call: few, so that the list of steps takes little room in the first cache
SECONDS = 0.06  # for one number
LARGEST = 512 * 2**20  # no buffer is larger


@dataclass(frozen=True)
class Point:
    """``nbytes`` are read over and over at ``bandwidth`` bytes/s; one load in them takes ``latency`` seconds."""

    nbytes: int
    bandwidth: float
    latency: float | None = None


@dataclass(frozen=True)
class Level:
    """A cache or memory, measured with a buffer of ``nbytes`` that fits there and nowhere faster."""

    name: str
    nbytes: int
    bandwidth: float
    latency: float | None = None


@dataclass(frozen=True)
class Transfer:
    """A message from one place to another: ``bandwidth`` in bytes/s for ``nbytes``, ``latency`` seconds for one byte,
    None where it was not measured."""

    name: str
    nbytes: int
    bandwidth: float
    latency: float | None = None


@dataclass(frozen=True)
class Report:
    """What ``probe`` measured. ``levels`` are the plateaus of the ``curve``."""

    device: str
    curve: tuple[Point, ...]
    levels: tuple[Level, ...]
    transfers: tuple[Transfer, ...]

    def table(self) -> str:
        """The levels and the transfers, as text."""
        fastest = self.levels[0].bandwidth
        rows = [*self.levels, *self.transfers]
        lines = [f"{'where':<44}{'bandwidth':>14}{'latency':>12}{'slower':>12}"]
        lines += [
            f"{f'{row.name} ({size(row.nbytes)})':<44}{rate(row.bandwidth):>14}{duration(row.latency):>12}"
            f"{fastest / row.bandwidth:>11.1f}x"
            for row in rows
        ]
        return "\n".join(lines)

    __str__ = table

    def curve_table(self) -> str:
        """The curve, as text."""
        lines = [f"{'working set':<16}{'bandwidth':>14}{'latency':>12}"]
        lines += [f"{size(p.nbytes):<16}{rate(p.bandwidth):>14}{duration(p.latency):>12}" for p in self.curve]
        return "\n".join(lines)


def rate(bytes_per_second: float) -> str:
    """12.3 GB/s"""
    return f"{bytes_per_second / 1e9:.1f} GB/s"


def duration(seconds: float | None) -> str:
    """12.3 ns, 12.3 µs, 12.3 ms; nothing for None."""
    if seconds is None:
        return ""
    for unit, scale in (("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3)):
        if seconds < 999.95 * scale:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds:.1f} s"


def probe(machine: Machine | None = None, device: str = "auto") -> Report:
    """Measure the memories of ``device`` and what leads away from it, in under 10 seconds. "cpu", "cuda", or "auto":
    the first GPU where there is one."""
    machine = machine or detect()
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda', and is {device!r}.")
    if device == "cuda" and not machine.gpus:
        raise ValueError("device='cuda' needs a GPU, and this machine has none that CUDA can use; use device='cpu'.")
    if machine.gpus and device != "cpu":
        return _probe_gpu(machine)
    sizes = plateau_sizes(machine)
    points = curve(sorted({*working_sets(machine), *sizes.values()}))
    levels = [_level(name, nbytes, points) for name, nbytes in sizes.items()]
    return Report(machine.cpu, tuple(points), tuple(levels), tuple(between_ranks()))


def curve(sizes: list[int], rounds: int = 3, seconds: float = SECONDS) -> list[Point]:
    """Bandwidth and latency for each working set, in bytes. Each is the median over rounds through all sizes, so that
    a few busy moments of a shared machine spoil one round of some sizes, not one size."""
    import torch

    buffer, chains = torch.ones(max(sizes) // 4, dtype=torch.int32), [Chain(nbytes) for nbytes in sizes]
    each = seconds / rounds
    samples = [
        [(read_bandwidth(n, "cpu", each, buffer), chain.latency(each)) for n, chain in zip(sizes, chains)]
        for _ in range(rounds)
    ]
    medians = [tuple(map(statistics.median, zip(*of_one_size))) for of_one_size in zip(*samples)]
    return [Point(nbytes, *median) for nbytes, median in zip(sizes, medians)]


def _level(name: str, nbytes: int, points: list[Point]) -> Level:
    (point,) = (p for p in points if p.nbytes == nbytes)
    return Level(name, nbytes, point.bandwidth, point.latency)


def working_sets(machine: Machine) -> list[int]:
    """Powers of two from 4 KiB to four times the last cache."""
    last = max((cache.nbytes for cache in machine.caches), default=32 * 2**20)
    sizes = [4096]
    while sizes[-1] < min(4 * last, LARGEST, machine.memory_bytes // 8):
        sizes.append(sizes[-1] * 2)
    return sizes


def plateau_sizes(machine: Machine) -> dict[str, int]:
    """For each level a buffer that fits there and not in the level before: twice the cache before, a quarter of the
    first cache (the list of steps lies there too), four times the last cache for the memory."""
    sizes, before = {}, 0
    for cache in sorted(machine.caches, key=lambda cache: cache.level):
        sizes[f"L{cache.level}"] = min(2 * before, cache.nbytes // 2) if before else cache.nbytes // 4
        before = cache.nbytes
    return sizes | {"memory": working_sets(machine)[-1]}


# ---- one processor core ----------------------------------------------------------------------------------------------


def read_bandwidth(nbytes: int, device: str = "cpu", seconds: float = SECONDS, buffer=None) -> float:
    """Bytes/s at which ``nbytes`` are read over and over: the first of ``buffer`` (int32), where one is given."""
    import torch

    # Enough repetitions to hide the call, and on a GPU to give every SM some.
    repeats = max(1, round((2e6 if device == "cpu" else 5e9) / nbytes))
    numbers = torch.ones(nbytes // 4, dtype=torch.int32, device=device) if buffer is None else buffer[: nbytes // 4]
    rows = numbers.expand(repeats, -1)
    out = torch.empty(repeats, dtype=torch.int32, device=device)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return nbytes * repeats / _median(lambda: torch.amax(rows, 1, out=out), seconds, _clock(device))
    finally:
        torch.set_num_threads(threads)


def copy_bandwidth(nbytes: int, seconds: float = SECONDS) -> float:
    """Bytes/s at which one core copies ``nbytes`` to another place with memmove. Each byte is read once and written
    once and counts once, as in ``mbw`` and in a message."""
    memory = np.ones(2 * nbytes + 2 * 4096, np.uint8)
    # Both start at a page: on some AMD processors memmove is 30 times slower for a few unlucky distances.
    start = -memory.ctypes.data % 4096
    source, target = memory[start : start + nbytes], memory[start + -(-nbytes // 4096) * 4096 :][:nbytes]
    repeats = max(1, round(1e6 / nbytes))
    source, target = (
        np.lib.stride_tricks.as_strided(part.view(f"V{nbytes}"), (repeats,), (0,)) for part in (source, target)
    )
    return nbytes * repeats / _median(lambda: np.copyto(target, source), seconds)


def latency(nbytes: int, seconds: float = SECONDS) -> float:
    """Seconds from a load to the next one that needs its result, for loads all over ``nbytes``."""
    return Chain(nbytes).latency(seconds)


class Chain:
    """A chain of loads that visits every line of ``nbytes`` once in random order, so that no prefetcher guesses."""

    def __init__(self, nbytes: int):
        self.table, start = chain(nbytes)
        self.steps = np.full(STEPS + 1, start)
        self._walk(STEPS)
        if self.steps[-1] != follow(self.table, start, STEPS):
            raise RuntimeError(
                "this NumPy copies the steps before it looks them up, so latency cannot be measured with it."
            )

    def latency(self, seconds: float = SECONDS) -> float:
        """Median seconds of a load.

        Two costs of the method are measured between its calls and taken off: the call, with a chain of one step, and
        handing a number on through memory, with the running sum of ``np.add.accumulate``, which hands on in the same
        way and looks nothing up."""
        ones, sums = np.ones(STEPS, np.int64), np.zeros(STEPS, np.int64)

        def sample():
            walk, call = self._walk(STEPS), self._walk(1)
            hand_on, other_call = _accumulate(ones, sums), _accumulate(ones[:1], sums[:1])
            self.steps[0] = self.steps[-1]  # go on where the chain has come to
            return ((walk - call) - (hand_on - other_call)) / (STEPS - 1)

        self.table.sum()  # brings the table into the cache that it fits in, faster than the chain would
        sample()
        return max(0.0, statistics.median(_repeat(sample, seconds)))

    def _walk(self, n: int) -> float:
        begin = time.perf_counter()
        np.take(self.table, self.steps[:n], out=self.steps[1 : n + 1], mode="clip")
        return time.perf_counter() - begin


def _accumulate(numbers: np.ndarray, out: np.ndarray) -> float:
    begin = time.perf_counter()
    np.add.accumulate(numbers, out=out)
    return time.perf_counter() - begin


def chain(nbytes: int, line: int = LINE, seed: int = 0) -> tuple[np.ndarray, int]:
    """(table, start): ``table[start]`` is the position of the next entry, and so on through every line of ``nbytes``
    once, in random order, and back to the start."""
    if nbytes < 2 * line:
        raise ValueError(f"a chain needs at least two lines of {line} bytes, and {nbytes} bytes are fewer.")
    order = np.random.default_rng(seed).permutation(nbytes // line) * (line // 8)
    table = np.zeros(nbytes // 8, np.int64)
    table[order] = np.roll(order, -1)
    return table, int(order[0])


def follow(table: np.ndarray, position: int, steps: int) -> int:
    """Where a chain is after ``steps`` loads, the slow way."""
    for _ in range(steps):
        position = int(table[position])
    return position


# ---- between processes -----------------------------------------------------------------------------------------------


def between_ranks(nbytes: int = 16 * 2**20, seconds: float = 2 * SECONDS) -> list[Transfer]:
    """A copy inside this process, and messages to another process and back: through shared memory (copied in, a byte
    says so, copied out) and through a socket on this machine. Half of the way there and back."""
    copied = Transfer("copy, one process", nbytes, copy_bandwidth(nbytes, seconds))
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a file there never goes to a disk
    with tempfile.TemporaryFile(dir=folder) as file, socket.create_server(("127.0.0.1", 0)) as server:
        file.truncate(nbytes)
        shared = np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)
        server.settimeout(30)
        arguments = [server.getsockname()[1], file.fileno(), nbytes]
        other = subprocess.Popen(
            [sys.executable, str(Path(echo.__file__)), *map(str, arguments)], pass_fds=[file.fileno()]
        )
        try:
            connection = server.accept()[0]
            with connection:
                connection.settimeout(30)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                ways = _ways(connection, shared, nbytes)
                result = [Transfer(name, nbytes, *_there_and_back(way, nbytes, seconds)) for name, way in ways.items()]
                connection.sendall(echo.STOP)
            other.wait(10)
        finally:
            if other.poll() is None:
                other.kill()
                other.wait()
    return [copied, *result]


def _there_and_back(way, nbytes: int, seconds: float) -> tuple[float, float]:
    """(bytes/s, seconds for one byte), one way."""
    return 2 * nbytes / _median(lambda: way(nbytes), seconds), _median(lambda: way(1), seconds) / 2


def _ways(connection: socket.socket, shared: np.ndarray, nbytes: int) -> dict:
    """Functions that send n bytes to the other process and take them back."""
    own, flag = np.ones(nbytes, np.uint8), bytearray(1)

    def through_shared_memory(n):
        shared[:n] = own[:n]
        connection.sendall(echo.SHARED + n.to_bytes(8, "little"))
        echo.receive(connection, flag)
        own[:n] = shared[:n]

    def through_socket(n):
        connection.sendall(echo.SOCKET + n.to_bytes(8, "little"))
        connection.sendall(own[:n])
        echo.receive(connection, own[:n])

    return {"shared memory, two processes": through_shared_memory, "loopback socket": through_socket}


# ---- GPUs ------------------------------------------------------------------------------------------------------------


def _probe_gpu(machine: Machine) -> Report:
    gpu = machine.gpus[0]
    sizes = {"L2": gpu.l2_bytes // 4, "HBM": 4 * gpu.l2_bytes}
    wanted = {2**power for power in range(20, 32) if 2**power < sizes["HBM"]} | set(sizes.values())
    points = {n: Point(n, read_bandwidth(n, "cuda"), gpu_latency(n)) for n in sorted(wanted)}
    levels = [Level(name, n, points[n].bandwidth, points[n].latency) for name, n in sizes.items()]
    return Report(gpu.name, tuple(points.values()), tuple(levels), tuple(between_devices(machine) + between_ranks()))


def gpu_latency(nbytes: int, steps: int = 20_000) -> float | None:
    """Seconds from a load to the next one that needs its result, past the L1 cache. None without Triton."""
    try:
        from lecture_lib.hardware.chase import chase
    except ImportError:
        return None
    import torch

    table, start = chain(nbytes, 128)  # a GPU's cache line
    table, out = torch.from_numpy(table).cuda(), torch.tensor([start], device="cuda")

    def sample(n):
        return _median(lambda: chase[(1,)](table, out, n, num_warps=1), 0.02, _clock("cuda"))

    # At least once through what the second cache could hold, then the difference of a long and a short chain, which
    # leaves out the launch.
    chase[(1,)](table, out, min(table.numel() // 16, 200_000), num_warps=1)
    return (sample(steps) - sample(steps // 2)) / (steps - steps // 2)


def between_devices(machine: Machine, nbytes: int = 256 * 2**20) -> list[Transfer]:
    """Host to the first GPU and back, a copy inside it, and to each other GPU."""
    import torch

    host, device = torch.ones(nbytes, dtype=torch.uint8, pin_memory=True), torch.ones(nbytes, dtype=torch.uint8).cuda()
    pairs = {"host to GPU 0": (device, host), "GPU 0 to host": (host, device), "copy, GPU 0": (device.clone(), device)}
    for other in machine.gpus[1:]:
        link = f", {machine.links[0][other.index]}" if machine.links else ""
        pairs[f"GPU 0 to GPU {other.index}{link}"] = (torch.ones_like(device, device=f"cuda:{other.index}"), device)

    def seconds(target, source, n):
        return _median(lambda: target[:n].copy_(source[:n], non_blocking=True), SECONDS, _clock("cuda"))

    return [Transfer(name, nbytes, nbytes / seconds(*pair, nbytes), seconds(*pair, 1)) for name, pair in pairs.items()]


# ---- clocks ----------------------------------------------------------------------------------------------------------


def _clock(device: str):
    """A function that runs another and returns the seconds it took on the device."""

    def cpu(function):
        begin = time.perf_counter()
        function()
        return time.perf_counter() - begin

    def cuda(function):
        import torch

        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    return cpu if device == "cpu" else cuda


def _median(function, seconds: float = SECONDS, clock=None) -> float:
    """Median seconds of one call, after one that does not count."""
    clock = clock or _clock("cpu")
    clock(function)
    return statistics.median(_repeat(lambda: clock(function), seconds))


def _repeat(sample, seconds: float) -> list[float]:
    """Samples for that many seconds, one at least."""
    samples, end = [], time.perf_counter() + seconds
    while not samples or time.perf_counter() < end:
        samples.append(sample())
    return samples
