"""A pipeline's step beside torch.distributed.pipelining's with the same stages, in one run; measured bubbles beside
simulated ones; and how long the longest schedules take to simulate.

python -m tests.bench.parallel_pipeline
"""

import functools
import os
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining as theirs

from lecture_lib import World
from lecture_lib.parallel import pipeline
from lecture_lib.parallel.model import Transformer, deep_mlp, next_token_loss
from lecture_lib.trace import timeline
from tests.bench import median, take_turns

RANKS, MICRO_BATCHES, ROUNDS = 4, 8, 11
PEERS = {  # ours -> the schedule in torch that computes the same table
    "gpipe": theirs.ScheduleGPipe,
    "one_f_one_b": theirs.Schedule1F1B,
    "interleaved": theirs.ScheduleInterleaved1F1B,
    "zero_bubble_h1": theirs.ScheduleInterleavedZeroBubble,
    "zbv": theirs.ScheduleZBVZeroBubble,
    "dualpipe_v": theirs.ScheduleDualPipeV,
}
SLEEP = 0.250  # seconds; beside it the millisecond or two that Python and messages take for each action is little


def model_and_batch(kind: str):
    torch.manual_seed(0)
    if kind == "mlp":
        layers = list(deep_mlp(width=512, layers=8))
        return layers, F.mse_loss, torch.randn(MICRO_BATCHES * 32, 512), torch.randn(MICRO_BATCHES * 32, 512)
    model = Transformer(layers=8, hidden=128, heads=4, kv_heads=2, ffn_hidden=384, vocab=256)
    first, *blocks, norm, head = model.layers()
    layers = [nn.Sequential(first, blocks[0]), *blocks[1:-1], nn.Sequential(blocks[-1], norm, head)]
    tokens = torch.randint(256, (2, MICRO_BATCHES * 2, 32))
    return layers, next_token_loss, *tokens


def compare(kind: str, name: str) -> float:
    """Seconds of a step over seconds of torch's, the median of rounds that do one after the other."""
    layers, loss_fn, x, y = model_and_batch(kind)
    schedule = getattr(pipeline, name)(RANKS, MICRO_BATCHES)
    pipe = pipeline.Pipeline(pipeline.cut(layers, schedule.stages), schedule, loss_fn, example=(x, y))
    wrapped = [
        theirs.PipelineStage(stage, number, schedule.stages, torch.device("cpu"))
        for number, stage in pipe.stages.items()
    ]
    single = name in ("gpipe", "one_f_one_b")
    peer = PEERS[name](wrapped[0] if single else wrapped, n_microbatches=MICRO_BATCHES, loss_fn=loss_fn)
    first, last = 0 in pipe.stages, schedule.stages - 1 in pipe.stages

    def without_gradients(step):
        for parameter in pipe.parameters():
            parameter.grad = None
        step()

    def their_step():
        peer.step(*[x] * first, target=y if last else None, losses=[] if last else None, return_outputs=False)

    ways = {"ours": lambda: pipe.step(x, y), "torch's": their_step}
    times = take_turns({who: functools.partial(without_gradients, step) for who, step in ways.items()}, ROUNDS)
    return statistics.median(ours / torchs for ours, torchs in zip(*times.values()))


class Sleeps(nn.Module):
    """A stage whose F, I and W each sleep, so that ranks do not take each other's cores."""

    seconds = 0.0

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))

    def forward(self, x):  # (rows, width) -> (rows, width)
        return _Sleep.apply(x, self.seconds, self.seconds) + _Sleep.apply(self.weight, 0, self.seconds)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.seconds = backward
        time.sleep(forward)
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None, None


def sleep_through(schedule: pipeline.Schedule):
    """The timeline of a step, after one without sleep."""
    batch = torch.ones(schedule.micro_batches, 16, requires_grad=True), torch.ones(schedule.micro_batches, 16)
    Sleeps.seconds = 0.0
    pipe = pipeline.Pipeline([Sleeps() for _ in range(schedule.stages)], schedule, F.mse_loss, example=batch)
    pipe.step(*batch)
    Sleeps.seconds = SLEEP
    with timeline() as line:
        pipe.step(*batch)
    return line


def main() -> None:
    print(f"pipeline: {os.cpu_count()} cores, {RANKS} ranks, {MICRO_BATCHES} micro-batches, float32\n")
    with World(RANKS, timeout=300) as world:
        print("seconds of a step over torch.distributed.pipelining's, same table, same stages   to reach: 1.0")
        for name in PEERS:
            found = ((kind, world.run(compare, kind, name)[0]) for kind in ("mlp", "transformer"))
            print(f"  {name:<16}" + "   ".join(f"{kind} {ratio:.2f}" for kind, ratio in found), flush=True)
        print(f"\nbubble of a step whose F, I and W sleep {SLEEP * 1e3:.0f} ms, measured over simulated", end="")
        print("   to reach: 0.9 to 1.1")
        for name in ("naive", *PEERS):
            schedule = getattr(pipeline, name)(RANKS, 1 if name == "naive" else MICRO_BATCHES)
            real = pipeline.measured(schedule, world.run(sleep_through, schedule))
            paper = pipeline.simulate(schedule, pipeline.Cost(F=SLEEP, I=SLEEP, W=SLEEP))
            print(f"  {name:<16}{real.bubble:.3f} / {paper.bubble:.3f} = {real.bubble / paper.bubble:.2f}", end="")
            print(f"   whole step {real.makespan / paper.makespan:.2f}", flush=True)
    print("\nsimulate, 64 stages   to reach: 1 s for 1,024 micro-batches, and no more per action than for 128")
    for name, ranks in (("gpipe", 64), ("one_f_one_b", 64), ("zero_bubble_h1", 64), ("interleaved", 32), ("zbv", 32)):
        times, actions = [], []
        for micro_batches in (128, 1024):
            schedule = getattr(pipeline, name)(ranks, micro_batches)
            actions.append(sum(map(len, schedule.rows)))
            times.append(median(functools.partial(pipeline.simulate, schedule), 3))
        each = times[1] / actions[1] / (times[0] / actions[0])
        print(f"  {name:<16}{times[1]:.2f} s for {actions[1]:,} actions, {each:.2f} times as long for each", flush=True)


if __name__ == "__main__":
    main()
