"""How long it takes to run something on ranks, against the usual way, in one run on one machine.

python -m tests.bench.launch
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing

from lecture_lib import RankError, World
from tests.bench import median

SIZE = 4


def all_reduce():
    x = torch.ones(4)
    dist.all_reduce(x)
    return x


def all_reduce_in_a_kept_rank(repeats: int) -> float:
    """Median seconds of the collective alone, inside a rank."""
    x = torch.ones(4)
    return median(lambda: dist.all_reduce(x), repeats)


def spawned(rank: int, size: int, path: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    dist.init_process_group("gloo", store=dist.FileStore(path, size), rank=rank, world_size=size)
    all_reduce()
    dist.destroy_process_group()


def spawn() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(spawned, (SIZE, f"{folder}/store"), SIZE)


def crash(world: World) -> float:
    """Seconds from a rank's death to the end of the next run."""

    def die():
        if dist.get_rank() == 1:
            os._exit(1)
        dist.barrier()

    start = time.perf_counter()
    try:
        world.run(die)
    except RankError:
        pass
    world.run(all_reduce)
    return time.perf_counter() - start


def fresh(world: World) -> None:
    world.restart()
    world.run(all_reduce)


def imported() -> float:
    """Seconds of `from lecture_lib import World` in a fresh process."""
    code = "import time; start = time.perf_counter(); from lecture_lib import World; print(time.perf_counter() - start)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def main() -> None:
    importing = statistics.median(imported() for _ in range(5))
    with World(SIZE) as world:
        world.run(all_reduce)
        warm = median(lambda: world.run(all_reduce), 200)
        bare = statistics.median(world.run(all_reduce_in_a_kept_rank, 200))
        empty = median(lambda: world.run(int), 200)
        new = median(lambda: fresh(world), 20)
        after_crash = statistics.median(crash(world) for _ in range(10))
    spawn_seconds = median(spawn, 3)

    start = time.perf_counter()
    with World(64) as world:
        ready = time.perf_counter() - start
        world.run(all_reduce)
        private = statistics.median(psutil.Process(pid).memory_full_info().uss for pid in world.pids) / 2**20

    def row(what, value, ratio="", target=""):
        print(f"{what:<58} {value:>12} {ratio:>22}  {target}")

    print(f"launch: a 4-element all_reduce on {SIZE} ranks, {os.cpu_count()} cores, torch {torch.__version__}\n")
    row("", "median", "spawn is", "to reach")
    row("torch.multiprocessing.spawn, each time", f"{spawn_seconds * 1e3:.1f} ms")
    row("World.run, warm", f"{warm * 1e3:.2f} ms", f"{spawn_seconds / warm:.0f} times as long", "6 ms, 300 times")
    row("  of that, the all_reduce itself, in a kept rank", f"{bare * 1e3:.2f} ms")
    row("  World.run of a function that does nothing", f"{empty * 1e3:.2f} ms")
    row(
        "fresh world and its first all_reduce",
        f"{new * 1e3:.1f} ms",
        f"{spawn_seconds / new:.0f} times as long",
        "15 times",
    )
    row("a rank dies, error shown, next all_reduce done", f"{after_crash * 1e3:.1f} ms")
    row("from lecture_lib import World, in a fresh process", f"{importing * 1e3:.0f} ms", "", "200 ms")
    row("World(64) ready", f"{ready:.2f} s", "", "1.5 s")
    row("private memory of each of the 64 after an all_reduce", f"{private:.1f} MiB", "", "12 MB")


if __name__ == "__main__":
    main()
