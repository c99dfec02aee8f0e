"""Many estimates at once: predicted against published, and all layouts by memory and speed."""

import statistics
from collections.abc import Sequence

import numpy as np

from lecture_lib.hardware.specs import GIB
from lecture_lib.planner import Estimate, Plans, estimate
from lecture_lib.planner.published import Run

from .palette import FAINT, GRID, INK, PALETTE
from .plot import Plot, canvas, plot

SOURCES = {  # start of a run's source -> what it is called here, and its colour
    "mosaicml": ("MosaicML", PALETTE[0]),
    "arXiv 2104.04473": ("Megatron-LM 2021", PALETTE[1]),
    "arXiv 2205.05198": ("Megatron-LM 2022", PALETTE[4]),
    "arXiv 2407.21783": ("Llama 3", PALETTE[7]),
    "torchtitan": ("torchtitan", PALETTE[3]),
}


def measured(run: Run) -> float:
    """Model TFLOP/s per GPU, attention counted full, whatever the run gives."""
    e = estimate(run.model, run.cluster, run.layout)
    return e.model_tflops_per_gpu * (1 + run.off(e))


def published(runs: Sequence[Run], off: Sequence[float], misses: int = 3) -> Plot:
    """``off``: predicted over measured step time, minus 1, of each run. The largest ``misses`` are numbered."""
    figure, axes = canvas(500)
    x = np.array([measured(run) for run in runs])
    y = x / (1 + np.asarray(off))
    ends = np.array([90, 700])
    axes.plot(ends, ends, color=FAINT, linewidth=2)
    axes.plot(ends, ends * 1.1, ends, ends / 1.1, color=FAINT, linewidth=2, linestyle="--")
    beside = {"transform": axes.transAxes, "va": "center", "fontsize": 14}
    for row, (start, (name, color)) in enumerate(SOURCES.items()):
        of = [i for i, run in enumerate(runs) if run.source.startswith(start)]
        axes.scatter(x[of], y[of], s=70, color=color, alpha=0.75, edgecolor="white", zorder=2 + row)
        axes.plot(
            1.06, 0.97 - 0.075 * row, marker="o", markersize=9, color=color, transform=axes.transAxes, clip_on=False
        )
        axes.text(1.1, 0.97 - 0.075 * row, f"{name}: {len(of)}", **beside)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    axes.set(xlabel="published: model TFLOP/s per GPU", ylabel="predicted")
    axes.set_anchor("W")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks([100, 150, 200, 300, 400, 600], [100, 150, 200, 300, 400, 600])
        axis.set_ticks([], minor=True)
    axes.grid(color=GRID)
    size = np.abs(off)
    median, ninth = statistics.median(size.tolist()), float(np.quantile(size, 0.9))
    axes.text(1.04, 0.5, f"off by {median:.1%} (median),", weight="bold", **beside)
    axes.text(1.04, 0.43, f"one in ten by over {ninth:.0%}", **beside)
    axes.text(1.04, 0.36, "(dashed: 10 %)", **beside)
    axes.text(1.04, 0.25, "speed, where it is worst", weight="bold", **beside)
    words = []
    for place, i in enumerate(np.argsort(-size, kind="stable")[:misses], 1):
        run, faster = runs[i], f"{1 / (1 + off[i]) - 1:+.0%}"
        above = {"xytext": (-8, 7), "ha": "right"} if off[i] < 0 else {"xytext": (8, -18), "ha": "left"}
        axes.annotate(str(place), (x[i], y[i]), textcoords="offset points", weight="bold", size=14, **above)
        size_of = f"{run.model.parameters / 1e9:.0f} B, seq {run.model.seq}, {run.cluster.gpus} GPUs"
        axes.text(1.04, 0.25 - 0.07 * place, f"{place}  {faster}: {size_of}", **beside)
        words.append(f"{run.name} {faster}")
    text = f"{len(runs)} runs, off by {median:.1%} (median), one in ten by over {ninth:.0%}; most: {'; '.join(words)}."
    return plot(figure, f"Predicted against published: {text}")


def all_layouts(plans: Plans, marked: dict[str, Estimate], slowest: float = 0.5) -> Plot:
    """Every layout that fits is a dot: memory and speed, down to ``slowest`` of the fastest's speed. Those that no
    other beats in both are joined. ``marked``: names for some."""

    def points(some):
        return np.array([(e.memory_gib, plans[0].step_seconds / e.step_seconds) for e in some]).reshape(-1, 2).T

    figure, axes = canvas(430)
    every, front = points(plans), points(plans.pareto())
    front = front[:, front[1] >= slowest]
    axes.scatter(*every[:, every[1] >= slowest], s=14, color=FAINT, alpha=0.5, edgecolor="none")
    axes.plot(*front, color=PALETTE[0], linewidth=3, marker="o", markersize=8)
    for name, e in marked.items():
        (gib,), (speed,) = points([e])
        axes.plot(gib, speed, marker="o", markersize=13, color=PALETTE[1])
        axes.annotate(
            name, (gib, speed), (0, -24), textcoords="offset points", ha="center", weight="bold", color=INK, size=14
        )
    axes.set(xlim=(0, plans[0].cluster.memory_bytes / GIB), ylim=(slowest, 1.04))
    axes.set(xlabel="GiB on the fullest rank", ylabel="speed, of the fastest")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(color=GRID)
    said = ", ".join(f"{gib:.0f} GiB {speed:.0%}" for gib, speed in front.T)
    return plot(figure, f"All layouts: {len(plans)} fit; the front, memory and speed of the fastest: {said}.")
