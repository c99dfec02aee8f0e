"""What each axis of parallelism cuts: the batch, the sequence, the layers, or every layer; and what travels for it."""

from .palette import FAINT, INK, PALETTE, WASH
from .svg import ROW, Figure, box, figure, label, line, table

AXES = {"dp": PALETTE[0], "cp": PALETTE[3], "pp": PALETTE[2], "tp": PALETTE[1]}
MINE = PALETTE[6]
TRAVELS = (  # who most, first
    ("tp", "activations", "four times a layer, each pass"),
    ("cp", "keys and values", "once a layer, each pass"),
    ("pp", "activations", "at each cut, each micro-batch"),
    ("dp", "gradients, weights", "once a step"),
)


def four_cuts(name: str) -> Figure:
    """The batch is cut in two directions, the model in two others; a GPU has one piece of each."""
    top, high = 66, 192
    strokes = _block(60, top, 320, high, 4, 2, (1, 0), ("dp", "cp"))
    strokes += _block(500, top, 320, high, 4, 4, (2, 1), ("pp", "tp"))
    strokes += [
        label(220, 24, "the batch", bold=True),
        label(660, 24, "the model", bold=True),
        label(220, top + high + 30, "cp cuts the sequences", color=AXES["cp"], bold=True),
        label(660, top + high + 30, "tp cuts every layer", color=AXES["tp"], bold=True),
    ]
    for x, axis in ((60, "dp"), (500, "pp")):
        strokes.append(label(x - 24, top + high / 2, axis, color=AXES[axis], bold=True))
    strokes += [
        label(220, 50, "dp: which sequences", color=AXES["dp"]),
        label(660, 50, "pp: which layers", color=AXES["pp"]),
    ]
    y = top + high + 80
    strokes += table(y, TRAVELS, (60, 120, 400), AXES)
    words = (
        "dp gives each rank some sequences, cp a part of each sequence, pp some layers, tp a part of every layer; one "
        "GPU has one piece of the batch and one of the model. "
        + "; ".join(f"for {axis} travel {what} {when}" for axis, what, when in TRAVELS)
        + "."
    )
    return figure(name, "Four cuts", words, 900, y + ROW * len(TRAVELS) - 4, strokes)


def _block(x, y, w, h, rows, columns, mine, axes) -> list[str]:
    """A block cut by two axes; ``mine``: the row and column of one GPU's piece."""
    strokes = [box(x, y, w, h, fill=WASH, stroke=FAINT, radius=0)]
    row, column = mine
    dy, dx = h / rows, w / columns
    strokes.append(box(x + column * dx, y + row * dy, dx, dy, fill=MINE, stroke=MINE, radius=0))
    strokes += [line([(x, y + i * dy), (x + w, y + i * dy)], color=AXES[axes[0]], width=4) for i in range(1, rows)]
    strokes += [line([(x + i * dx, y), (x + i * dx, y + h)], color=AXES[axes[1]], width=4) for i in range(1, columns)]
    strokes.append(box(x, y, w, h, fill="none", stroke=INK, radius=0))
    strokes.append(label(x + (column + 0.5) * dx, y + (row + 0.5) * dy, "a GPU", bold=True))
    return strokes
