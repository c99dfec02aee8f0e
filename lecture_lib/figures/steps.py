"""How long 1 GB takes from each place: three accelerators from their datasheets, and the reader's own machine."""

import re

from lecture_lib.hardware import get
from lecture_lib.hardware import ladder as steps_of

from .axes import LogAxis, time_words, vertical_grid
from .ladder import first_word
from .palette import FAINT, GRID, PALETTE
from .plot import Plot, canvas, plot
from .svg import Figure, box, figure, label, n

PAD, LEFT, PITCH = 16, 200, 44
MACHINES = {"H100": "H100", "B200": "B200", "GB200": "NVL72"}  # name in the datasheets, name of the column
PLACES = {
    "registers": "registers",
    "L1": "L1, shared mem.",
    "L2": "L2 cache",
    "HBM": "HBM",
    "NVLink": "other GPU",
    "host": "host memory",
    "network": "other node",
}


def ladders(name: str) -> Figure:
    """A dot for each place and accelerator, and the time beside it."""
    columns = {title: steps_of(get(machine)) for machine, title in MACHINES.items()}
    top, right = 84, LEFT + 370
    bottom = top + PITCH * len(PLACES) - 8
    axis = LogAxis(1e-6, 1e-1, LEFT, right)
    strokes = [
        label(PAD, 30, "where the data is", anchor="start", bold=True),
        label((LEFT + right) / 2, 30, "time to move 1 GB", bold=True),
        *vertical_grid(axis, 54, bottom, time_words),
    ]
    for j, title in enumerate(columns):
        strokes += [dot(j, right + 34 + 95 * j, 30), label(right + 48 + 95 * j, 30, title, anchor="start", bold=True)]
    words = []
    for i, place in enumerate(PLACES.values()):
        y, times = top + PITCH * i + 8, []
        strokes.append(label(PAD, y, place, anchor="start"))
        for j, steps in enumerate(columns.values()):
            seconds = steps[i].seconds()
            times.append(time_words(seconds) if seconds else "not published")
            strokes.append(label(right + 114 + 95 * j, y, time_words(seconds) if seconds else "?", anchor="end"))
            if seconds:  # drawn a little above each other, so that equal ones are all seen
                strokes.append(dot(j, axis.at(seconds), y + 11 * (j - 1)))
        words.append(f"{place} {', '.join(times)}")
    text = f"time to move 1 GB into the compute units of one {', '.join(columns)}: {'; '.join(words)}."
    return figure(name, "Three ladders", text, 900, bottom + 38, strokes)


def dot(j: int, x: float, y: float) -> str:
    """A disc, a square, a triangle, each in its colour."""
    color = PALETTE[j]
    if j == 0:
        return f'<circle cx="{n(x)}" cy="{n(y)}" r="8" fill="{color}"/>'
    if j == 1:
        return box(x - 7, y - 7, 14, 14, fill=color, stroke=color, radius=0)
    return f'<path d="M{n(x)} {n(y - 9)}l9 16h-18z" fill="{color}"/>'


def your_ladder(report, machine: str = "H100") -> Plot:
    """What ``probe()`` measured, below the datasheet of ``machine``, on one axis."""
    blocks = {
        machine: [(PLACES[first_word(step.name)], step.seconds()) for step in steps_of(get(machine)) if step.seconds()],
        "this machine": [
            (row.name.split(",")[0], 1e9 / row.bandwidth)
            for row in (*report.levels, *report.transfers)
            if not re.match(r"GPU 0 to GPU ([2-9]|\d\d)", row.name)  # all as far as the first
        ],
    }
    rows = sum(map(len, blocks.values()))
    figure, axes = canvas(height=100 + 24 * rows)
    y, ticks, words = 0.0, {}, []
    for (title, block), color in zip(blocks.items(), (FAINT, PALETTE[0])):
        for place, seconds in block:
            ticks[y] = f"{title}: {place}" if place == block[0][0] else place
            axes.barh(y, seconds, color=color)
            axes.text(1.15 * seconds, y, time_words(seconds), va="center", fontsize=14)
            y += 1
        y += 0.7
        words.append(f"{title}: {', '.join(f'{place} {time_words(seconds)}' for place, seconds in block)}")
    axes.set_xscale("log")
    axes.set_xlim(1e-6, 20)
    axes.set_yticks(list(ticks), ticks.values())
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(lambda seconds, _: time_words(seconds))
    axes.set_xlabel("time to move 1 GB")
    axes.grid(axis="x", color=GRID)
    axes.set_axisbelow(True)
    return plot(figure, f"Your ladder: time to move 1 GB; {'; '.join(words)}.")
