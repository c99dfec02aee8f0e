"""When each rank did what: a row of bars for each rank, from the timelines that the ranks recorded."""

from collections import Counter

from .palette import GREY, INK, rank_color, text_color
from .plot import Plot, canvas, plot

TOP, HEIGHT = 0.42, 0.36  # of the height of a rank's row: regions above its middle, operations below it


def gantt(lines: list) -> Plot:
    """``lines``: one lecture_lib.trace.Timeline per rank. The upper bars are regions, the lower ones operations, one
    below the other where they overlap."""
    figure, axes = canvas(90 + 68 * len(lines))
    spans = [(event.begin, event.begin if event.end is None else event.end) for line in lines for event in line.events]
    first = min((begin for begin, _ in spans), default=0.0)
    length = max((end for _, end in spans), default=1.0) - first
    for row, line in enumerate(lines):
        for calls, top, fill in ((False, row - TOP, GREY), (True, row + 0.02, rank_color(line.rank))):
            events = [event for event in line.events if (event.call is not None) == calls]
            lanes = _lanes(events)
            height = HEIGHT / (max(lanes, default=0) + 1)
            bars = [[] for _ in range(max(lanes, default=-1) + 1)]  # (begin, length), by lane
            for event, lane in zip(events, lanes, strict=True):
                begin, end = event.begin - first, (event.end or event.begin) - first
                y = top + lane * height
                bars[lane].append((begin * 1e3, (end - begin) * 1e3))
                if (end - begin) / length > 0.012 * len(event.name) and height > HEIGHT / 2:  # else it does not fit
                    middle = (begin + end) / 2 * 1e3, y + height / 2
                    axes.text(*middle, event.name, ha="center", va="center", color=text_color(fill), fontsize=14)
            for lane, of_lane in enumerate(bars):
                axes.broken_barh(of_lane, (top + lane * height, height), color=fill, edgecolor="white", linewidth=0.8)
    axes.set_yticks(range(len(lines)), [f"rank {line.rank}" for line in lines])
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_xlim(0, length * 1e3)
    axes.set_xlabel("ms on rank 0's clock", color=INK)
    axes.tick_params(axis="y", length=0)
    return plot(figure, f"Timeline of {len(lines)} ranks: " + "; ".join(_words(line) for line in lines) + ".")


def _lanes(events: list) -> list[int]:
    """For each event the first lane that is free when it begins."""
    free, lanes = [], []  # when each lane is free again
    for event in events:
        lane = next((i for i, until in enumerate(free) if until <= event.begin), len(free))
        free[lane : lane + 1] = [event.begin if event.end is None else event.end]
        lanes.append(lane)
    return lanes


def _words(line) -> str:
    counted = Counter(event.name for event in line.events)
    return f"rank {line.rank} " + ", ".join(
        f"{name} x {count}" if count > 1 else name for name, count in counted.items()
    )
