"""Ranks on a mesh, and three ways to have an activation when the backward pass asks for it."""

from .palette import GREY, INK, PALE, PALETTE, rank_color, text_color
from .svg import ROW, Figure, box, figure, label, line, table

SIZES = {"pp": 2, "dp": 2, "tp": 2}
LIGHT, DARK, AGAIN = PALE, PALETTE[0], PALETTE[4]  # forward, backward, forward once more


def mesh(name: str) -> Figure:
    """Eight ranks as pp x dp x tp: two stages side by side, in each the rows share a model and the columns a batch."""
    wide, high, top, gap = 128, 64, 92, 56
    lefts = (150, 544)
    strokes = []
    for stage, left in enumerate(lefts):
        strokes.append(
            label(left + wide + gap / 2, 26, f"stage {stage}: layers {2 * stage} and {2 * stage + 1}", bold=True)
        )
        strokes.append(box(left - 24, 52, 2 * wide + gap + 48, 2 * high + gap + 80, fill="none", radius=12))
        for copy in range(2):
            y = top + copy * (high + gap)
            for part in range(2):
                rank = 4 * stage + 2 * copy + part
                x, color = left + part * (wide + gap), rank_color(rank)
                strokes.append(box(x, y, wide, high, fill=color, stroke=color, radius=8))
                strokes.append(label(x + wide / 2, y + high / 2, f"rank {rank}", color=text_color(color), bold=True))
            strokes += _between(left + wide, y + high / 2, left + wide + gap, y + high / 2, "tp", above=True)
        for part in range(2):
            x = left + part * (wide + gap) + wide / 2
            strokes += _between(x, top + high, x, top + high + gap, "dp", above=False)
    middle = top + high + gap / 2
    strokes += _between(lefts[0] + 2 * wide + gap + 24, middle, lefts[1] - 24, middle, "pp", above=True)
    strokes += [
        label(16, top + high / 2, "samples", anchor="start"),
        label(16, top + high / 2 + 24, "0 to 7", anchor="start"),
        label(16, top + high + gap + high / 2, "samples", anchor="start"),
        label(16, top + high + gap + high / 2 + 24, "8 to 15", anchor="start"),
    ]
    y = top + 2 * high + gap + 70
    says = (
        ("tp", "half of every matrix each", "activations travel, in each layer"),
        ("dp", "the same layers, other samples", "gradients travel, once a step"),
        ("pp", "other layers", "activations travel, for each micro-batch"),
    )
    strokes += table(y, says, (60, 110, 480))
    words = (
        "eight ranks as pp 2 x dp 2 x tp 2; ranks 0 to 3 hold stage 0, ranks 4 to 7 stage 1; along tp, ranks 0 and 1 "
        "are neighbours, along dp ranks 0 and 2, along pp ranks 0 and 4; "
        + "; ".join(f"along {axis}: {holds}, {travels}" for axis, holds, travels in says)
        + "."
    )
    return figure(name, "A mesh", words, 900, y + ROW * len(says) - 6, strokes)


def _between(x0, y0, x1, y1, words: str, *, above: bool) -> list[str]:
    """Two ranks that exchange something."""
    at = ((x0 + x1) / 2, y0 - 18) if above else (x0 + 26, (y0 + y1) / 2)
    return [line([(x0, y0), (x1, y1)], width=4), label(*at, words, bold=True)]


LAYERS, INPUT, SHARE = 4, 0.2, 0.25  # a layer's input is a fifth of its activations; four ranks hold a quarter each


def held(way: str) -> list[tuple[str, float]]:
    """For each piece of work on one rank: "F", "B", or "R" for a forward pass that is repeated, and how many layers'
    activations the rank holds while it does it."""
    size = SHARE if way == "communicate" else 1.0
    if way != "recompute":
        kept = [size * (i + 1) for i in range(LAYERS)]
        return [("F", each) for each in kept] + [("B", each) for each in reversed(kept)]
    forward = [("F", INPUT * i + 1) for i in range(LAYERS)]
    backward = [(kind, INPUT * i + 1) for i in reversed(range(LAYERS)) for kind in "RB"]
    return forward + backward


def three_ways(name: str) -> Figure:
    """A row for each way: what is done one after the other, and above it what is held meanwhile."""
    ways = {
        "store": "all is kept",
        "recompute": "inputs are kept",
        "communicate": "a quarter is here",
    }
    left, wide, unit, row = 200, 54, 17, 128
    strokes, words = [], []
    for i, (way, what) in enumerate(ways.items()):
        y = 44 + row * i + unit * LAYERS
        strokes += [label(16, y - 30, way, anchor="start", bold=True), label(16, y - 2, what, anchor="start")]
        work = held(way)
        for j, (kind, layers) in enumerate(work):
            x = left + wide * j
            strokes.append(box(x, y - unit * layers, wide - 2, unit * layers, fill=GREY, stroke=GREY, radius=0))
            fill = {"F": LIGHT, "B": DARK, "R": AGAIN}[kind]
            strokes.append(box(x, y + 2, wide - 2, 30, fill=fill, stroke=fill))
            strokes.append(label(x + wide / 2 - 1, y + 17, kind.replace("R", "F"), color=text_color(fill), bold=True))
        if way == "communicate":
            strokes += [_dot(left + wide * j - 1, y + 17) for j in range(1, len(work))]
        most = max(layers for _, layers in work)
        words.append(
            f"{way}: {len(work)} passes over a layer, activations of {most:g} layer{'s' * (most != 1)} at most"
        )
    strokes.append(label(left + wide * 8 + 24, 44 + 40, "grey: what a rank holds", anchor="start"))
    y = 44 + row * 2 + unit * LAYERS
    strokes.append(_dot(left + wide * 8 + 32, y + 17))
    strokes.append(label(left + wide * 8 + 50, y + 17, "messages", anchor="start"))
    text = (
        f"the forward and backward passes of {LAYERS} layers on one rank; {'; '.join(words)}. Recompute repeats the "
        "forward pass of each layer; communicate spreads each layer over four ranks, which exchange messages between "
        "all passes."
    )
    return figure(name, "Three ways to have an activation", text, 900, y + 50, strokes)


def _dot(x: float, y: float) -> str:
    return f'<circle cx="{x:g}" cy="{y:g}" r="7" fill="{INK}"/>'
