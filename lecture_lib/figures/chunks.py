"""Which chunk is where, on each rank, after each step of an algorithm: replayed from the ledgers of a real run."""

import ipywidgets as widgets

from .controls import Explorer
from .palette import FAINT, INK, PAPER, WASH, rank_color
from .svg import Figure, box, figure, label, tag

LEFT, TOP, ROW, PITCH = 110, 62, 74, 12


def states(ledgers: list) -> list[tuple[list, list]]:
    """(transfers, holds) before any and after each step. ``transfers``: (from, to, chunk) of the step that led here;
    ``holds[rank][chunk]``: the ranks whose numbers are in what the rank has there.

    The n-th message that each rank sent is step n. Chunks are numbered by where they begin in the tensor.
    """
    n = len(ledgers)
    sends = [[call for call in led.calls if call.name == "send"] for led in ledgers]
    starts = sorted({call.offset for calls in sends for call in calls})
    holds = [[{rank} for _ in starts] for rank in range(n)]
    found = [([], [[set(h) for h in row] for row in holds])]
    for step in range(max(map(len, sends))):
        moves = [
            (r, calls[step].peer, starts.index(calls[step].offset))
            for r, calls in enumerate(sends)
            if step < len(calls)
        ]
        arriving = [(to, chunk, set(holds[at][chunk])) for at, to, chunk in moves]
        for to, chunk, what in arriving:
            holds[to][chunk] |= what
        found.append((moves, [[set(h) for h in row] for row in holds]))
    return found


def chunks(name: str, ledgers: list, step: int) -> Figure:
    """The ranks as rows, chunks as columns; in each cell a block for every rank whose numbers have been added."""
    moves, holds = states(ledgers)[step]
    n, columns = len(holds), len(holds[0])
    width = (900 - LEFT - 10) / columns - PITCH
    block = (width - 16) / n
    strokes = [label(LEFT + (width + PITCH) * c + width / 2, 34, f"chunk {c}", bold=True) for c in range(columns)]
    arrived = {(to, chunk): at for at, to, chunk in moves}
    for rank, row in enumerate(holds):
        y = TOP + rank * (ROW + PITCH)
        strokes.append(tag(12, y + ROW / 2, 86, f"rank {rank}", rank_color(rank)))
        for chunk, whose in enumerate(row):
            x = LEFT + (width + PITCH) * chunk
            new = (rank, chunk) in arrived
            whole = len(whose) == n
            strokes.append(
                box(
                    x, y, width, ROW, fill=PAPER if new else WASH, stroke=INK if new else FAINT, width=4 if new else 1.5
                )
            )
            for other in sorted(whose):
                strokes.append(
                    box(x + 8 + block * other, y + 8, block - 2, 26, fill=rank_color(other), stroke=PAPER, radius=2)
                )
            words = f"from {arrived[rank, chunk]}" if new else "whole" if whole else ""
            if new and whole:
                words += ", whole"
            strokes.append(label(x + width / 2, y + 53, words, size=19))
    total = len(states(ledgers)) - 1
    told = (
        "; ".join(f"rank {at} sends chunk {chunk} to rank {to}" for at, to, chunk in moves)
        or "each rank has its own numbers"
    )
    complete = sum(len(whose) == n for row in holds for whose in row)
    text = f"step {step} of {total}: {told}; {complete} of {n * columns} chunks are whole."
    return figure(name, "Where the chunks are", text, 900, TOP + n * (ROW + PITCH) + 4, strokes)


class ChunkStepper(Explorer):
    """A slider over the steps of a run. ``ledgers``: one per rank."""

    def __init__(self, ledgers: list):
        self._ledgers = ledgers
        last = len(states(ledgers)) - 1
        self.step = widgets.IntSlider(0, 0, last, description="step")
        super().__init__((self.step,))

    def drawn(self) -> Figure:
        return chunks("chunks", self._ledgers, self.step.value)

    def __repr__(self) -> str:
        return f"Step {self.step.value} of {self.step.max}: " + self.text.rpartition("; ")[2]
