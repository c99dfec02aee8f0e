"""The roofline of a whole step: one roof for each link that bytes come over, from the nearest to the farthest."""

from collections.abc import Mapping

from .axes import number_words
from .palette import FAINT, GRID, PALETTE
from .plot import Plot, canvas, plot

COLORS = (PALETTE[2], PALETTE[4], PALETTE[1])


def step_roofline(flops: float, links: Mapping[str, tuple[float, float]], peak: float, reached: float) -> Plot:
    """``links``: for each name the bytes that a GPU moves over it in a step, and its bytes/s; three at most. ``flops``:
    what the GPU computes in the step; ``peak`` and ``reached`` are FLOP/s.

    A point on the flat part would hide its bytes behind the computation, if all overlapped. The share beside its name
    is what they would add, if none did: (bytes / rate) / (FLOP / peak) = ridge / intensity.
    """
    figure, axes = canvas(400)
    low, high, bottom = 10, 1e6, peak / 60
    words = []
    for row, ((name, (nbytes, rate)), color) in enumerate(zip(links.items(), COLORS, strict=False)):
        intensity, ridge = flops / nbytes, peak / rate
        first = max(low, bottom / rate)
        axes.plot([first, ridge, high], [first * rate / 1e12, peak / 1e12, peak / 1e12], color=color, linewidth=4)
        best = min(peak, intensity * rate) / 1e12
        axes.plot(intensity, best, marker="o", markersize=14, color=color, markeredgecolor="white", zorder=3)
        said = f"{number_words(intensity)}, ridge {number_words(ridge)}"
        beside = {"transform": axes.transAxes, "va": "center", "fontsize": 14}
        axes.text(1.03, 0.93 - 0.24 * row, f"{name}: {ridge / intensity:+.0%}", color=color, weight="bold", **beside)
        axes.text(1.03, 0.84 - 0.24 * row, said, **beside)
        words.append(f"{name} {said}, {ridge / intensity:+.0%}")
    axes.axhline(reached / 1e12, color=FAINT, linestyle="--", linewidth=2)
    write = {"color": "#555555", "ha": "right", "va": "top", "fontsize": 14}
    axes.text(high / 1.3, 0.92 * reached / 1e12, f"{reached / peak:.0%} reached", **write)
    axes.text(1.03, 0.08, "% of the time,\nif not overlapped", transform=axes.transAxes, va="center", fontsize=14)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom / 1e12, 2 * peak / 1e12))
    axes.set(xlabel="FLOP per byte over this link", ylabel="TFLOP/s of one GPU")
    axes.set_xticks([10**i for i in range(1, 7)], ["10", "100", "1,000", "10,000", "0.1 M", "1 M"])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(color=GRID)
    text = f"{'; '.join(words)} of the time, if not overlapped; {reached / peak:.0%} reached."
    return plot(figure, f"Roofline of a step, FLOP per byte over each link: {text}")
