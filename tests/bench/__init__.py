"""Benchmarks. Each prints ratios to a peer that took turns with it, in one run on one machine."""

import statistics
import time
from collections.abc import Callable

import torch.distributed as dist


def take_turns(steps: dict[str, Callable], rounds: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Seconds of each step, round by round, from when all ranks begin it until all have ended. Runs on every rank.

    Every other round goes through the steps backwards, so that none always comes after the same one.
    """
    times = {name: [] for name in steps}
    for number in range(warm_up + rounds):
        for name in list(steps)[:: -1 if number % 2 else 1]:
            dist.barrier()
            began = time.perf_counter()
            steps[name]()
            dist.barrier()
            if number >= warm_up:
                times[name].append(time.perf_counter() - began)
    return times


def show(what: str, times: dict[str, list[float]], notes: dict[str, str] | None = None) -> None:
    """Medians of what ``take_turns`` found, over that of the first."""
    (peer, theirs), *others = ((name, statistics.median(seconds)) for name, seconds in times.items())
    print(f"  {what}: {peer} {theirs * 1e3:.1f} ms a step; its time is 1.00")
    for name, ours in others:
        print(f"    {name:<28} {ours / theirs:.2f}   {(notes or {}).get(name, '')}".rstrip())


def median(function: Callable, repeats: int) -> float:
    """Seconds of a call."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
