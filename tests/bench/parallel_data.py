"""A data-parallel step beside torch's own in the same run: DataParallel over DistributedDataParallel, and
FullyShardedDataParallel over fully_shard, on 4 ranks. A step is forward, backward and SGD.

python -m tests.bench.parallel_data
"""

import copy
import functools
import os
import statistics

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from lecture_lib import World
from lecture_lib.parallel.data import DataParallel
from lecture_lib.parallel.model import Transformer, deep_mlp, next_token_loss
from lecture_lib.parallel.sharded import FullyShardedDataParallel
from tests.bench import take_turns

RANKS, ROUNDS, WARM_UP = 4, 24, 3
BATCHES = {"mlp": "the lecture's MLP, batch 128", "transformer": "the small transformer, 8 sequences of 128"}


def model_and_loss(kind: str):
    """The module, and a loss of this rank's share of the batch."""
    torch.manual_seed(0)
    if kind == "mlp":
        x = torch.randn(128, 1024).chunk(dist.get_world_size())[dist.get_rank()]  # (32, 1024)
        return deep_mlp(1024, 4), lambda model: model(x).square().mean()
    tokens = torch.randint(256, (8, 129)).chunk(dist.get_world_size())[dist.get_rank()]  # (2, 129)
    return Transformer(), lambda model: next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])


def sharded_by_torch(module: nn.Module) -> nn.Module:
    for layer in module.blocks if isinstance(module, Transformer) else module:
        if list(layer.parameters()):
            fully_shard(layer)
    return fully_shard(module)


def compare(kind: str, sharded: bool) -> dict[str, list[float]]:
    """Seconds of each step, of rounds that alternate."""
    module, loss_of = model_and_loss(kind)
    wrap = (
        (FullyShardedDataParallel, sharded_by_torch) if sharded else (DataParallel, nn.parallel.DistributedDataParallel)
    )
    models = {"ours": wrap[0](copy.deepcopy(module)), "theirs": wrap[1](module)}
    optimizers = {who: torch.optim.SGD(model.parameters(), lr=1e-3) for who, model in models.items()}

    def step(who: str) -> None:
        optimizers[who].zero_grad()
        loss_of(models[who]).backward()
        if who == "ours":
            models[who].finish_gradient_synchronization()
        optimizers[who].step()

    return take_turns({who: functools.partial(step, who) for who in models}, ROUNDS, WARM_UP)


def main() -> None:
    print(f"data parallelism: {os.cpu_count()} cores, {RANKS} ranks, float32, a step of ours over one of torch's\n")
    with World(RANKS, timeout=300) as world:
        for kind, batch in BATCHES.items():
            print(batch)
            for sharded in (False, True):
                times = world.run(compare, kind, sharded)[0]
                ours, theirs = (statistics.median(times[who]) for who in ("ours", "theirs"))
                pairs = statistics.median(a / b for a, b in zip(times["ours"], times["theirs"]))
                name = ("DataParallel / DistributedDataParallel", "FullyShardedDataParallel / fully_shard")[sharded]
                print(
                    f"  {name:<40}{ours * 1e3:.0f} / {theirs * 1e3:.0f} ms = {ours / theirs:.2f}, "
                    f"pair by pair {pairs:.2f}   to reach: at most 1.0"
                )


if __name__ == "__main__":
    main()
