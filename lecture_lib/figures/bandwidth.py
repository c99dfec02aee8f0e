"""The table of NCCL tests as curves: what a collective makes of the link, against the size of the tensor."""

from lecture_lib.collectives.bench import Row, size

from .palette import GRID, INK, PALETTE
from .plot import Plot, canvas, plot


def time_by_size(rows: list[Row], predicted: dict[str, list[float]] | None = None) -> Plot:
    """Measured time of each algorithm against size, on logarithmic axes. ``predicted``: seconds by algorithm, at the
    same sizes, as dashed lines."""
    names = list(dict.fromkeys(row.algorithm for row in rows))
    figure, axes = canvas(380)
    ends: list[tuple[float, str, str]] = []
    for color, name in zip(PALETTE, names, strict=False):
        own = [row for row in rows if row.algorithm == name]
        sizes = [row.nbytes for row in own]
        axes.plot(sizes, [row.seconds * 1e3 for row in own], "o-", color=color, linewidth=2.5)
        if predicted:
            axes.plot(sizes, [seconds * 1e3 for seconds in predicted[name]], "--", color=color, linewidth=1.5)
        ends.append((own[-1].seconds * 1e3, name, color))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    every = sorted({row.nbytes for row in rows})
    axes.set_xticks(every[::2], [size(nbytes) for nbytes in every[::2]])
    axes.set_xlim(every[0] / 1.5, every[-1] * 40)
    axes.set_ylabel("ms", color=INK)
    axes.yaxis.set_major_formatter("{x:g}")
    _name_curves(axes, ends, every[-1])
    axes.grid(axis="y", color=GRID)
    dashed = ", measured and as the model says (dashed)" if predicted else ""
    first = rows[0]
    return plot(
        figure,
        f"Time of {first.collective} on {first.ranks} ranks against size, {size(every[0])} to {size(every[-1])}: "
        f"{', '.join(names)}{dashed}.",
    )


def _name_curves(axes, ends: list[tuple[float, str, str]], x: float) -> None:
    """A name beside the end of each curve, no two closer than a line of text."""
    axes.figure.canvas.draw()  # so that the axes know their pixels
    below = -1e9
    for y, name, color in sorted(ends):
        _, pixel = axes.transData.transform((x, y))
        place = max(pixel, below + 20)
        axes.annotate(
            name, (x, y), (10, (place - pixel) * 72 / 96), textcoords="offset points", color=color, va="center", size=14
        )
        below = place
