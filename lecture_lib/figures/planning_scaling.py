"""The same training on 8 to 131,072 GPUs, each with its fastest layout: what they do with their time, live."""

import functools

import ipywidgets as widgets

from lecture_lib.planner import Cluster, Estimate, best, preset, reliability

from .controls import Explorer
from .palette import FAINT, INK, PALETTE
from .planning import key, three_digits
from .planning_bars import KINDS, shares
from .svg import Figure, box, figure, label, line

SIZES = tuple(2**i for i in range(3, 18))
COLORS = {**KINDS, "lost to failures": PALETTE[1]}
TOKENS = 15e12
FEW = dict(tp=(1, 2, 4, 8), pp=(1, 4, 8, 16), cp=(1, 2, 4), parts=(1, 2, 4), micro_batches=(1,))


@functools.cache
def fastest(model: str, gpu: str, gpus: int, batch: int) -> Estimate:
    """The best of some hundred layouts, nothing recomputed. Raises ValueError if none fits."""
    plans = best(preset(model), Cluster(gpu, gpus), batch, **FEW, zero_stages=(1,), recompute=("none",))
    if not plans:
        raise ValueError(f"no layout of {model} with {batch} sequences a step fits on {gpus} {gpu}.")
    return plans[0]


def time_of(e: Estimate) -> dict[str, float]:
    """How a GPU spends its time, failures included; shares of 1."""
    goodput = reliability(e.cluster.gpus).goodput
    return {kind: goodput * share for kind, share in shares(e).items()} | {"lost to failures": 1 - goodput}


def draw(plans: list[Estimate], at: int) -> Figure:
    """A column for each plan, what its GPUs do; in words and numbers, the one at place ``at``."""
    left, top, high, each = 74, 112, 190, 53
    e, parts = plans[at], time_of(plans[at])
    gpus, days = f"{e.cluster.gpus:,} GPUs", three_digits(e.days(TOKENS) / reliability(e.cluster.gpus).goodput)
    strokes = [
        label(16, 34, gpus, anchor="start", bold=True, size=26),
        label(270, 34, f"step {three_digits(e.step_seconds)} s", anchor="start"),
        label(440, 34, f"MFU {e.mfu:.0%}", anchor="start"),
        label(884, 34, f"{TOKENS / 1e12:.0f} T tokens in {days} days", anchor="end", bold=True),
        label(16, 72, f"{_axes(e)}; {e.layout.global_batch:,} sequences a step", anchor="start"),
    ]
    for share in (0, 0.5, 1):
        y = top + high * (1 - share)
        strokes.append(line([(left - 8, y), (884, y)], color=FAINT, width=1))
        strokes.append(label(left - 14, y, f"{share:.0%}", anchor="end"))
    for i, plan in enumerate(plans):
        x, y = left + each * i, top + high
        for kind, share in time_of(plan).items():
            y -= high * share
            strokes.append(box(x, y, each - 10, high * share, fill=COLORS[kind], stroke=FAINT, radius=0))
        if i == at:
            strokes.append(box(x - 3, top - 3, each - 4, high + 6, fill="none", stroke=INK, width=4))
        if i % 2 == 0:
            strokes.append(label(x + each / 2 - 5, top + high + 22, f"{plan.cluster.gpus:,}"))
    for slot, (kind, share) in enumerate(parts.items()):
        strokes += key(74 + 190 * slot, top + high + 62, COLORS[kind], f"{kind} {share:.0%}")
    said = ", ".join(f"{kind} {share:.0%}" for kind, share in parts.items())
    return figure("scaling_plan", "Scaling", f"{gpus}: MFU {e.mfu:.0%}, {days} days; {said}.", 900, 392, strokes)


def _axes(e: Estimate) -> str:
    a = e.layout
    return f"dp {a.dp}, tp {a.tp}, pp {a.pp}, cp {a.cp}"


class ScalingPlans(Explorer):
    """A slider through the sizes of a cluster, for a batch that stays the same or grows with it."""

    def __init__(self, model: str = "llama3-8b", gpu: str = "H100", batch: int = 2048):
        strong, weak = f"{batch:,} sequences", "2 sequences a GPU"
        self.batch = widgets.ToggleButtons(options=[strong, weak])
        self.gpus = widgets.SelectionSlider(options=SIZES, value=1024, description="GPUs")
        self.gpus.layout.width = "700px"
        self.plans = {
            kind: [fastest(model, gpu, n, batch if kind == strong else 2 * n) for n in SIZES] for kind in (strong, weak)
        }
        super().__init__((self.batch,), (self.gpus,))

    def drawn(self) -> Figure:
        return draw(self.plans[self.batch.value], SIZES.index(self.gpus.value))
