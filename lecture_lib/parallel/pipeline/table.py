"""A schedule is a table: for each rank, in order, what it computes.

    rank 0 | 0F0  0F1  0B0  0B1          stage 0, forward of micro-batches 0 and 1, then their backward
    rank 1 | 1F0  1B0  1F1  1B1

An action is written as stage, kind, micro-batch:

    F    forward
    B    backward: the gradients of the stage's input and of its weights
    I    only the gradient of its input, which the stage before waits for
    W    only the gradient of its weights, which nobody waits for

Which rank holds which stage follows from the table. What has to be sent, and when, follows from it too (messages.py).
The CSV form is that of torch.distributed.pipelining: a line for each rank, a cell for each action.
"""

import csv
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

KINDS = "FBIW"


class Action(NamedTuple):
    """What a rank computes in one go. ``str(Action(2, "F", 0))`` is "2F0"."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """The table: ``rows[rank]`` are the rank's actions in order. Any table can be written down; ``validate`` says
    whether it can be run."""

    name: str
    rows: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @cached_property
    def stages(self) -> int:
        return 1 + max((action.stage for row in self.rows for action in row), default=-1)

    @cached_property
    def micro_batches(self) -> int:
        return 1 + max((action.micro_batch for row in self.rows for action in row), default=-1)

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The rank that holds each stage. Raises ValueError if a stage has none."""
        holder = {action.stage: rank for rank, row in enumerate(self.rows) for action in row}
        for stage in range(self.stages):
            if stage not in holder:
                raise ValueError(f"{self.name} has {self.stages} stages, and no rank does anything for stage {stage}.")
        return tuple(holder[stage] for stage in range(self.stages))

    def __str__(self) -> str:
        width = max((len(str(action)) for row in self.rows for action in row), default=0)
        return "\n".join(
            f"rank {rank} | " + " ".join(str(action).ljust(width) for action in row).rstrip()
            for rank, row in enumerate(self.rows)
        )


# What torch writes beside the four kinds, or leaves to its runtime. Here it follows from the table.
_NOT_COMPUTED = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def dump_csv(schedule: Schedule, path: str | os.PathLike) -> None:
    """Write the table as torch's ``_load_csv(path, format="compute_only")`` reads it."""
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(schedule.rows)


def load_csv(path: str | os.PathLike) -> Schedule:
    """Read a table that ``dump_csv`` or torch's ``_dump_csv`` wrote; it is named after the file.

    Left out are empty cells (torch's idle steps), sends, receives and the like. A pair that torch overlaps, as in
    "(0F4;7B0)OVERLAP_F_B", becomes two actions. Blank lines at the end are no ranks. Raises ValueError for anything
    else.
    """
    with open(path, newline="", encoding="utf-8-sig") as file:  # a spreadsheet may put a mark in front
        lines = [[cell.strip() for cell in line] for line in csv.reader(file)]
    while lines and lines[-1] in ([], [""]):
        lines.pop()
    rows = []
    for rank, line in enumerate(lines):
        cells = [part.strip() for cell in line for part in _parts(cell)]
        cells = [cell for cell in cells if cell and not _NOT_COMPUTED.fullmatch(cell)]
        rows.append(tuple(_read(cell, rank, path) for cell in cells))
    return Schedule(Path(path).stem, tuple(rows))


def _parts(cell: str) -> list[str]:
    overlapped = _OVERLAP.fullmatch(cell)
    return overlapped[1].split(";") if overlapped else [cell]


def _read(cell: str, rank: int, path) -> Action:
    if match := _ACTION.fullmatch(cell):
        return Action(int(match[1]), match[2], int(match[3]))
    raise ValueError(
        f'{path}, line {rank + 1}: "{cell}" is no action; write stage, one of F, B, I, W, and micro-batch, as in 2F0.'
    )
