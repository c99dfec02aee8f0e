"""Experts over ranks in pictures: where each token travels, and how much each rank gets to do."""

from .palette import INK, WASH, rank_color, text_color
from .plot import Plot, canvas, plot
from .svg import Figure, arrows, box, figure, label, tag

# For each token of each of four ranks the expert that it wants, one of four, one on each rank.
WANTED = [[1, 0, 2, 1], [1, 3, 0, 1], [2, 1, 0, 2], [1, 2, 3, 1]]


def experts(name: str) -> Figure:
    """Tokens in the colour of their rank, labelled by the expert that they want: at home, at the expert, at home."""
    cell, high, top, pitch = 36, 44, 96, 72
    ranks, tokens = range(len(WANTED)), len(WANTED[0])
    arrived = {e: [(rank, t) for rank in ranks for t in range(tokens) if WANTED[rank][t] == e] for e in ranks}
    at_home, at_expert, back = 116, 364, 720
    most, middle = max(map(len, arrived.values())), [top + pitch * rank for rank in ranks]
    strokes = [
        label(at_home + tokens * cell / 2, 22, "tokens and", bold=True),
        label(at_home + tokens * cell / 2, 48, "their expert", bold=True),
        label(at_expert + most * cell / 2, 22, "at the experts", bold=True),
        label(back + tokens * cell / 2, 22, "results,", bold=True),
        label(back + tokens * cell / 2, 48, "at home", bold=True),
        label((at_home + tokens * cell + at_expert) / 2, 22, "dispatch", mono=True),
        label((at_expert + most * cell + back) / 2, 22, "combine", mono=True),
    ]
    for rank in ranks:
        y, color = middle[rank], rank_color(rank)
        targets = sorted(set(WANTED[rank]) - {rank})
        strokes.append(
            arrows([(at_home + tokens * cell + 4, y, at_expert - 6, middle[to]) for to in targets], color, 3)
        )
        strokes.append(
            arrows(
                [(at_expert + most * cell + 4, middle[at] + 5 * (rank - 1.5), back - 6, y) for at in targets], color, 3
            )
        )
    for rank in ranks:
        y, color = middle[rank], rank_color(rank)
        strokes.append(tag(16, y, 84, f"rank {rank}", color))
        strokes.append(box(at_expert, y - high / 2, most * cell, high, fill=WASH, stroke=WASH))
        for left in (at_home, back):
            for t, expert in enumerate(WANTED[rank]):
                strokes += _token(left + t * cell, y, cell, high, expert, color)
        for place, (home, _) in enumerate(arrived[rank]):
            strokes += _token(at_expert + place * cell, y, cell, high, rank, rank_color(home))
    counts = [len(arrived[e]) for e in ranks]
    text = (
        f"{len(WANTED)} ranks with {tokens} tokens each and one expert each. The tokens want experts "
        + "; ".join(f"on rank {rank} {', '.join(map(str, wanted))}" for rank, wanted in enumerate(WANTED))
        + f". Dispatch brings {', '.join(map(str, counts))} tokens to experts 0 to {len(WANTED) - 1}; combine brings "
        "the results home."
    )
    return figure(name, "To the experts and back", text, 900, middle[-1] + high / 2 + 16, strokes)


def _token(x: float, y: float, wide: float, high: float, words, fill: str) -> list[str]:
    return [
        box(x + 1.5, y - high / 2, wide - 3, high, fill=fill, stroke=fill),
        label(x + wide / 2, y, words, color=text_color(fill), bold=True),
    ]


def load(arrived: list, title: str = "") -> Plot:
    """A bar for each expert, in the colour of its rank: how many copies it got. ``arrived``: ``MoE.arrived`` of each
    rank, (ranks of origin, experts of this rank)."""
    by_rank = [held.sum(0).tolist() for held in arrived]
    drawing, axes = canvas(300)
    each, total = len(by_rank[0]), sum(map(sum, by_rank))
    for rank, counts in enumerate(by_rank):
        places = range(rank * each, rank * each + each)
        axes.bar(places, counts, 0.86, color=rank_color(rank))
        for place, count in zip(places, counts):
            axes.text(place, count, f"{count:,}", ha="center", va="bottom", fontsize=14)
    experts = each * len(by_rank)
    axes.hlines(total / experts, -0.6, experts - 0.4, color=INK, linestyle="--", linewidth=1.2)
    axes.text(experts - 0.3, total / experts, "even", va="center", fontsize=14)
    axes.set_xlim(-0.6, experts + 0.06 * experts)
    ticks = [rank * each + (each - 1) / 2 for rank in range(len(by_rank))]
    axes.set_xticks(ticks, [f"rank {rank}" for rank in range(len(by_rank))])
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("copies")
    said = "; ".join(f"rank {rank} {', '.join(map(str, counts))}" for rank, counts in enumerate(by_rank))
    return plot(drawing, f"{title}{': ' if title else ''}copies for each expert. {said}.")
