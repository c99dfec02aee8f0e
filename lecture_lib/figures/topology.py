"""Who sends to whom: around a ring, down a tree, and not at all where memory is shared."""

import math

from .palette import FAINT, INK, PAPER, WASH, rank_color, text_color
from .svg import Figure, box, figure, label, line, n

RADIUS = 34


def ring(name: str) -> Figure:
    """Four ranks; each sends a quarter to its right neighbour."""
    places = [(450 + 250 * math.sin(a), 150 - 95 * math.cos(a)) for a in (math.tau * r / 4 for r in range(4))]
    strokes = []
    for rank, at in enumerate(places):
        to = places[(rank + 1) % 4]
        strokes.append(arrow(at, to, rank_color(rank)))
        middle = (at[0] + to[0]) / 2, (at[1] + to[1]) / 2
        side = 1 if middle[0] > 450 else -1
        strokes.append(label(middle[0] + 70 * side, middle[1] + (-14 if middle[1] < 150 else 14), f"chunk {rank}"))
    strokes += [node(x, y, rank) for rank, (x, y) in enumerate(places)]
    sends = ", ".join(f"rank {rank} chunk {rank} to rank {(rank + 1) % 4}" for rank in range(4))
    return figure(name, "A ring", f"in its first step, all at once, {sends}.", 900, 300, strokes)


def tree(name: str) -> Figure:
    """Eight ranks; in step k each rank that has the data sends it 2^k further."""
    width, strokes, circles, words = 100, [], [], []
    for rank in range(8):
        x = 100 + width * rank
        strokes.append(label(x, 30, rank, bold=True))
    for step in range(4):
        y = 70 + 62 * step
        strokes.append(label(16, y, "start" if step == 0 else f"step {step}", anchor="start"))
        if step:
            far = 2 ** (step - 1)
            words.append("; ".join(f"{r} to {r + far}" for r in range(far)))
            strokes += [
                arrow((100 + width * r, y - 62), (100 + width * (r + far), y), INK, start=20, stop=22)
                for r in range(far)
            ]
        for rank in range(8):
            has = rank < 2**step
            fill = rank_color(0) if has else PAPER
            edge = rank_color(0) if has else FAINT
            circle = f'cx="{100 + width * rank}" cy="{y}" r="18"'
            circles.append(f'<circle {circle} fill="{fill}" stroke="{edge}" stroke-width="2"/>')
    strokes += circles  # over the arrows that pass behind them
    text = "rank 0's tensor reaches 8 ranks in 3 steps: " + ", then ".join(words) + "."
    return figure(name, "A tree", text, 900, 290, strokes)


def shared_memory(name: str) -> Figure:
    """Four ranks, four buffers in memory that all have mapped; rank 1 adds slice 1 of all and writes it to all."""
    strokes, left, pitch, w = [], 250, 150, 34
    for rank in range(4):
        x = left + pitch * rank
        strokes.append(label(x + 2 * w, 28, f"rank {rank}", bold=True))
        for piece in range(4):
            mine = piece == 1
            fill = rank_color(1) if mine else WASH
            strokes.append(box(x + w * piece, 48, w - 3, 40, fill=fill, stroke=fill, radius=3))
            strokes.append(label(x + w * piece + w / 2 - 1, 68, piece, color=text_color(fill) if mine else INK))
    strokes.append(box(120, 170, 760, 78, fill=PAPER, stroke=rank_color(1), width=3))
    strokes.append(label(500, 195, "rank 1 adds slice 1 of all buffers, in its cache,", bold=True))
    strokes.append(label(500, 224, "and writes the sum to slice 1 of all buffers"))
    for rank in range(4):
        x = left + pitch * rank + 1.5 * w
        strokes.append(arrow((x - 9, 88), (x - 9, 170), rank_color(1), start=2, stop=2))
        strokes.append(arrow((x + 9, 170), (x + 9, 88), rank_color(1), start=2, stop=2))
    strokes.append(label(16, 42, "buffers that all", anchor="start"))
    strokes.append(label(16, 68, "four have mapped", anchor="start"))
    text = "rank r adds slice r of the buffers of all ranks and writes the sum to slice r of all of them; no messages."
    return figure(name, "An all-reduce in shared memory", text, 900, 264, strokes)


def node(x: float, y: float, rank: int) -> str:
    fill = rank_color(rank)
    circle = f'<circle cx="{n(x)}" cy="{n(y)}" r="{RADIUS}" fill="{fill}" stroke="{PAPER}" stroke-width="3"/>'
    return circle + label(x, y, rank, bold=True, color=text_color(fill), size=24)


def arrow(at, to, color, *, start=RADIUS + 4, stop=RADIUS + 8) -> str:
    """A straight arrow between two places, from ``start`` pixels behind the one to ``stop`` before the other."""
    (x0, y0), (x1, y1) = at, to
    length = math.hypot(x1 - x0, y1 - y0)
    ux, uy = (x1 - x0) / length, (y1 - y0) / length
    x0, y0, x1, y1 = x0 + ux * start, y0 + uy * start, x1 - ux * stop, y1 - uy * stop
    back = x1 - 14 * ux, y1 - 14 * uy
    corners = [(x1, y1), (back[0] + 7 * uy, back[1] - 7 * ux), (back[0] - 7 * uy, back[1] + 7 * ux)]
    head = " ".join(f"{n(x)},{n(y)}" for x, y in corners)
    return line([(x0, y0), (back[0] + 2 * ux, back[1] + 2 * uy)], color=color, width=4) + (
        f'<polygon points="{head}" fill="{color}"/>'
    )
