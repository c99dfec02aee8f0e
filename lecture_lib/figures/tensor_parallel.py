"""Tensor parallelism in pictures: who holds which part of a matrix, of the heads, of the activations, and what travels.

A coloured piece is on the rank of that colour and number; grey is on all ranks.
"""

from .data_parallel import HIGH, LEFT, PITCH, RANKS, WIDE, down, filled
from .palette import FAINT, GREY, INK, PALETTE, PAPER, WASH, rank_color, text_color
from .svg import Figure, box, figure, label, line

LIGHT, DARK = PALETTE[5], PALETTE[0]  # forward, backward


def matmul_splits(name: str) -> Figure:
    """y = x A, three times: the rows of x over the ranks, the columns of A, or the rows of A (and the columns of x)."""
    high = 104
    columns = {"x": (236, 112), "A": (420, 144), "y": (640, 144)}  # left edge, width
    strokes = [label(x + w / 2, 22, what, bold=True) for what, (x, w) in columns.items()]
    (x, x_wide), (a, a_wide), (y, y_wide) = columns.values()
    for row, split in enumerate(("rows of x", "columns of A", "rows of A")):
        top = 46 + 136 * row
        middle = top + high / 2
        strokes += [
            label(16, middle, split, anchor="start", bold=True),
            label((x + x_wide + a) / 2, middle, "@", mono=True),
            label((a + a_wide + y) / 2, middle, "="),
        ]
        if row == 0:
            strokes += [*striped(x, top, x_wide, high, "rows"), *grey(a, top, a_wide, high)]
            strokes += striped(y, top, y_wide, high, "rows")
        elif row == 1:
            strokes += [*grey(x, top, x_wide, high), *striped(a, top, a_wide, high, "columns")]
            strokes += striped(y, top, y_wide, high, "columns")
        else:
            strokes += [*striped(x, top, x_wide, high, "columns"), *striped(a, top, a_wide, high, "rows")]
            strokes += sheets(y, top, y_wide, high)
    text = (
        f"y = x A on {RANKS} ranks. Split the rows of x: each rank has a copy of A and makes some rows of y. Split the "
        "columns of A: each has a copy of x and makes some columns of y. Split the rows of A, and the columns of x: "
        "each makes something of the shape of y, four sheets one behind the other."
    )
    return figure(name, "One matmul, split three ways", text, 900, 46 + 136 * 2 + high + 44, strokes)


def striped(x: float, y: float, w: float, h: float, way: str) -> list[str]:
    """A matrix whose rows, or columns, are each on one rank."""
    strokes = []
    for rank in range(RANKS):
        color = rank_color(rank)
        at = (x, y + rank * h / RANKS) if way == "rows" else (x + rank * w / RANKS, y)
        size = (w, h / RANKS - 2) if way == "rows" else (w / RANKS - 2, h)
        strokes.append(box(*at, *size, fill=color, stroke=color, radius=2))
        strokes.append(label(at[0] + size[0] / 2, at[1] + size[1] / 2, rank, color=text_color(color)))
    return strokes


def grey(x: float, y: float, w: float, h: float) -> list[str]:
    return [box(x, y, w, h, fill=GREY, stroke=FAINT, radius=2), label(x + w / 2, y + h / 2, "all")]


def sheets(x: float, y: float, w: float, h: float, step: float = 28, rise: float = 9) -> list[str]:
    """Matrices of the whole shape, one from each rank, one behind the other."""
    strokes = []
    for rank in reversed(range(RANKS)):
        color, left = rank_color(rank), x + step * rank
        middle = left + (w / 2 if rank == 0 else w - step / 2)
        top = y + rise * (RANKS - 1 - rank)
        strokes.append(box(left, top, w, h, fill=color, stroke=PAPER, width=2.5, radius=2))
        strokes.append(label(middle, top + h / 2, rank, color=text_color(color)))
    return strokes


def column_then_row(name: str) -> Figure:
    """A column for each rank, through two layers: its columns of A, its features, its rows of B, and one all-reduce."""
    rows = {"x": 82, "A columns": 156, "gelu(x A)": 230, "B rows": 304, "y": 452}
    strokes = [label(16, y, words, anchor="start", bold=True) for words, y in rows.items()]
    x, a, h, b, y = rows.values()
    for rank in range(RANKS):
        color, left = rank_color(rank), LEFT + PITCH * rank
        middle, mine = left + WIDE / 2, f"{64 * rank} to {64 * rank + 63}"
        strokes += [
            label(middle, 30, f"rank {rank}", bold=True),
            *filled(left, x, "all", WASH, INK),
            *down(middle, x + HIGH / 2, a - HIGH / 2),
            *filled(left, a, mine, color),
            *down(middle, a + HIGH / 2, h - HIGH / 2),
            *filled(left, h, mine, color),
            *down(middle, h + HIGH / 2, b - HIGH / 2),
            *filled(left, b, mine, color),
            *down(middle, b + HIGH / 2, 356),
            *down(middle, 400, y - HIGH / 2),
            *filled(left, y, "all", WASH, INK),
        ]
    whole = PITCH * RANKS - PITCH + WIDE
    strokes += [
        box(LEFT, 356, whole, 44, fill=INK, radius=8),
        label(LEFT + whole / 2, 378, "all-reduce: sum", color=PAPER, bold=True),
    ]
    text = (
        f"an MLP with {64 * RANKS} inner features on {RANKS} ranks; all have x, each has 64 columns of A, makes "
        "these features of gelu(x A), and multiplies them with the same rows of B; an all-reduce adds the parts up, "
        "and all have y."
    )
    return figure(name, "Column, then row", text, 900, y + HIGH / 2 + 16, strokes)


def f_and_g(name: str) -> Figure:
    """The pair again from left to right, with what moves at its two ends on the way there and on the way back."""
    top, pitch, high = 62, 54, 42
    bottom = top + pitch * (RANKS - 1) + high
    middle = (top + bottom) / 2
    x, f, inside, g, y = (30, 110), (216, 44), (326, 248), (640, 44), (760, 110)  # left edge, width
    strokes = [
        label(x[0] + x[1] / 2, 24, "on all ranks", bold=True),
        label(inside[0] + inside[1] / 2, 24, "each rank its own", bold=True),
        label(y[0] + y[1] / 2, 24, "on all ranks", bold=True),
    ]
    for (left, wide), words in ((x, "x"), (y, "y")):
        strokes.append(box(left, middle - 34, wide, 68, fill=WASH, radius=8))
        strokes.append(label(left + wide / 2, middle, words, bold=True))
    for (left, wide), words in ((f, "f"), (g, "g")):
        strokes.append(box(left, top - 4, wide, bottom - top + 8, fill=INK, radius=8))
        strokes.append(label(left + wide / 2, middle, words, color=PAPER, bold=True, size=26))
    strokes += both_ways(x[0] + x[1], f[0], middle) + both_ways(g[0] + g[1], y[0], middle)
    for rank in range(RANKS):
        color, at = rank_color(rank), top + pitch * rank + high / 2
        strokes.append(box(inside[0], at - high / 2, inside[1], high, fill=color, stroke=color, radius=8))
        strokes.append(
            label(inside[0] + inside[1] / 2, at, f"gelu(x A{rank}) B{rank}", color=text_color(color), mono=True)
        )
        strokes += both_ways(f[0] + f[1], inside[0], at) + both_ways(inside[0] + inside[1], g[0], at)
    moves = {"forward": ("nothing", "all-reduce"), "backward": ("all-reduce", "nothing")}
    for row, (way, (at_f, at_g)) in enumerate(moves.items()):
        at, color = bottom + 36 + 32 * row, (LIGHT, DARK)[row]
        strokes += [
            box(30, at - 9, 26, 18, fill=color, stroke=color),
            label(66, at, way, anchor="start", bold=True),
            label(f[0] + f[1] / 2, at, at_f),
            label(g[0] + g[1] / 2, at, at_g),
        ]
    text = (
        "x is the same on all ranks; f gives it to a part where rank r computes gelu(x A_r) B_r; g makes y, the same "
        "on all ranks again. Forward, nothing moves at f, and g is an all-reduce. Backward, nothing moves at g, and f "
        "is an all-reduce."
    )
    return figure(name, "f and g", text, 900, bottom + 36 + 32 + 24, strokes)


def both_ways(left: float, right: float, y: float) -> list[str]:
    """A light arrow to the right for the forward pass, a dark one to the left for the backward pass."""
    a, b = left + 4, right - 4
    return [
        line([(a, y - 9), (b - 12, y - 9)], color=LIGHT, width=5),
        f'<path d="M{b:g} {y - 9:g}l-13 -8v16z" fill="{LIGHT}"/>',
        line([(a + 12, y + 9), (b, y + 9)], color=DARK, width=5),
        f'<path d="M{a:g} {y + 9:g}l13 -8v16z" fill="{DARK}"/>',
    ]


def heads(name: str, query: int = 8) -> Figure:
    """Query heads over ranks, and the key and value heads that they use, if there are as many as ranks, or fewer."""
    rows = {f"{query} query": 86, "4 key, value": 164, "or only 2": 242}
    strokes = [label(16, y, words, anchor="start", bold=True) for words, y in rows.items()]
    each = query // RANKS
    for rank in range(RANKS):
        color, left = rank_color(rank), LEFT + PITCH * rank
        strokes.append(label(left + WIDE / 2, 30, f"rank {rank}", bold=True))
        for i in range(each):
            wide = WIDE / each
            at, head = left + i * wide, each * rank + i
            strokes.append(box(at, 86 - HIGH / 2, wide - 4, HIGH, fill=color, stroke=color, radius=8))
            strokes.append(label(at + wide / 2 - 2, 86, f"q {head}", color=text_color(color)))
        strokes += filled(left, 164, f"k {rank}, v {rank}", color)
        strokes += filled(left, 242, f"k {rank // 2}, v {rank // 2}", color)
    text = (
        f"{query} query heads on {RANKS} ranks, {each} on each; of 4 key and value heads one on each, the one that its "
        "query heads use; of 2 key and value heads also one on each: ranks 0 and 1 hold the same, and so do ranks 2 "
        "and 3."
    )
    return figure(name, "Heads", text, 900, 242 + HIGH / 2 + 18, strokes)


def sequence_parallel(name: str) -> Figure:
    """Activations as squares, (seq, hidden): which of it a rank holds before, inside and after a part, both ways."""
    size, lefts = 120, (136, 442, 748)
    strokes = [
        label(left + size / 2, 24, words, bold=True)
        for left, words in zip(lefts, ("norm, add", "attention, MLP", "norm, add"))
    ]
    versions = {
        ("tensor", "parallel"): ("all positions", "copy", "all-reduce"),
        ("and", "sequence", "parallel"): ("its positions", "all-gather", "reduce-scatter"),
    }
    for row, (title, (outside, *moves)) in enumerate(versions.items()):
        top = 48 + 178 * row
        middle = top + size / 2
        for i, words in enumerate(title):
            strokes.append(label(16, middle + 26 * (i - (len(title) - 1) / 2), words, anchor="start", bold=True))
        for left, words in zip(lefts, (outside, "its heads", outside)):
            if words == "all positions":
                strokes += grey(left, top, size, size)
            else:
                strokes += striped(left, top, size, size, "rows" if words == "its positions" else "columns")
            strokes.append(label(left + size / 2, top + size + 20, words))
        for left, following, words in zip(lefts, lefts[1:], moves):
            a, b = left + size + 8, following - 6
            strokes += [
                label((a + b) / 2, middle - 22, words),
                line([(a, middle), (b - 12, middle)], width=3),
                f'<path d="M{b:g} {middle:g}l-14 -9v18z" fill="{INK}"/>',
            ]
    text = (
        "activations as squares, positions down, features across. Tensor parallel: around norm and addition all ranks "
        "hold all positions; a copy leads into attention or MLP, where each rank has its heads or features; an "
        "all-reduce leads out. And sequence parallel: around norm and addition each rank holds its positions; an "
        "all-gather leads in, a reduce-scatter leads out."
    )
    return figure(name, "Sequence parallelism", text, 900, 48 + 178 + size + 44, strokes)
