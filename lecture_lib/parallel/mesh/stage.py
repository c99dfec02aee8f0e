"""Neighbouring layers of the model, as the ranks at one place of the pipeline hold them."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from lecture_lib.parallel.data import DataParallel
from lecture_lib.parallel.mesh.axes import Mesh
from lecture_lib.parallel.sharded import FullyShardedDataParallel


class Stage(nn.Sequential):
    """Layers that are computed one after the other, under autocast if there is a compute dtype."""

    def __init__(self, layers: Iterable[nn.Module], compute_dtype: torch.dtype | None):
        super().__init__(*layers)
        self.compute_dtype = compute_dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, self.compute_dtype, enabled=self.compute_dtype is not None):
            return super().forward(x)


class EachBackward(nn.Module):
    """A fully sharded stage that finishes its gradients at the end of every backward pass, where the next micro-batch
    can begin: a pipeline goes forward and backward in turn, and asks nobody."""

    def __init__(self, stage: FullyShardedDataParallel):
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        y = self.stage(x)
        if y.requires_grad:
            finish = self.stage.finish_gradient_synchronization
            y.register_hook(lambda _: Variable._execution_engine.queue_callback(finish))
        return y


def data_parallel(layers: Iterable[nn.Module], mesh: Mesh, compute_dtype: torch.dtype | None = None) -> nn.Module:
    """A stage whose gradients are averaged over all ranks that hold it with other samples or other tokens.

    Ranks along cp hold other tokens of the same samples. To the parameters that is the same: those that share a copy
    are dp_shard x cp, those that average whole gradients are all others.
    """
    stage, others = Stage(layers, compute_dtype), ("dp_replicate", "dp_shard", "cp")
    if mesh.size["dp_shard"] > 1:
        stage = EachBackward(FullyShardedDataParallel(stage, compute_dtype, group=mesh.group("dp_shard", "cp")))
        others = ("dp_replicate",)
    return DataParallel(stage, group=mesh.group(*others)) if mesh.count(*others) > 1 else stage
