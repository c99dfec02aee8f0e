"""How long a table takes if every rank has its own processor and messages do not get in each other's way.

An action begins when its rank is free and its input has come, whichever is later. So the whole run follows from the
table and a few times, and with exact times (integers, fractions) it is exact: the bubble formulas of the papers are
tests here. A real run has the same form (``measured``), so both can be drawn and compared with the same words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from lecture_lib.parallel.pipeline.memory import Number, peak_memory, per_stage
from lecture_lib.parallel.pipeline.table import Action, Schedule


@dataclass(frozen=True)
class Cost:
    """What one micro-batch takes in one stage, in any unit; a list gives each stage's.

    F, I, W:     times of the forward pass and of the two halves of the backward pass; B takes I + W
    send:        from the end of an action until its result is there for a stage on another rank
    activation:  memory held from F until B or W is done
    kept_for_w:  what of it is left between I and W; None: all
    """

    F: Number | Sequence[Number] = 1
    I: Number | Sequence[Number] = 1  # noqa: E741
    W: Number | Sequence[Number] = 1
    send: Number | Sequence[Number] = 0
    activation: Number | Sequence[Number] = 1
    kept_for_w: Number | Sequence[Number] | None = None


@dataclass(frozen=True)
class Run:
    """When each action began and ended: ``begin[rank][step]`` and ``end[rank][step]`` are those of
    ``schedule.rows[rank][step]``.

    peak_memory:  for each rank, as ``memory.peak_memory`` of the cost; None for a measured run
    """

    schedule: Schedule
    begin: tuple[tuple[Number, ...], ...]
    end: tuple[tuple[Number, ...], ...]
    peak_memory: tuple[Number, ...] | None = None

    @property
    def makespan(self) -> Number:
        """From the first begin to the last end."""
        return max(row[-1] for row in self.end) - min(row[0] for row in self.begin)

    @property
    def busy(self) -> tuple[Number, ...]:
        """The time that each rank computes."""
        return tuple(sum(ends) - sum(begins) for begins, ends in zip(self.begin, self.end))

    @property
    def bubble(self) -> Number:
        """The share of all ranks' time in which they are idle. 1F1B: (p-1)/(m+p-1)"""
        return 1 - _divide(sum(self.busy), self.schedule.ranks * self.makespan)

    @property
    def bubble_over_work(self) -> Number:
        """Idle time over busy time, the "bubble time fraction" of the Megatron paper. 1F1B: (p-1)/m"""
        return _divide(self.schedule.ranks * self.makespan, sum(self.busy)) - 1

    @property
    def bubble_within(self) -> Number:
        """The idle share of the longest time that a rank is at it, from its own first action to its own last.

        What counts where a rank may begin the next batch while others are still at this one, as in the zero-bubble
        paper (section 4), which does the optimizer's step of each rank as soon as its gradients are there.
        """
        longest = max(ends[-1] - begins[0] for begins, ends in zip(self.begin, self.end))
        return 1 - _divide(sum(self.busy), self.schedule.ranks * longest)

    def bars(self) -> list[tuple[int, Action, Number, Number]]:
        """(rank, action, begin, end) of every action: what a chart of the run draws."""
        return [
            (rank, action, begin, end)
            for rank, row in enumerate(self.schedule.rows)
            for action, begin, end in zip(row, self.begin[rank], self.end[rank])
        ]

    def grid(self) -> str:
        """The run in text, a column for each unit of time: for runs with whole times.

        rank 0 | 0F0 0F1  .   .  0B0 ...
        """
        start, cells = min(row[0] for row in self.begin), {}
        for rank, action, begin, end in self.bars():
            if begin != int(begin) or end != int(end):
                raise ValueError(f"{action} lasts from {begin} to {end}; a grid needs whole times.")
            cells |= {(rank, column): str(action) for column in range(int(begin - start), int(end - start))}
        width = max(map(len, cells.values()))
        columns = range(int(self.makespan))
        return "\n".join(
            f"rank {rank} | " + " ".join(cells.get((rank, column), ".").center(width) for column in columns).rstrip()
            for rank in range(self.schedule.ranks)
        )


def simulate(schedule: Schedule, cost: Cost = Cost()) -> Run:
    """Run a table on paper; time is proportional to the number of actions.

    Raises ValueError for a table that cannot be run to its end, and ``validate`` says why; for times that are negative
    or no numbers, or all zero.
    """
    stages, rank_of, rows = schedule.stages, schedule.rank_of, schedule.rows
    F, I, W = (per_stage(getattr(cost, kind), stages, kind) for kind in "FIW")  # noqa: E741
    if stages and not any(F + I + W):
        raise ValueError("F, I and W are 0 in every stage; without time there is no bubble, so give one of them.")
    lasts = {"F": F, "B": [i + w for i, w in zip(I, W)], "I": I, "W": W}
    send = per_stage(cost.send, stages, "send")
    down = [send[s] if s + 1 < stages and rank_of[s] != rank_of[s + 1] else 0 for s in range(stages)]  # to stage s + 1
    up = [send[s] if s > 0 and rank_of[s] != rank_of[s - 1] else 0 for s in range(stages)]  # to stage s - 1
    micro_batches = range(schedule.micro_batches)
    # When the input of each stage and micro-batch comes; None: not yet.
    activation = [[0 if s == 0 else None for _ in micro_batches] for s in range(stages)]
    gradient = [[0 if s == stages - 1 else None for _ in micro_batches] for s in range(stages)]
    begin, end = [[] for _ in rows], [[] for _ in rows]
    clock, step = [0] * len(rows), [0] * len(rows)

    def run(rank: int) -> bool:
        """Bring a rank as far as it can go; True if it moved."""
        row, now, at = rows[rank], clock[rank], step[rank]
        begins, ends = begin[rank], end[rank]
        while at < len(row):
            stage, kind, i = row[at]
            came = now if kind == "W" else (activation if kind == "F" else gradient)[stage][i]
            if came is None:
                break
            if came > now:
                now = came
            begins.append(now)
            now += lasts[kind][stage]
            ends.append(now)
            if kind == "F":
                if stage + 1 < stages:
                    activation[stage + 1][i] = now + down[stage]
            elif kind != "W" and stage > 0:
                gradient[stage - 1][i] = now + up[stage]
            at += 1
        moved = at > step[rank]
        clock[rank], step[rank] = now, at
        return moved

    while sum(run(rank) for rank in range(len(rows))):
        pass
    if not rows or not all(rows) or any(at < len(row) for at, row in zip(step, rows)):
        raise ValueError(f"the schedule {schedule.name} cannot be run to its end; validate(schedule) says why.")
    memory = peak_memory(schedule, cost.activation, cost.kept_for_w)
    return Run(schedule, tuple(map(tuple, begin)), tuple(map(tuple, end)), memory)


def measured(schedule: Schedule, timelines: Sequence) -> Run:
    """The same for a real step: ``timelines`` are the ranks' ``lecture_lib.trace.Timeline`` around one
    ``Pipeline.step``, in which every action is a region. In seconds.

    Raises ValueError if a timeline holds other actions than the rank's row.
    """
    begin, end = [], []
    for rank, (row, line) in enumerate(zip(schedule.rows, timelines, strict=True)):
        names = set(map(str, row))
        events = [event for event in line.events if event.call is None and event.name in names]
        if [event.name for event in events] != [str(action) for action in row]:
            raise ValueError(
                f"rank {rank}'s timeline has {len(events)} actions of {schedule.name}, whose row has {len(row)}; "
                "record one step, with the schedule of the pipeline."
            )
        begin.append(tuple(event.begin for event in events))
        end.append(tuple(event.end for event in events))
    return Run(schedule, tuple(begin), tuple(end))


def _divide(a: Number, b: Number) -> Number:
    return Fraction(a, b) if isinstance(a, (int, Fraction)) and isinstance(b, (int, Fraction)) else a / b
