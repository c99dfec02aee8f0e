"""Who holds which part of a tensor: shards, copies, and parts of a sum that nobody has added up yet."""

from .palette import FAINT, GREY, INK, PAPER, rank_color, text_color
from .svg import Figure, box, figure, label, line

RANKS = 4


def placements(name: str) -> Figure:
    """A column for each rank, a row for each placement of a (4, 4) tensor on a 1-d mesh."""
    left, pitch, size, top, row_pitch = 214, 172, 88, 54, 102
    rows = ("Shard(0)", "Shard(1)", "Replicate()", "Partial()")
    strokes = [label(left + pitch * r + size / 2, 28, f"rank {r}", bold=True) for r in range(RANKS)]
    for i, placement in enumerate(rows):
        y = top + row_pitch * i
        strokes.append(label(16, y + size / 2, placement, anchor="start", bold=True, mono=True))
        for rank in range(RANKS):
            x = left + pitch * rank
            strokes += held(x, y, size, placement, rank)
            if placement == "Partial()" and rank + 1 < RANKS:
                strokes.append(label(x + (size + pitch) / 2, y + size / 2, "+", bold=True, size=30))
    text = (
        "a tensor of 4 rows and 4 columns on 4 ranks. Shard(0): rank r holds row r. Shard(1): rank r holds column r. "
        "Replicate(): each rank holds all of it. Partial(): each rank holds a tensor of the whole shape, and the value "
        "is the sum of the four."
    )
    return figure(name, "Placements", text, 900, top + row_pitch * (len(rows) - 1) + size + 16, strokes)


def held(x: float, y: float, size: float, placement: str, rank: int) -> list[str]:
    """The outline of the whole tensor, and in it what this rank holds."""
    color, quarter = rank_color(rank), size / RANKS
    outline = box(x, y, size, size, fill=PAPER, stroke=FAINT, radius=0)
    if placement == "Shard(0)":
        return [outline, box(x, y + quarter * rank, size, quarter, fill=color, stroke=color, radius=0)]
    if placement == "Shard(1)":
        return [outline, box(x + quarter * rank, y, quarter, size, fill=color, stroke=color, radius=0)]
    if placement == "Replicate()":
        middle = label(x + size / 2, y + size / 2, "all")
        return [box(x, y, size, size, fill=GREY, stroke=INK, radius=0), middle]
    strokes = [box(x, y, size, size, fill=PAPER, stroke=color, width=4, radius=0, dash="8 6")]
    strokes.append(label(x + size / 2, y + size / 2 - 12, "a part", color=INK))
    return [*strokes, label(x + size / 2, y + size / 2 + 14, "of all", color=INK)]


PAIRS = ("[Shard(0), Replicate()]", "[Shard(0), Shard(1)]", "[Replicate(), Partial()]", "[Shard(0), Shard(0)]")


def placements_2d(name: str) -> Figure:
    """Four pairs of placements on a (dp, tp) mesh of 2 x 2 ranks: for each the mesh, and what its ranks hold."""
    size, gap = 62, 22
    wide = 2 * size + gap
    strokes: list[str] = []
    for i, pair in enumerate(PAIRS):
        x0, y0 = 160 + (i % 2) * 430, 86 + (i // 2) * 254
        strokes.append(label(x0 + wide / 2 - 20, y0 - 60, pair, bold=True, mono=True))
        for rank in range(4):
            dp, tp = divmod(rank, 2)
            x, y = x0 + tp * (size + gap), y0 + dp * (size + gap)
            if dp == 0:
                strokes.append(label(x + size / 2, y0 - 20, f"tp {tp}"))
            if tp == 0:
                strokes.append(label(x0 - 16, y + size / 2, f"dp {dp}", anchor="end"))
            strokes += held_2d(x, y, size, pair, rank)
    text = (
        "a square tensor on a mesh of 2 x 2 ranks, rank = 2 dp + tp. Shard(0), Replicate(): ranks 0 and 1 hold the "
        "upper half, ranks 2 and 3 the lower half. Shard(0), Shard(1): each rank holds a quarter, left and right along "
        "tp, upper and lower along dp. Replicate(), Partial(): each rank holds a tensor of the whole shape; the sum of "
        "ranks 0 and 1 is the value, and so is that of ranks 2 and 3. Shard(0), Shard(0): each rank holds a quarter of "
        "the rows, in the order of the ranks."
    )
    return figure(name, "Placements on two axes", text, 900, 86 + 254 + wide + 14, strokes)


def held_2d(x: float, y: float, size: float, pair: str, rank: int) -> list[str]:
    color, half, quarter = rank_color(rank), size / 2, size / 4
    dp, tp = divmod(rank, 2)
    outline = box(x, y, size, size, fill=PAPER, stroke=FAINT, radius=0)
    if pair == "[Replicate(), Partial()]":
        whole = box(x, y, size, size, fill=PAPER, stroke=color, width=4, radius=0, dash="8 6")
        strokes = [whole, label(x + half, y + half, "part")]
        return [*strokes, label(x + size + 11, y + half, "+", bold=True, size=26)] if tp == 0 else strokes
    at, shape = {
        "[Shard(0), Replicate()]": ((0, dp * half), (size, half)),
        "[Shard(0), Shard(1)]": ((tp * half, dp * half), (half, half)),
        "[Shard(0), Shard(0)]": ((0, rank * quarter), (size, quarter)),
    }[pair]
    if shape[1] == quarter:  # too low for a number: it stands in the empty part
        words = label(x + half, y + size * (0.72 if rank < 2 else 0.26), rank)
    else:
        words = label(x + at[0] + shape[0] / 2, y + at[1] + shape[1] / 2, rank, color=text_color(color))
    return [outline, box(x + at[0], y + at[1], *shape, fill=color, stroke=color, radius=0), words]


def moves(name: str) -> Figure:
    """Placements as places, redistributions as arrows between them, each with its collective and the bytes it sends."""
    wide, high, top, bottom = 176, 54, 96, 330
    partial, replicate, shard0, shard1 = (120, top), (780, top), (290, bottom), (610, bottom)
    strokes = []
    for words, (x, y) in {
        "Partial()": partial,
        "Replicate()": replicate,
        "Shard(0)": shard0,
        "Shard(1)": shard1,
    }.items():
        fill = GREY if words == "Replicate()" else PAPER
        strokes.append(box(x - wide / 2, y - high / 2, wide, high, fill=fill, radius=8))
        strokes.append(label(x, y, words, bold=True, mono=True))
    strokes += arrow(214, top, 686, top)
    strokes += [label(450, top - 46, "all-reduce", bold=True), label(450, top - 20, "2 (n-1)/n S")]
    strokes += arrow(150, top + 32, 262, bottom - 32)
    strokes += [label(108, 204, "reduce-scatter", bold=True), label(108, 232, "(n-1)/n S")]
    strokes += arrow(606, bottom - 32, 740, top + 32) + arrow(778, top + 32, 644, bottom - 32)
    strokes += [label(570, 190, "all-gather", bold=True), label(570, 218, "(n-1)/n S")]
    strokes += [label(796, 218, "cut", bold=True), label(796, 246, "nothing")]
    strokes += arrow(384, bottom - 8, 516, bottom - 8) + arrow(516, bottom + 8, 384, bottom + 8)
    strokes += [label(450, bottom + 44, "all-to-all", bold=True), label(450, bottom + 72, "(n-1)/n S/n")]
    text = (
        "what a rank sends to change the placement of a tensor of S bytes on n ranks. Partial to Replicate: "
        "all-reduce, 2 (n-1)/n S. Partial to Shard: reduce-scatter, (n-1)/n S. Shard to Replicate: all-gather, (n-1)/n "
        "S. Replicate to Shard: each rank cuts out its shard, nothing is sent. One Shard to the other: all-to-all, "
        "(n-1)/n S/n."
    )
    return figure(name, "From one placement to another", text, 900, bottom + 96, strokes)


def arrow(x0: float, y0: float, x1: float, y1: float) -> list[str]:
    length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
    ux, uy = (x1 - x0) / length, (y1 - y0) / length
    bx, by = x1 - 14 * ux, y1 - 14 * uy
    head = f"M{x1:.1f} {y1:.1f}L{bx - 8 * uy:.1f} {by + 8 * ux:.1f}L{bx + 8 * uy:.1f} {by - 8 * ux:.1f}z"
    return [line([(x0, y0), (bx, by)], width=3), f'<path d="{head}" fill="{INK}"/>']
