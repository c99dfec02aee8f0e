"""Logarithmic axes, and how numbers are written on them."""

import math
from dataclasses import dataclass

from .palette import GRID, PAPER
from .svg import SIZE, box, label, line


@dataclass(frozen=True)
class LogAxis:
    """Places on a line from pixel ``start`` (the value ``low``) to pixel ``end`` (the value ``high``)."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """The pixel of a value; of one outside, the nearest end."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def decades(self) -> list[float]:
        """The powers of ten on the axis."""
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        return [10.0**power for power in range(first, last + 1)]


def vertical_grid(axis: LogAxis, top: float, bottom: float, write) -> list[str]:
    """A line and a label below it at each power of ten; ``write`` makes words of a value."""
    strokes = [line([(axis.at(x), top), (axis.at(x), bottom)], color=GRID, width=1.2) for x in axis.decades()]
    return strokes + [label(axis.at(x), bottom + 18, write(x)) for x in axis.decades()]


def beside_bar(x: float, y: float, words: str) -> str:
    """What a bar that ends at ``x`` stands for, on a piece of paper that hides the grid."""
    paper = box(x + 2, y - 13, 10 + 0.58 * SIZE * len(words), 26, fill=PAPER, stroke=PAPER)
    return paper + label(x + 8, y, words, anchor="start", bold=True)


def short(value: float) -> str:
    """Two digits that count: 0.3, 2.2, 32, 680."""
    return f"{float(f'{value:.2g}'):g}"


def time_words(seconds: float) -> str:
    """32 µs, 0.3 ms, 2 s"""
    if seconds > 0.99:
        return f"{short(seconds)} s"
    return f"{short(seconds * 1e3)} ms" if seconds > 0.99e-4 else f"{short(seconds * 1e6)} µs"


def number_words(value: float) -> str:
    """0.625, 62.7, 1,365"""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def rate_words(flops: float) -> str:
    """989 TFLOP/s, 110 GFLOP/s"""
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if flops >= scale:
            return f"{flops / scale:.3g} {unit}FLOP/s" if flops < 999.5 * scale else f"{flops / scale:.0f} {unit}FLOP/s"
    return f"{flops:.3g} FLOP/s"
