"""Schedules as charts: a row for each rank, a box for each action, as wide as it lasts; where a rank is idle, paper.

Forward is light, backward is dark. Where the backward pass comes in two halves, I has the colour of B, and W its own.
A rank's second stage is a shade further: lighter forward, darker backward. In a box stands the micro-batch.
"""

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from .palette import INK, PALETTE, PAPER, rank_color, text_color
from .plot import Plot, plot
from .svg import Figure, figure, label

if TYPE_CHECKING:  # it loads torch, which takes seconds, and drawing has no need of it
    from lecture_lib.parallel.pipeline import Run, Schedule

FORWARD, BACKWARD, WEIGHTS = PALETTE[5], PALETTE[0], PALETTE[2]
KINDS = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD, "W": WEIGHTS}
MEANS = {"F": "forward", "B": "backward", "I": "I, for the input", "W": "W, for the weights"}
NAMES = {"naive": "naive", "gpipe": "GPipe", "one_f_one_b": "1F1B", "interleaved": "interleaved"}
NAMES |= {"zero_bubble_h1": "zero bubble H1", "zbv": "ZBV", "dualpipe_v": "DualPipeV"}

LEFT, RIGHT, WIDTH = 92, 846, 900  # where time begins and ends, in pixels
HIGH, PITCH, HEAD, FOOT = 25, 28, 34, 8  # of a box; of a row; above the rows of a run; below them
SIZE = 19  # pixels of a micro-batch's number
DIGIT = 0.56 * SIZE + 5  # a digit in a wide font, and what keeps it from the next box's


class Box(NamedTuple):
    x: float
    y: float
    wide: float
    high: float
    fill: str


class Words(NamedTuple):
    x: float
    y: float
    words: str
    anchor: str = "middle"
    color: str = INK
    bold: bool = False


Layout = tuple[list[Box], list[Words], float]  # and the height of it all


# ---- what a chart is drawn as ----------------------------------------------------------------------------------------


def chart(name: str, title: str, runs: Mapping[str, "Run"]) -> Figure:
    """Runs on paper, one below the other on one scale of time, each with the micro-batches that its ranks hold."""
    boxes, words, height = layout(runs)
    said = [f"{summary(of, run)}; {orders(run.schedule, (0, run.schedule.ranks - 1))}" for of, run in runs.items()]
    return figure(name, title, "; ".join(said) + ".", WIDTH, height, strokes(boxes, words))


def real_and_paper(real: "Run", paper: "Run") -> Plot:
    """A measured run, and below it the same on paper, on one scale of time. Both in seconds."""
    runs = {
        f"measured: {real.makespan * 1e3:,.0f} ms": real,
        f"on paper: {paper.makespan * 1e3:,.0f} ms": paper,
    }
    schedule = real.schedule
    m = schedule.micro_batches
    text = (
        f"{NAMES.get(schedule.name, schedule.name)}, {m} micro-batch{'es' * (m > 1)} on {schedule.ranks} ranks, "
        f"measured and on paper, where the bubble is {paper.bubble:.1%} of {paper.makespan * 1e3:,.0f} milliseconds: "
    )
    return as_plot(layout(runs), f"{text}{orders(schedule, range(schedule.ranks))}.")


def strokes(boxes: list[Box], words: list[Words]) -> list[str]:
    """As SVG: one path for all boxes of a colour, since there may be thousands."""
    paths: dict[str, list[str]] = {}
    for x, y, wide, high, fill in boxes:
        paths.setdefault(fill, []).append(f"M{x:.1f} {y:.1f}h{wide:.1f}v{high:.1f}h{-wide:.1f}z")
    drawn = [f'<path d="{"".join(path)}" fill="{fill}" stroke="{PAPER}"/>' for fill, path in paths.items()]
    return drawn + [label(x, y, w, size=SIZE, anchor=at, color=c, bold=b) for x, y, w, at, c, b in words]


def as_plot(laid_out: Layout, text: str) -> Plot:
    """As PNG."""
    import matplotlib.figure
    from matplotlib.patches import Rectangle

    boxes, words, height = laid_out
    drawn = matplotlib.figure.Figure(figsize=(WIDTH / 96, height / 96), dpi=96)
    axes = drawn.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(height, 0)
    for x, y, wide, high, fill in boxes:
        axes.add_patch(Rectangle((x, y), wide, high, facecolor=fill, edgecolor=PAPER, linewidth=0.8))
    sides = {"start": "left", "middle": "center", "end": "right"}
    for x, y, what, anchor, color, bold in words:
        weight = "bold" if bold else "normal"
        axes.text(x, y, what, ha=sides[anchor], va="center_baseline", color=color, weight=weight, fontsize=SIZE * 0.75)
    return plot(drawn, text)


# ---- where everything goes -------------------------------------------------------------------------------------------


def layout(runs: Mapping[str, "Run"]) -> Layout:
    longest = max(run.makespan for run in runs.values())
    boxes, words = [], []
    top = 12.0
    for title, run in runs.items():
        first, schedule = min(row[0] for row in run.begin), run.schedule
        scale = (RIGHT - LEFT) / float(longest)
        words.append(Words(16, top + 14, f"{title}, {float(run.bubble):.0%} idle", "start", bold=True))
        if run.peak_memory is not None:
            words.append(Words(WIDTH - 14, top + 14, "holds", "end"))
        for rank in range(schedule.ranks):
            y = top + HEAD + PITCH * rank
            boxes.append(Box(8, y, 8, HIGH, rank_color(rank)))
            words.append(Words(22, y + HIGH / 2, f"rank {rank}", "start"))
            if run.peak_memory is not None:
                words.append(Words(WIDTH - 14, y + HIGH / 2, f"{float(run.peak_memory[rank]):.3g}", "end", bold=True))
        shades = shade_of(schedule)
        for rank, action, begin, end in run.bars():
            x, wide = LEFT + float(begin - first) * scale, float(end - begin) * scale
            y, fill = top + HEAD + PITCH * rank, shades[action.stage][action.kind]
            boxes.append(Box(x, y, wide, HIGH, fill))
            if wide >= DIGIT * len(number := str(action.micro_batch)):
                words.append(Words(x + wide / 2, y + HIGH / 2, number, color=text_color(fill)))
        top += HEAD + PITCH * schedule.ranks + FOOT
    swatches, meanings = _legend(runs, top)
    return boxes + swatches, words + meanings, top + HIGH + 6


def _legend(runs: Mapping[str, "Run"], top: float) -> tuple[list[Box], list[Words]]:
    """A swatch for each kind of action, and for each shade of it."""
    seen: dict[str, dict[str, None]] = {}  # kind -> its fills in order
    for run in runs.values():
        shades = shade_of(run.schedule)
        for stage, kind in sorted({action[:2] for row in run.schedule.rows for action in row}):
            seen.setdefault(kind, {})[shades[stage][kind]] = None
    boxes, words, x = [], [], LEFT
    for kind in (kind for kind in KINDS if kind in seen):
        for fill in seen[kind]:
            boxes.append(Box(x, top + 3, 22, 20, fill))
            x += 22
        words.append(Words(x + 8, top + 13, MEANS[kind], "start"))
        x += 30 + 0.58 * SIZE * len(MEANS[kind])
    return boxes, words


def shade_of(schedule: "Schedule") -> list[dict[str, str]]:
    """For each stage the colour of each kind: a shade further than the stage that its rank holds before it."""
    before: dict[int, int] = {}
    shades = []
    for rank in schedule.rank_of:
        step = before[rank] = before.get(rank, -1) + 1
        amount = 1 - 0.55**step
        light = {"F": mixed(FORWARD, PAPER, amount)}
        shades.append(light | {kind: mixed(KINDS[kind], INK, 0.6 * amount) for kind in "BIW"})
    return shades


def mixed(color: str, other: str, amount: float) -> str:
    """``amount`` of the other colour, from 0 to 1."""
    pairs = ((int(color[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + amount * (b - a)):02X}" for a, b in pairs)


# ---- in words --------------------------------------------------------------------------------------------------------


def summary(title: str, run: "Run") -> str:
    held = ", ".join(f"{float(peak):.3g}" for peak in run.peak_memory)
    return f"{title}: {float(run.bubble):.1%} idle, the ranks hold at most {held}"


def orders(schedule: "Schedule", ranks: Iterable[int]) -> str:
    return ", ".join(f"rank {rank} does {in_order(schedule, rank)}" for rank in ranks)


def in_order(schedule: "Schedule", rank: int, most: int = 8) -> str:
    """ "F0-3 B0 F4 B1-4", up to so many parts; where ranks have several stages, with the stage: "0F0-3 4F0"."""
    row = schedule.rows[rank]
    several = schedule.stages > schedule.ranks
    said = []
    for (stage, kind, _), same in groupby(enumerate(row), lambda at: (*at[1][:2], at[1].micro_batch - at[0])):
        numbers = [action.micro_batch for _, action in same]
        said.append(f"{stage if several else ''}{kind}{numbers[0]}" + (f"-{numbers[-1]}" if len(numbers) > 1 else ""))
    return " ".join(said[:most]) + (" and so on" if len(said) > most else "")
