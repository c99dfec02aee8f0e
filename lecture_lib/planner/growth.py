"""The same model on ten times the GPUs, and on two sites with a slow link between them."""

import math
from dataclasses import dataclass, replace

from lecture_lib.planner.cluster import Cluster
from lecture_lib.planner.estimate import Estimate, estimate
from lecture_lib.planner.failures import Reliability, reliability
from lecture_lib.planner.layout import Layout, complete
from lecture_lib.planner.model import Transformer
from lecture_lib.planner.numbers import not_negative, positive, whole


@dataclass(frozen=True)
class Size:
    """A job on some number of GPUs. efficiency: useful tokens per second and GPU, over those of the smallest job."""

    estimate: Estimate
    reliability: Reliability
    efficiency: float


def grow(
    model: Transformer,
    cluster: Cluster,
    layout: Layout,
    gpus: list[int],
    same_batch: bool = True,
    **failures,
) -> list[Size]:
    """``layout``, which runs on ``cluster``, with more data-parallel ranks, on clusters of so many GPUs.

    same_batch: each rank gets less to do (strong scaling); otherwise the batch grows with the ranks. A batch that is
    not given is the one that ``estimate`` takes on ``cluster``. ``failures``: what ``reliability`` takes. Raises
    ValueError where the layout's other axes, or the batch, do not divide, and if the smallest job never gets anywhere.
    """
    (first, *_) = complete(model, cluster, layout)
    if layout.global_batch is None:
        layout = layout.with_(micro_batch=first.micro_batch, global_batch=first.global_batch)
    sizes: list[Size] = []
    smallest = None
    for n in gpus:
        n = whole("gpus", n)
        bigger = replace(cluster, gpus=n)
        dp, rest = divmod(n, layout.tp * layout.pp * layout.cp)
        if rest:
            raise ValueError(f"{n} GPUs are no multiple of tp x pp x cp = {layout.tp} x {layout.pp} x {layout.cp}.")
        batch = layout.global_batch if same_batch else layout.global_batch // first.dp * dp
        e = estimate(model, bigger, layout.with_(dp=dp, global_batch=batch))
        r = reliability(n, **failures)
        each = e.tokens_per_second_per_gpu * r.goodput
        smallest = each if smallest is None else smallest
        if not smallest:
            raise ValueError(
                f"{n} GPUs do no useful work: one of them fails every {r.seconds_between_failures:.2g} seconds, sooner "
                "than the job is running again."
            )
        sizes.append(Size(e, r, each / smallest))
    return sizes


def table(sizes: list[Size]) -> str:
    """One line for each size."""
    head = f"{'GPUs':>8}{'step':>9}{'MFU':>8}{'goodput':>9}{'efficiency':>12}"
    lines = [
        f"{s.estimate.cluster.gpus:>8}{s.estimate.step_seconds:>8.2f}s{s.estimate.mfu:>8.1%}"
        f"{s.reliability.goodput:>9.1%}{s.efficiency:>12.1%}"
        for s in sizes
    ]
    return "\n".join([head, *lines])


@dataclass(frozen=True)
class Sites:
    """Two sites that train one model, each with half of the data-parallel ranks.

    exchange_seconds: of one exchange. every: steps between exchanges. step_seconds: on average. slowdown: of that over
    a step on one site. enough: see ``two_sites``.
    """

    exchange_seconds: float
    every: int
    step_seconds: float
    slowdown: float
    enough: int


def two_sites(
    one: Estimate, gbps: float, round_trip_ms: float = 50.0, every: int = 1, hidden: bool = False, loss: float = 0.05
) -> Sites:
    """What a link of ``gbps`` Gbit/s per direction, for all GPUs together, makes of a job that ``one`` cluster runs.

    Each site takes half of its data-parallel ranks and of its batch, and so as long for a step. Within each site
    gradients are summed first. Then each site sends its sum to the other, float32: 4 bytes for each
    parameter, each way at the same time; every ``every`` steps (more than 1 is another algorithm, local SGD: Douillard
    et al., DiLoCo, 2023, https://arxiv.org/abs/2311.08105). ``hidden``: the exchange runs beside the next steps.

    ``enough``: the smallest ``every`` with which the average step, not hidden, is at most 1 + ``loss`` times as long as
    on one site. Raises ValueError for numbers that make no sense, and for an odd dp, which has no half.
    """
    rate, every = positive("gbps", gbps) * 1e9 / 8, whole("every", every)
    loss = positive("loss", loss, below=1)
    if one.layout.dp % 2:
        raise ValueError(f"each of two sites has half of the data-parallel ranks, and dp {one.layout.dp} is odd.")
    exchange = 4 * one.model.parameters / rate + not_negative("round_trip_ms", round_trip_ms) / 1e3
    step = one.step_seconds
    average = max(step, exchange / every) if hidden else step + exchange / every
    enough = max(1, math.ceil(exchange / (loss * step)))
    return Sites(exchange, every, average, average / step, enough)
