"""Data parallelism in one picture, and what ZeRO leaves of it on each rank."""

from .palette import FAINT, GREY, INK, PALE, PALETTE, PAPER, WASH, rank_color, text_color
from .svg import Figure, box, figure, label, line

RANKS = 4
LEFT, PITCH, WIDE, HIGH = 150, 186, 170, 46


def data_parallel(name: str) -> Figure:
    """A column for each rank: its share of the batch, all parameters, its gradient, the average of all gradients."""
    rows = {"batch": 86, "parameters": 178, "gradient": 270, "average": 426}
    strokes = [label(16, y, words, anchor="start", bold=True) for words, y in rows.items()]
    share, parameters, gradient, average = rows.values()
    for rank in range(RANKS):
        color, x = rank_color(rank), LEFT + PITCH * rank
        middle = x + WIDE / 2
        rows_of = f"rows {4 * rank} to {4 * rank + 3}"
        strokes += [
            label(middle, 30, f"rank {rank}", bold=True),
            *filled(x, share, rows_of, color),
            *down(middle, share + HIGH / 2, parameters - HIGH / 2),
            *filled(x, parameters, "all", WASH, INK),
            *down(middle, parameters + HIGH / 2, gradient - HIGH / 2),
            *filled(x, gradient, "of its rows", color),
            *down(middle, gradient + HIGH / 2, 326),
            *down(middle, 370, average - HIGH / 2),
            *filled(x, average, "of all rows", WASH, INK),
        ]
    strokes += [
        box(LEFT, 326, PITCH * RANKS - PITCH + WIDE, 44, fill=INK, radius=8),
        label(LEFT + (PITCH * RANKS - PITCH + WIDE) / 2, 348, "all-reduce: average", color=PAPER, bold=True),
    ]
    text = (
        f"a batch of {4 * RANKS} rows on {RANKS} ranks; each rank has 4 rows of its own and a copy of all parameters, "
        "and computes the gradient of its rows; an all-reduce gives every rank the average, the gradient of all rows."
    )
    return figure(name, "Data parallelism", text, 900, average + HIGH / 2 + 18, strokes)


def filled(x: float, y: float, words: str, fill: str, stroke: str | None = None) -> list[str]:
    return [
        box(x, y - HIGH / 2, WIDE, HIGH, fill=fill, stroke=stroke or fill, radius=8),
        label(x + WIDE / 2, y, words, color=text_color(fill)),
    ]


def down(x: float, top: float, bottom: float) -> list[str]:
    head = f'<path d="M{x:g} {bottom - 2:g}l-9 -14h18z" fill="{INK}"/>'
    return [line([(x, top + 2), (x, bottom - 14)], width=3), head]


STAGES = {  # how many times P bytes each rank holds, and which of it is its own share
    "0: data parallel": (False, False, False),
    "1: + optimizer": (False, False, True),
    "2: + gradients": (False, True, True),
    "3: + parameters": (True, True, True),
}
KINDS = {"parameters": 4, "gradients": 4, "Adam's m and v": 8}  # bytes for each parameter, fp32


def zero(name: str) -> Figure:
    """A row for each stage of ZeRO: grey is held by all ranks, a coloured piece by one rank."""
    left, top, unit, pitch, high = 200, 104, 33, 70, 46
    strokes, words = [], []
    x = left
    for kind, size in KINDS.items():
        strokes.append(label(x + size * unit / 2, 26, kind, bold=True))
        strokes.append(label(x + size * unit / 2, 54, f"{size} P"))
        x += size * unit + 14
    strokes += [label(x + 58, 26, "each rank", bold=True), label(x + 58, 54, "holds")]
    for i, (stage, sharded) in enumerate(STAGES.items()):
        y = top + pitch * i
        strokes.append(label(16, y, stage, anchor="start", bold=True))
        x, held = left, 0.0
        for size, split in zip(KINDS.values(), sharded):
            wide = size * unit
            held += size / RANKS if split else size
            if split:
                piece = wide / RANKS
                for rank in range(RANKS):
                    color = rank_color(rank)
                    strokes.append(box(x + rank * piece, y - high / 2, piece - 3, high, fill=color, stroke=color))
                    strokes.append(label(x + (rank + 0.5) * piece - 1.5, y, rank, color=text_color(color)))
            else:
                strokes.append(box(x, y - high / 2, wide - 3, high, fill=GREY, stroke=FAINT))
                strokes.append(label(x + wide / 2, y, "all ranks"))
            x += wide + 14
        strokes.append(label(x + 58, y, f"{held:g} P", bold=True))
        words.append(f"stage {stage}, {held:g} P bytes")
    text = (
        f"bytes that each of {RANKS} ranks holds for P parameters in fp32 with Adam, without activations: "
        f"{'; '.join(words)}. In stage 0 all ranks hold the same."
    )
    return figure(name, "ZeRO", text, 900, top + pitch * 3 + high / 2 + 18, strokes)


def layers_held(name: str, layers: int = 4) -> Figure:
    """Which layers are whole on a rank in each step of a forward and a backward pass of ZeRO-3."""
    order = [*range(layers), *reversed(range(layers))]
    left, top, wide, high = 130, 96, 92, 46
    strokes = [
        label(left + wide * layers / 2, 24, "forward", bold=True),
        label(left + wide * layers * 1.5, 24, "backward", bold=True),
    ]
    for layer in range(layers):
        strokes.append(label(16, top + high * layer, f"layer {layer}", anchor="start", bold=True))
    for step, at in enumerate(order):
        x = left + wide * step
        following = order[step + 1] if step + 1 < len(order) else None
        strokes.append(label(x + wide / 2, 56, step + 1))
        for layer in range(layers):
            y = top + high * layer
            fill, words = WASH, f"1/{RANKS}"
            if layer == at:
                fill, words = PALETTE[0], "works"
            elif layer == following:
                fill, words = PALE, "arrives"
            strokes.append(box(x + 2, y - high / 2 + 2, wide - 4, high - 4, fill=fill, stroke=fill))
            strokes.append(label(x + wide / 2, y, words, color=text_color(fill)))
    text = (
        f"{layers} layers on one of {RANKS} ranks in the {2 * layers} steps of a forward and a backward pass; in each "
        f"step one layer works and is whole, the next one arrives, and of all others the rank holds 1/{RANKS}."
    )
    return figure(name, "Whole while it works", text, 900, top + high * layers - high / 2 + 14, strokes)
