"""Pictures of the collectives: what each rank holds before, what travels, what each rank holds after.

A row is a rank. A cell has the colour of the rank that its number came from; a sum is white, with a stripe for each
rank that is in it. An arrow has the colour of the rank that sends; it is thick if it carries a whole tensor and thin if
it carries a piece. What stays where it is has no arrow.
"""

from collections.abc import Callable, Sequence

from . import collectives as c
from .palette import INK, WASH, rank_color, text_color
from .svg import Figure, arrows, box, figure, label, n, plus, tag

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
        (lefts[0], "before", "to rank" if to else ""),
        (lefts[-1], "after", "from rank" if source else ""),
    ):
        strokes.append(label(left + places * cell / 2, 28, head, bold=True))
        if names:
            strokes.append(label(left - 12, 64, names, anchor="end"))
            strokes += [label(left + (i + 0.5) * cell, 64, i) for i in range(places)]
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
        return box(x, y, w, h, fill=WASH, stroke=WASH)
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
    here = [
        [element and c.Element(place, (rank,)) for place, element in enumerate(row)] for rank, row in enumerate(state)
    ]
    there = step(here)
    added = any(element and len(element.ranks) > 1 for row in there for element in row)
    return (to_a_sum if added else to_each_other)(there, x0, x1, middles)


def to_a_sum(there: c.State, x0: float, x1: float, middles: Sequence[float]) -> list[str]:
    """All send all they have to one place, drawn in the middle; from there the sums go out."""
    x, y = (x0 + x1) / 2, sum(middles) / len(middles)
    inward = [
        arrows([(x0, middles[rank], x, y + port)], rank_color(rank), THICK, heads=False)
        for rank, port in enumerate(spread(len(there), 9))
    ]
    loads = {rank: tuple(c.values(row)) for rank, row in enumerate(there) if c.values(row)}
    tails = spread(len(loads), 9 if differ(loads) else 0)
    outward = [(x, y + tail, x1, middles[rank]) for rank, tail in zip(loads, tails)]
    return [*inward, arrows(outward, INK, thickness(loads, there)), plus(x, y)]


def to_each_other(there: c.State, x0: float, x1: float, middles: Sequence[float]) -> list[str]:
    """Arrows with different pieces leave side by side; arrows with copies of one piece fork from one point."""
    sent: dict[int, dict[int, tuple]] = {}  # from rank: {to rank: places}
    heard: dict[int, list[int]] = {}  # to rank: from ranks
    for target, row in enumerate(there):
        for source in sorted({element.ranks[0] for element in row if element} - {target}):
            places = tuple(element.value for element in row if element and element.ranks[0] == source)
            sent.setdefault(source, {})[target] = places
            heard.setdefault(target, []).append(source)
    strokes = []
    for source, loads in sorted(sent.items()):
        ends = []
        for target, tail in zip(loads, spread(len(loads), 13 if differ(loads) else 0)):
            head = spread(len(heard[target]), 13)[heard[target].index(source)]
            ends.append((x0, middles[source] + tail, x1, middles[target] + head))
        strokes.append(arrows(ends, rank_color(source), thickness(loads, there)))
    return strokes


def differ(loads: dict[int, tuple]) -> bool:
    return len(set(loads.values())) > 1


def thickness(loads: dict[int, tuple], state: c.State) -> int:
    return THICK if all(len(load) == len(state[0]) for load in loads.values()) else THIN


def spread(count: int, distance: float) -> list[float]:
    """`count` heights around 0, `distance` apart."""
    return [distance * (i - (count - 1) / 2) for i in range(count)]
