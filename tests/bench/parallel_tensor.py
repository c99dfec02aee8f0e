"""A training step split over ranks: ours beside parallelize_module, in one run on one machine, taking turns.

python -m tests.bench.parallel_tensor
"""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lecture_lib import World
from lecture_lib.parallel.model import Transformer, deep_mlp
from lecture_lib.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    all_gather_mlp,
    copy_to_group,
    parallel_cross_entropy,
    reduce_from_group,
    tensor_parallel,
)
from tests.bench import show, take_turns

REPETITIONS = 20
WIDTH, BATCH = 1024, 128  # the lecture's MLP: 4 layers
TOKENS = (4, 32)  # of the small transformer: (batch, seq)


def training(model: nn.Module, loss):
    """Forward, backward and SGD, as one function."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    return step


class Composed(nn.Module):
    """The Megatron pairs from the plain moves: no collective runs beside a matmul, none is in place."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.mlp = tensor_parallel(mlp)

    def forward(self, x):
        for part in self.mlp:
            if isinstance(part, ColumnParallelLinear):
                x = F.linear(copy_to_group(x), part.weight)
            elif isinstance(part, RowParallelLinear):
                x = reduce_from_group(F.linear(x, part.weight))
            else:
                x = part(x)
        return x


def chunked(mlp: nn.Module, chunks: int) -> nn.Module:
    for part in mlp:
        if isinstance(part, RowParallelLinear):
            part.chunks = chunks
    return mlp


def mlp_steps() -> dict[str, list[float]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    mlp, x = deep_mlp(WIDTH, 4), torch.randn(BATCH, WIDTH)
    mesh = init_device_mesh(x.device.type, (dist.get_world_size(),))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(), "6": RowwiseParallel()}
    models = {
        "parallelize_module": parallelize_module(copy.deepcopy(mlp), mesh, plan),
        "tensor_parallel": tensor_parallel(copy.deepcopy(mlp)),
        "without overlap": Composed(copy.deepcopy(mlp)),
        "2 chunks": chunked(tensor_parallel(copy.deepcopy(mlp)), 2),
        "4 chunks": chunked(tensor_parallel(copy.deepcopy(mlp)), 4),
        "all_gather_mlp": all_gather_mlp(copy.deepcopy(mlp)),
    }
    steps = {name: training(model, lambda model: model(x).square().mean()) for name, model in models.items()}
    return take_turns(steps, REPETITIONS)


def torchs(model: Transformer, sequence_parallel: bool) -> nn.Module:
    """The same split, declared with DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    outside = Shard(1) if sequence_parallel else Replicate()
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=outside),
        "head": ColwiseParallel(input_layouts=outside, use_local_output=False),
    }
    into = {"input_layouts": (outside,), "desired_input_layouts": (Replicate(),)}
    for i in range(len(model.blocks)):
        plan |= {
            f"blocks.{i}.attention": PrepareModuleInput(**into),
            f"blocks.{i}.attention.output": RowwiseParallel(output_layouts=outside),
            f"blocks.{i}.mlp": PrepareModuleInput(**into),
            f"blocks.{i}.mlp.down": RowwiseParallel(output_layouts=outside),
        }
        for name in ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up"):
            plan[f"blocks.{i}.{name}"] = ColwiseParallel()
        if sequence_parallel:
            plan |= {f"blocks.{i}.{name}": SequenceParallel() for name in ("attention_norm", "mlp_norm")}
    if sequence_parallel:
        plan["norm"] = SequenceParallel()
    device = next(model.parameters()).device.type
    return parallelize_module(model, init_device_mesh(device, (dist.get_world_size(),)), plan)


def transformer_steps(sequence_parallel: bool) -> dict[str, list[float]]:
    from torch.distributed.tensor.parallel import loss_parallel

    torch.manual_seed(0)
    model = Transformer()
    tokens, targets = torch.randint(256, (2, *TOKENS))

    def torchs_step(model, optimizer):
        optimizer.zero_grad()
        with loss_parallel():  # the logits stay split, as ours do
            F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()

    theirs, ours = torchs(copy.deepcopy(model), sequence_parallel), tensor_parallel(model, None, sequence_parallel)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.01)
    steps = {
        "parallelize_module": lambda: torchs_step(theirs, optimizer),
        "tensor_parallel": training(ours, lambda model: parallel_cross_entropy(model(tokens), targets)),
    }
    return take_turns(steps, REPETITIONS)


def main() -> None:
    print(
        f"tensor parallelism: {os.cpu_count()} cores, 4 ranks, float32, medians of {REPETITIONS} steps, taking turns\n"
    )
    with World(4, timeout=300) as world:
        show(f"MLP, 4 x {WIDTH}, batch {BATCH}", world.run(mlp_steps)[0], {"tensor_parallel": "to reach: 1.0"})
        show("small transformer", world.run(transformer_steps, False)[0])
        show("small transformer, sequence parallel", world.run(transformer_steps, True)[0])


if __name__ == "__main__":
    main()
