"""What a ledger and a timeline cost, per operation, against the same operation without them, and against the least that
any TorchDispatchMode costs: one that does nothing but call the operator.

python -m tests.bench.trace
"""

import statistics
import time

import torch
import torch.distributed as dist

from lecture_lib import World
from lecture_lib.trace import ledger, timeline

REPEATS, ROUNDS = 200, 15


def measure() -> dict[str, float]:
    """Median microseconds of processor time per call, of rounds that alternate between the ways."""
    x = torch.ones(4)

    def seconds(function, context) -> float:
        with context():
            start = time.thread_time()
            for _ in range(REPEATS):
                function()
            return (time.thread_time() - start) / REPEATS * 1e6

    from contextlib import nullcontext

    from torch.utils._python_dispatch import TorchDispatchMode

    class Nothing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    operations = {"all_reduce": lambda: dist.all_reduce(x), "x.add_(1)": lambda: x.add_(1)}
    ways = {"bare": nullcontext, "nothing": Nothing, "ledger": ledger, "timeline": timeline}
    times = {(name, way): [] for name in operations for way in ways}
    for _ in range(ROUNDS):
        for name, function in operations.items():
            for way, context in ways.items():
                times[name, way].append(seconds(function, context))
    return {key: statistics.median(values) for key, values in times.items()}


def main() -> None:
    with World(1) as world:
        (times,) = world.run(measure)
    print("trace: processor time that one call takes more, on a world of one rank\n")
    print(f"{'':<14}{'bare':>10}{'an empty mode':>16}{'a ledger':>13}{'a timeline':>13}   to reach")
    for name, target in (("all_reduce", "15 µs in a ledger"), ("x.add_(1)", "")):
        bare, *ways = (times[name, way] for way in ("bare", "nothing", "ledger", "timeline"))
        more = "".join(f"{way - bare:>+10.1f} µs" for way in ways)
        print(f"{name:<14}{bare:>7.1f} µs   {more}   {target}")


if __name__ == "__main__":
    main()
