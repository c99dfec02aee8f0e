"""Pictures of the collectives: what each rank holds before, what travels, what each rank holds after.

A row is a rank. A cell has the colour of the rank that its number came from; a sum is white, with a stripe for each
rank that is in it. An arrow has the colour of the rank that sends; it is thick if it carries a whole tensor and thin if
it carries a piece. A dotted line is a piece that stays.
"""

from collections.abc import Callable, Sequence

from . import collectives as c
from .palette import FAINT, INK, rank_color, text_color
from .svg import Figure, arrow, box, figure, label, n, plus, stays, tag

PAD, TAG, HEIGHT, PITCH = 16, 84, 52, 74
THICK, THIN = 6, 3


def exchange(
    name: str, title: str, before: c.State, *steps: Callable, to: bool = False, source: bool = False
) -> Figure:
    """A picture of one collective, or of several one after the other.

    `to` heads the columns with the rank that each piece goes to, `source` with the rank that it comes from.
    """
    cell, gap = (66, 226) if len(steps) == 1 else (40, 140)
    states = [before]
    for step in steps:
        states.append(step(states[-1]))
    ranks, places = len(before), len(before[0])
    lefts = [PAD + TAG + 16 + i * (places * cell + gap) for i in range(len(states))]
    top = 54 + 30 * (to or source)
    middles = [top + HEIGHT / 2 + PITCH * rank for rank in range(ranks)]

    strokes = []
    for left, head, names in (
        (lefts[0], "before", "to" if to else ""),
        (lefts[-1], "after", "from" if source else ""),
    ):
        strokes.append(label(left + places * cell / 2, 28, head, bold=True))
        if names:
            strokes += [label(left + (i + 0.5) * cell, 66, f"{names} {i}") for i in range(places)]
    strokes += [tag(PAD, y, TAG, f"rank {rank}", rank_color(rank)) for rank, y in enumerate(middles)]
    for state, left in zip(states, lefts):
        strokes += [
            held(element, left + i * cell, y - HEIGHT / 2, cell)
            for row, y in zip(state, middles)
            for i, element in enumerate(row)
        ]
    for step, state, left in zip(steps, states, lefts):
        start = left + places * cell
        strokes.append(label(start + gap / 2, 28, step.__name__, bold=True, mono=True))
        strokes += travels(step, state, start + 6, start + gap - 6, middles)

    width = lefts[-1] + places * cell + PAD
    height = middles[-1] + HEIGHT / 2 + PAD
    stages = "; ".join(f"after {step.__name__} {c.in_words(state, 'hold')}" for step, state in zip(steps, states[1:]))
    return figure(name, title, f"{ranks} ranks; before: {c.in_words(before)}; {stages}.", width, height, strokes)


def held(element: c.Element | None, x: float, y: float, w: float) -> str:
    """One cell."""
    inset = 2
    x, y, w, h = x + inset, y, w - 2 * inset, HEIGHT
    if element is None:
        return box(x, y, w, h, fill="none", stroke=FAINT, width=1.2, dash="3 5")
    if len(element.ranks) == 1:
        fill = rank_color(element.ranks[0])
        return box(x, y, w, h, fill=fill, stroke=fill) + label(
            x + w / 2, y + h / 2, element.value, size=24, color=text_color(fill), bold=True
        )
    stripe = w / len(element.ranks)
    stripes = "".join(
        f'<rect x="{n(x + i * stripe)}" y="{n(y + h - 12)}" width="{n(stripe)}" height="12" fill="{rank_color(rank)}"/>'
        for i, rank in enumerate(element.ranks)
    )
    frame = box(x, y, w, h, fill="none", radius=2)
    return stripes + frame + label(x + w / 2, y + h / 2 - 6, element.value, size=24, bold=True)


def travels(step: Callable, state: c.State, x0: float, x1: float, middles: Sequence[float]) -> list[str]:
    """The arrows of a step.

    To know what it moves, let it move elements that know nothing but where they are: the rank that holds them and their
    place.
    """
    places = len(state[0])
    where = [
        [element and c.Element(place, (rank,)) for place, element in enumerate(row)] for rank, row in enumerate(state)
    ]
    arrived = step(where)
    middle = sum(middles) / len(middles)
    strokes = []

    if any(element and len(element.ranks) > 1 for row in arrived for element in row):
        cx, r = x0 + 0.56 * (x1 - x0), 26 if x1 - x0 > 200 else 20
        ports = spread(len(state), 0.42 * r)
        for rank, port in enumerate(ports):
            strokes.append(
                arrow(x0, middles[rank], cx - (r * r - port * port) ** 0.5 - 3, middle + port, rank_color(rank), THICK)
            )
        loads = {rank: tuple(c.values(row)) for rank, row in enumerate(arrived) if c.values(row)}
        tails = dict(zip(loads, spread(len(loads), 11 if len(set(loads.values())) > 1 else 0)))
        for rank, load in loads.items():
            strokes.append(
                arrow(cx + r, middle + tails[rank], x1, middles[rank], INK, THICK if len(load) == places else THIN)
            )
        return strokes + [plus(cx, middle, r)]

    loads = {}  # (from, to): what travels
    for target, row in enumerate(arrived):
        for element in row:
            if element:
                loads.setdefault((element.ranks[0], target), []).append(element.value)
    for source in range(len(state)):
        sent = {target: load for (s, target), load in loads.items() if s == source}
        same = len({tuple(load) for load in sent.values()}) == 1
        tails = dict(zip(sent, spread(len(sent), 0 if same else 12)))
        for target, load in sent.items():
            sources = [s for s, t in loads if t == target]
            head = dict(zip(sources, spread(len(sources), 12)))[source]
            y0, y1 = middles[source] + tails[target], middles[target] + head
            if source == target:
                strokes.insert(0, stays(x0 + 4, x1 - 4, middles[source]))
            else:
                strokes.append(arrow(x0, y0, x1, y1, rank_color(source), THICK if len(load) == places else THIN))
    return strokes


def spread(count: int, distance: float) -> list[float]:
    """`count` heights around 0, `distance` apart."""
    return [distance * (i - (count - 1) / 2) for i in range(count)]
