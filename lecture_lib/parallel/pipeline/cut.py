"""Cut a list of layers into stages: neighbouring layers, so that the heaviest stage is as light as it can be.

The slowest stage sets the pace of all. What a layer weighs can be one (count layers), its parameters, or its time.
"""

import math
import statistics
import time
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lecture_lib.trace import unrecorded


def cut(layers: Iterable[nn.Module], stages: int, weights: Sequence[float] | None = None) -> list[nn.Sequential]:
    """``layers``, each called with what the one before returned, as so many stages of neighbouring layers.

    weights: what each layer weighs; None: one. The heaviest stage is as light as possible; among such cuts, the stages
    are as equal as possible. The stages hold the layers themselves, not copies.

    Raises ValueError for more stages than layers, and for weights that are negative or no numbers.
    """
    layers = list(layers)
    weights = [1] * len(layers) if weights is None else list(weights)
    if not 1 <= stages <= len(layers):
        raise ValueError(
            f"{len(layers)} layers cannot be cut into {stages} stages; ask for 1 to {len(layers)}, for a stage needs a "
            "layer."
        )
    if len(weights) != len(layers):
        raise ValueError(f"{len(weights)} weights for {len(layers)} layers; give one for each.")
    for number, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"layer {number} weighs {weight}; a weight is a number from 0 on.")
    heaviest = _cut_points(weights, stages, max)
    limit = max(sum(weights[a:b]) for a, b in zip(heaviest, heaviest[1:]))
    points = _cut_points(weights, stages, lambda a, b: a + b, lambda w: w * w if w <= limit else math.inf)
    return [nn.Sequential(*layers[a:b]) for a, b in zip(points, points[1:])]


def parameters_of(layers: Iterable[nn.Module]) -> list[int]:
    """How many parameters each layer has, as weights for ``cut``."""
    return [sum(p.numel() for p in layer.parameters()) for layer in layers]


def times_of(
    layers: Iterable[nn.Module], example: Tensor, repeats: int = 5, group: dist.ProcessGroup | None = None
) -> list[float]:
    """Seconds that forward and backward of each layer take on a micro-batch like ``example``: median of ``repeats``, as
    weights for ``cut``.

    With a process group, every rank has to call it; all get what its first rank measured, so that all cut alike.
    """
    layers = list(layers)
    times = [0.0] * len(layers)
    if not dist.is_initialized() or dist.get_rank(group) == 0:
        x = example
        for number, layer in enumerate(layers):
            x, times[number] = _time(layer, x, repeats)
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        with unrecorded():
            dist.broadcast_object_list(times, group_src=0, group=group)
    return times


def _time(layer: nn.Module, x: Tensor, repeats: int) -> tuple[Tensor, float]:
    """(output, seconds)"""
    x = x.detach()
    if x.is_floating_point():
        x.requires_grad_()
    inputs = [tensor for tensor in (x, *layer.parameters()) if tensor.requires_grad]
    times = []
    for _ in range(repeats + 1):  # the first warms up
        _finish(x)
        start = time.perf_counter()
        y = layer(x)
        if y.requires_grad:
            torch.autograd.grad(y, inputs, torch.ones_like(y), allow_unused=True)
        _finish(x)
        times.append(time.perf_counter() - start)
    return y, statistics.median(times[1:])


def _finish(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def _cut_points(weights: list[float], parts: int, combine, cost=lambda weight: weight) -> list[int]:
    """0, ..., len(weights): where to cut so that ``combine`` of the parts' costs is least, by dynamic programming.

    best[k][j]: (the least cost of the first j in k parts, where the last of these parts begins)
    """
    n = len(weights)
    until = [0]
    for weight in weights:
        until.append(until[-1] + weight)
    best = [[(0 if j == 0 else math.inf, 0) for j in range(n + 1)]]
    for k in range(1, parts + 1):
        row = [(math.inf, 0)] * (n + 1)
        for j in range(k, n + 1):
            row[j] = min(
                ((combine(best[-1][i][0], cost(until[j] - until[i])), i) for i in range(k - 1, j)),
                key=lambda found: (found[0], -found[1]),
            )
        best.append(row)
    points = [n]
    for k in range(parts, 0, -1):
        points.append(best[k][points[-1]][1])
    return points[::-1]
