"""Training the small transformer: layouts of 4 ranks beside one process, and what each way to have activations takes.

python -m tests.bench.train
"""

import os
import statistics
import time

import torch.distributed as dist

from lecture_lib import World
from lecture_lib.trace import ledger
from lecture_lib.train import build, options, tradeoff, tradeoff_table

WARM_UP, STEPS = 2, 8
SIZES = "--layers 4 --hidden 128 --batch 16 --seq 128 "
LAYOUTS = (
    "--dp 4",
    "--dp-shard 4",
    "--tp 4",
    "--tp 4 --sequence-parallel",
    "--cp 4",
    "--pp 4 --micro-batches 4",
    "--pp 4 --micro-batches 4 --schedule zero_bubble_h1",
    "--dp 2 --tp 2",
    "--dp 2 --pp 2 --micro-batches 4",
    "--tp 2 --pp 2 --micro-batches 4",
)
WAYS = ("none", "selective", "full")


def seconds_of_a_step(chosen) -> tuple[float, dict[str, float]]:
    """(median seconds, MB sent by axis on this rank)"""
    mesh, model, optimizer, batch = build(chosen)
    times = []
    for step in range(WARM_UP + STEPS):
        tokens, targets = batch(step)
        dist.barrier()
        began = time.perf_counter()
        model.step(tokens, targets)
        model.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        times.append(time.perf_counter() - began)
    with ledger() as led:
        model.step(*batch(0))
    sent = {axis: float(count) / 1e6 for axis, count in mesh.bytes_by_axis(led.calls).items()}
    mesh.close()
    return statistics.median(times[WARM_UP:]), sent


def main() -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"training: {cores} cores, 4 ranks of {max(1, cores // 4)} thread each, fp32, medians of {STEPS}")
    with World(1, timeout=300, threads=1) as alone, World(1, timeout=300) as all_cores, World(4, timeout=300) as world:
        plain = options(SIZES)
        before = alone.run(seconds_of_a_step, plain)[0][0]
        runs = [(f"one process, {all_cores.threads} threads", all_cores.run(seconds_of_a_step, plain)[0])]
        runs += [(layout, world.run(seconds_of_a_step, options(SIZES + layout))[0]) for layout in LAYOUTS]
        one = statistics.mean([before, alone.run(seconds_of_a_step, plain)[0][0]])
        print(f"one process with one thread: {plain.batch * plain.seq / one:,.0f} tokens/s; its rate is 1.00\n")
        print(f"  {'layout':<52}{'tokens/s':>9}   MB that rank 0 sends in a step")
        for layout, (seconds, sent) in runs:
            megabytes = ", ".join(f"{axis} {sent[axis]:.2f}" for axis in sent)
            print(f"  {layout:<52}{one / seconds:>9.2f}   {megabytes}".rstrip())

        print("\nstore, recompute or communicate: one step, counted")
        print(tradeoff_table(world.run(tradeoff)[0]))
        print("\nand on the clock, in one process; storing everything takes 1.00")
        times = {way: alone.run(seconds_of_a_step, options(SIZES + f"--recompute {way}"))[0][0] for way in WAYS}
        print("  " + ", ".join(f"{way} {seconds / times['none']:.2f}" for way, seconds in times.items()))
        bf16 = alone.run(seconds_of_a_step, options(SIZES + "--precision bf16"))[0][0]
        print(f"bf16 beside fp32, in one process: {times['none'] / bf16:.2f} times the tokens/s")


if __name__ == "__main__":
    main()
