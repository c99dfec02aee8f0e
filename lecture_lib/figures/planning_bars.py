"""Where the time and the memory of a training step go, as the planner sees it."""

from lecture_lib.hardware.specs import GIB
from lecture_lib.planner import Estimate
from lecture_lib.planner.memory import OUTSIDE

from .palette import FAINT, GREY, INK, PALETTE
from .plot import Plot, canvas, plot

COMPUTES, TALKS, WAITS = PALETTE[0], PALETTE[4], GREY
DOES = {  # part of a step -> what a GPU does in it
    "matmuls": COMPUTES,
    "attention": COMPUTES,
    "element-wise": COMPUTES,
    "launches": WAITS,
    "tensor parallel": TALKS,
    "context parallel": TALKS,
    "expert parallel": TALKS,
    "pipeline bubble": WAITS,
    "pipeline sends": TALKS,
    "data parallel": TALKS,
    "optimizer": COMPUTES,
    "stragglers": WAITS,
}
KINDS = {"computes": COMPUTES, "talks": TALKS, "waits": WAITS}
STATES = {  # what the planner calls parts of the memory -> what they are drawn as
    "weights": "weights",
    "master weights": "optimizer",
    "optimizer": "optimizer",
    "gradients": "gradients",
    "activations": "activations",
}
COLORS = {
    "weights": PALETTE[5],
    "gradients": PALETTE[4],
    "optimizer": PALETTE[6],
    "activations": PALETTE[2],
    "other": WAITS,
}


def shares(e: Estimate) -> dict[str, float]:
    """How much of a step a GPU computes, talks and waits."""
    kind = {color: name for name, color in KINDS.items()}
    found = dict.fromkeys(KINDS, 0.0)
    for part, seconds in e.seconds.items():
        found[kind[DOES[part]]] += seconds / e.step_seconds
    return found


def held(e: Estimate) -> dict[str, float]:
    """GiB on the fullest rank, by what they are drawn as."""
    found = dict.fromkeys(COLORS, 0.0)
    for part, nbytes in e.bytes.items():
        found[STATES.get(part, "other")] += nbytes / GIB
    return found


def step_bar(e: Estimate) -> Plot:
    """One bar, unfolded: each part begins where the one above ends."""
    parts = {name: seconds for name, seconds in e.seconds.items() if seconds >= 0.0005 * e.step_seconds}
    figure, axes = canvas(70 + 34 * len(parts))
    begin, write = 0.0, {"va": "center", "color": INK, "fontsize": 14}
    for row, (name, seconds) in enumerate(parts.items()):
        axes.barh(row, seconds, left=begin, height=0.72, color=DOES[name], edgecolor=FAINT, linewidth=0.8)
        begin += seconds
        axes.text(1.14 * e.step_seconds, row, f"{seconds:.2f}", ha="right", **write)
        axes.text(1.29 * e.step_seconds, row, f"{seconds / e.step_seconds:.1%}", ha="right", weight="bold", **write)
    for i, (kind, share) in enumerate(shares(e).items()):
        at = (0.38 * i + 0.03) * e.step_seconds
        axes.plot(at, -1.1, marker="s", markersize=14, color=KINDS[kind], markeredgecolor=FAINT)
        axes.text(at + 0.025 * e.step_seconds, -1.1, f"{kind} {share:.0%}", ha="left", weight="bold", **write)
    axes.set_yticks(range(len(parts)), parts)
    axes.set_ylim(len(parts) - 0.5, -1.7)
    axes.set_xlim(0, 1.3 * e.step_seconds)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"seconds of a step, {e.step_seconds:.2f} in all")
    said = ", ".join(f"{name} {seconds / e.step_seconds:.1%}" for name, seconds in parts.items())
    return plot(figure, f"A step of {e.step_seconds:.2f} seconds: {said}.")


def memory_bars(estimates: dict[str, Estimate]) -> Plot:
    """A bar for each name; a line is the GPU's memory, less what CUDA and NCCL take."""
    limit = min((e.cluster.memory_bytes - OUTSIDE) / GIB for e in estimates.values())
    most = max(limit, *(e.memory_gib for e in estimates.values()))
    figure, axes = canvas(110 + 52 * len(estimates))
    words, write = [], {"va": "center", "color": INK, "fontsize": 14}
    for row, (name, e) in enumerate(estimates.items()):
        left, parts = 0.0, held(e)
        for part, gib in parts.items():
            axes.barh(row, gib, left=left, height=0.62, color=COLORS[part], edgecolor=FAINT, linewidth=0.8)
            left += gib
        axes.text(1.14 * most, row, f"{left:,.0f} GiB", ha="right", weight="bold", **write)
        said = ", ".join(f"{part} {gib:,.0f}" for part, gib in parts.items() if gib >= 0.5)
        words.append(f"{name} {left:,.0f} ({said})")
    for i, (part, color) in enumerate(COLORS.items()):
        axes.plot((0.2 * i + 0.02) * most, -0.95, marker="s", markersize=14, color=color, markeredgecolor=FAINT)
        axes.text((0.2 * i + 0.04) * most, -0.95, part, ha="left", **write)
    axes.vlines(limit, -0.6, len(estimates) - 0.5, color=INK, linestyle="--")
    axes.set_yticks(range(len(estimates)), estimates)
    axes.set_ylim(len(estimates) - 0.5, -1.3)
    axes.set_xlim(0, 1.15 * most)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"GiB on the fullest rank; dashed: the {limit:.0f} that a GPU has to give")
    text = f"GiB on the fullest rank, of {limit:.0f} that a GPU has to give: {'; '.join(words)}."
    return plot(figure, text)
