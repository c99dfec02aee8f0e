"""A World: the notebook, its rank processes, the pipes between them, and the messages that the ranks exchange."""

from .palette import FAINT, INK, WASH, rank_color
from .svg import Figure, box, figure, label, line, tag

RANKS = 4
TOP, PITCH, HEIGHT = 62, 74, 58


def world(name: str) -> Figure:
    middles = [TOP + HEIGHT / 2 + PITCH * rank for rank in range(RANKS)]
    middle, bottom = sum(middles) / RANKS, middles[-1] + HEIGHT / 2
    strokes = [
        label(120, 28, "the notebook", bold=True),
        label(494, 28, "the ranks: processes with memory of their own", bold=True),
        box(16, TOP, 208, bottom - TOP, fill=WASH, radius=10),
        label(120, middle - 34, "world = World(4)", mono=True, size=19),
        label(120, middle + 6, "%%ranks", mono=True, size=19),
        label(120, middle + 40, "x = 10 * rank", mono=True, size=19),
    ]
    for rank, y in enumerate(middles):
        color = rank_color(rank)
        strokes += [
            line([(224, y), (330, y)], color=FAINT, width=5),
            box(330, y - HEIGHT / 2, 328, HEIGHT, stroke=color, width=3, radius=10),
            tag(344, y, 84, f"rank {rank}", color),
            label(546, y, f"x = {10 * rank}", mono=True),
        ]
    strokes += [label(277, middles[0] - 20, "pipe"), *_messages(middles)]
    held = ", ".join(f"rank {rank} holds x = {10 * rank}" for rank in range(RANKS))
    words = f"a notebook with a pipe to each of {RANKS} rank processes; {held}; every two ranks can exchange messages."
    return figure(name, "A world of ranks", words, 884, bottom + 18, strokes)


def _messages(middles: list[float]) -> list[str]:
    """A rail that all ranks are joined to: each can send to each."""
    rail, middle = 730, sum(middles) / len(middles)
    strokes = [line([(rail, middles[0]), (rail, middles[-1])], width=4)]
    for y in middles:
        strokes.append(line([(672, y), (rail, y)], width=4))
        strokes.append(f'<path d="M661 {y:g}l14 -8v16z" fill="{INK}"/>')
    return [
        *strokes,
        label(rail + 16, middle - 12, "messages", anchor="start"),
        label(rail + 16, middle + 14, "gloo, NCCL", anchor="start"),
    ]
