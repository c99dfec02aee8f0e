"""A barrier is a matter of time, not of data: who arrives when, and that all leave together."""

from .palette import FAINT, INK, rank_color
from .svg import Figure, box, figure, label, line, tag

ARRIVALS = (1, 2, 3, 4)  # the clock when each rank arrives: in notebook 02 each sleeps a little longer than the last
PAD, TAG, PITCH, UNIT, AFTER = 16, 84, 60, 120, 190


def barrier(name: str) -> Figure:
    left, top = PAD + TAG + 16, 56
    leave = max(ARRIVALS)
    wall = left + UNIT * leave
    bottom = top + PITCH * (len(ARRIVALS) - 1) + 40
    strokes = [
        label(left + UNIT / 2, 26, "computes", bold=True),
        label(left + 2.5 * UNIT, 26, "waits", color=INK, bold=True),
        label(wall, 26, "barrier", bold=True, mono=True),
        label(wall + AFTER / 2 + 40, 26, "goes on", bold=True),
    ]
    for rank, arrival in enumerate(ARRIVALS):
        y, color = top + 10 + PITCH * rank, rank_color(rank)
        arrived = left + UNIT * arrival
        strokes += [
            tag(PAD, y, TAG, f"rank {rank}", color),
            box(left, y - 15, UNIT * arrival - 4, 30, fill=color, stroke=color),
            line([(arrived + 4, y), (wall - 8, y)], color=FAINT, width=3, dash="1 7") if arrival < leave else "",
            box(wall + 4, y - 15, AFTER, 30, fill=color, stroke=color),
        ]
    strokes.append(line([(wall, 42), (wall, bottom)], width=5))
    times = ", ".join(f"rank {rank} arrives at {arrival}" for rank, arrival in enumerate(ARRIVALS))
    words = f"{len(ARRIVALS)} ranks; {times}; all leave at {leave}, when the last has arrived."
    return figure(name, "Barrier", words, wall + AFTER + PAD + 6, bottom + 12, [s for s in strokes if s])
