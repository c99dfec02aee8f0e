"""How long collectives take: the table of NCCL tests, for torch.distributed's own and for those of this package.

python -m lecture_lib.collectives.bench --ranks 4
torchrun --nproc-per-node 4 -m lecture_lib.collectives.bench --collective all_gather

    world.run(bench.measure, "all_reduce", ["torch", "ring_all_reduce"])[0]       # from a cell: a list of rows

Two bandwidths, as NVIDIA's nccl-tests define them (doc/PERFORMANCE.md), with S the bytes of the whole tensor:

    algbw = S / time                  what the caller gets
    busbw = algbw x factor            what a link carries, comparable with its datasheet and among numbers of ranks
    factor: 2(n-1)/n for all_reduce; (n-1)/n for all_gather, reduce_scatter, all_to_all; 1 for broadcast and reduce

S is the total for all: of an all_gather what each rank has in the end, of a reduce_scatter what it brings.
"""

import argparse
import os
import statistics
import sys
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from lecture_lib import collectives
from lecture_lib.trace import unrecorded

SIZES = tuple(4**k for k in range(1, 15))  # 4 B to 256 MB
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
ROUNDS = 5  # medians of so many
ROUND_SECONDS = 0.02  # each of about as long, and at least one call


class Row(NamedTuple):
    """A line of the table. ``nbytes``: S; ``seconds``: of one call, on the slowest rank, median."""

    collective: str
    algorithm: str
    ranks: int
    nbytes: int
    seconds: float

    @property
    def algbw(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.seconds

    @property
    def busbw(self) -> float:
        """Bytes per second."""
        return self.algbw * factor(self.collective, self.ranks)


def factor(collective: str, n: int) -> float:
    """busbw / algbw on n ranks."""
    return {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0, "reduce": 1.0}.get(collective, (n - 1) / n)


def algorithms_of(collective: str) -> list[str]:
    """ "torch", "shared" where it exists, and the functions of this package that do it."""
    own = [name for name in collectives.__all__ if name.endswith("_" + collective)]
    if collective == "reduce":
        own = [name for name in own if not name.endswith("all_reduce")]
    return ["torch", *([] if collective == "reduce" else ["shared"]), *own]


def measure(
    collective: str = "all_reduce",
    algorithms: list[str] | None = None,
    sizes: tuple[int, ...] = SIZES,
    group: dist.ProcessGroup | None = None,
) -> list[Row]:
    """Runs on every rank of the group; every rank gets the same rows. float32 tensors.

    Raises ValueError for a collective or algorithm that does not exist.
    """
    if collective not in COLLECTIVES:
        raise ValueError(f"there is no collective {collective!r} here; choose one of {', '.join(COLLECTIVES)}.")
    known = algorithms_of(collective)
    if unknown := [name for name in algorithms or [] if name not in known]:
        raise ValueError(f"there is no {unknown[0]!r} for {collective}; choose from {', '.join(known)}.")
    n = dist.get_world_size(group)
    rows = []
    for nbytes in sizes:
        count = (
            max(1, nbytes // 4 // n) * n
            if collective not in ("all_reduce", "broadcast", "reduce")
            else max(1, nbytes // 4)
        )
        for name in algorithms or known:
            call = _call(collective, name, count, group)
            rows.append(Row(collective, name, n, 4 * count, _seconds(call, group)))
    return rows


def table(rows: list[Row]) -> str:
    """size, time, algbw and busbw of every row; of one collective on one number of ranks."""
    if not rows:
        return "no rows"
    head = f"{'size':>10}  {'algorithm':<34}{'time':>12}{'algbw':>14}{'busbw':>14}"
    lines = [
        f"{size(row.nbytes):>10}  {row.algorithm:<34}{row.seconds * 1e6:>9.1f} µs"
        f"{row.algbw / 1e9:>9.3f} GB/s{row.busbw / 1e9:>9.3f} GB/s"
        for row in rows
    ]
    return "\n".join([f"{rows[0].collective}, {rows[0].ranks} ranks, float32", head, *lines])


def size(nbytes: int) -> str:
    """ "4 B", "64 KiB", "16 MiB" """
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.3g} {unit}"
    return f"{nbytes} B"


# ---- one measurement -------------------------------------------------------------------------------------------------


def _call(collective: str, name: str, count: int, group):
    """A function without arguments that runs it once, on a tensor of ``count`` elements."""
    if name == "shared":
        return _shared(collective, count, group)
    n = dist.get_world_size(group)
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    whole, part = torch.ones(count, device=device), torch.ones(count // n, device=device)
    arguments = {
        "all_reduce": (whole,),
        "all_gather": (whole, part),
        "reduce_scatter": (part, whole),
        "all_to_all": (torch.empty_like(whole), whole),
        "broadcast": (whole, _first(group)),
        "reduce": (whole, _first(group)),
    }[collective]
    if name == "torch":
        single = collective in ("all_gather", "reduce_scatter", "all_to_all")
        function = getattr(dist, collective + "_single" * single)
    else:
        function = getattr(collectives, name).__wrapped__  # without the agreement, which is a collective of its own
    return lambda: function(*arguments, group=group)


def _shared(collective: str, count: int, group):
    from lecture_lib.collectives import shared
    from lecture_lib.kernels import SymmetricBuffer

    buffer, function = SymmetricBuffer(count, torch.float32, group), getattr(shared, collective)
    if collective in ("all_reduce", "all_gather", "broadcast"):
        return lambda: function(buffer)
    output = torch.ones_like(buffer.local[: count // buffer.ranks if collective == "reduce_scatter" else count])
    return lambda: function(output, buffer)


def _first(group) -> int:
    return 0 if group is None else dist.get_global_rank(group, 0)


def _seconds(call, group) -> float:
    """Median over rounds; a round takes as long as on its slowest rank."""
    call()  # connections are made, memory is touched
    repeats = max(1, min(200, round(ROUND_SECONDS / _round(call, 1, group))))
    return statistics.median(_round(call, repeats, group) for _ in range(ROUNDS))


def _round(call, repeats: int, group) -> float:
    on_gpu = dist.get_backend(group) == "nccl"
    dist.barrier(group)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if on_gpu:
        torch.cuda.synchronize()
    slowest = torch.tensor([(time.perf_counter() - start) / repeats], dtype=torch.float64)
    slowest = slowest.cuda() if on_gpu else slowest
    with unrecorded():
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    return slowest.item()


# ---- as a program ----------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="start so many ranks here; without it, run under torchrun")
    parser.add_argument("--collective", default="all_reduce", choices=COLLECTIVES)
    parser.add_argument("--algorithm", nargs="*", help="'torch', 'shared' or functions of lecture_lib.collectives")
    parser.add_argument("--max-bytes", type=int, default=SIZES[-1], help="largest tensor (default: 256 MiB)")
    options = parser.parse_args(arguments)
    if options.max_bytes < SIZES[0]:
        parser.error(f"--max-bytes must be at least {SIZES[0]}, the smallest size, and is {options.max_bytes}.")
    task = (options.collective, options.algorithm, tuple(s for s in SIZES if s <= options.max_bytes))
    if options.ranks:
        from lecture_lib import World

        with World(options.ranks, timeout=600) as world:
            print(table(world.run(measure, *task)[0]))
    elif "RANK" in os.environ:
        local = int(os.environ.get("LOCAL_RANK", 0))
        gpus = torch.cuda.device_count()
        if gpus:
            torch.cuda.set_device(local)
        dist.init_process_group("nccl" if gpus else "gloo")
        rows = measure(*task)
        if dist.get_rank() == 0:
            print(table(rows))
        dist.destroy_process_group()
    else:
        parser.error("say --ranks 4 to start ranks on this machine, or start this under torchrun.")


if __name__ == "__main__":
    sys.exit(main())
