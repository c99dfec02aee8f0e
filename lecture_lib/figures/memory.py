"""What a rank holds between the backward pass and the optimizer's step, and for a moment before."""

from .palette import FAINT, INK, PALETTE
from .plot import Plot, canvas, plot

COLORS = {"parameters": PALETTE[5], "gradients": PALETTE[4], "optimizer": PALETTE[6], "for a moment": "#D9D9D9"}


def memory_bars(held: dict) -> Plot:
    """``held``: for each name a lecture_lib.trace.Memory of a block that ends before the optimizer's step.

    "For a moment" is what its fullest moment has more than its end: activations, and what is whole only while it works.
    """
    figure, axes = canvas(110 + 64 * len(held))
    words = []
    for row, (name, each) in enumerate(held.items()):
        parts = {kind: each.at_end[kind] / 1e6 for kind in ("parameters", "gradients", "optimizer")}
        parts["for a moment"] = each.total / 1e6 - sum(parts.values())
        left = 0.0
        for kind, size in parts.items():
            axes.barh(row, size, left=left, height=0.62, color=COLORS[kind], edgecolor=FAINT, linewidth=0.8)
            write = {"va": "center", "color": INK, "fontsize": 14}
            axes.text(left + size / 2, row, f"{size:.2f}" if size > 0.3 else "", ha="center", **write)
            if row == (len(held) - 1 if kind == "for a moment" else 0):
                axes.text(left, row - 0.54, kind, ha="left", **write)
            left += size
        axes.text(left + 0.1, row, f"{left:.2f} MB", ha="left", weight="bold", **write)
        words.append(f"{name} {left:.2f} (" + ", ".join(f"{kind} {size:.2f}" for kind, size in parts.items()) + ")")
    axes.set_yticks(range(len(held)), held)
    axes.set_ylim(len(held) - 0.5, -0.9)
    axes.set_xlim(0, 1.12 * max(each.total for each in held.values()) / 1e6)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("MB held by rank 0")
    return plot(figure, f"MB that a rank holds: {'; '.join(words)}.")
