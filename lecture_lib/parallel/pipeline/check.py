"""Can this table be run? If not, why: one sentence that names the action, the rank and the step.

Steps are counted from 0 within a rank's row.
"""

from collections.abc import Iterator

from lecture_lib.parallel.pipeline.memory import peak_in_flight
from lecture_lib.parallel.pipeline.table import KINDS, Action, Schedule


def validate(schedule: Schedule, buffers: int | None = None) -> tuple[int, ...]:
    """Check a table, and return how many micro-batches each rank holds at most: ``peak_in_flight``.

    A table is valid if every stage is on one rank and does F and then either B, or I and then W, exactly once for every
    micro-batch, and if no rank waits for something that can never come.

    buffers:  how many messages of each kind (activations from one stage to the next, gradients back) can be on the way
              or lie unused on the receiving rank. A rank with one more to hand over waits until one of them is used.
              0: a message is handed over when the receiver has come to the action that uses it, as with a blocking
              send and receive. None: any number; so runs ``Pipeline``, whose sends and receives do not block.

    Raises ValueError with the reason.
    """
    if buffers is not None and not (isinstance(buffers, int) and buffers >= 0):
        raise ValueError(f"buffers={buffers!r}: give how many messages can be on the way, from 0 on, or None for any.")
    _each_once(schedule)
    _no_deadlock(schedule, buffers)
    return peak_in_flight(schedule)


def needs(action: Action, stages: int) -> Action | None:
    """What must be done on a neighbouring stage before this action, as F (an activation comes from there) or I (a
    gradient, from a B or an I); None: nothing."""
    stage, kind, micro_batch = action
    if kind == "F" and stage > 0:
        return Action(stage - 1, "F", micro_batch)
    if kind in "BI" and stage < stages - 1:
        return Action(stage + 1, "I", micro_batch)
    return None


def gives(action: Action, stages: int) -> Action | None:
    """The action on a neighbouring stage that this one makes possible, as F or I; None: nothing."""
    stage, kind, micro_batch = action
    if kind == "F" and stage < stages - 1:
        return Action(stage + 1, "F", micro_batch)
    if kind in "BI" and stage > 0:
        return Action(stage - 1, "I", micro_batch)
    return None


# ---- every action once -----------------------------------------------------------------------------------------------


def _each_once(schedule: Schedule) -> None:
    where: dict[Action, tuple[int, int]] = {}  # action -> rank, step
    holder: dict[int, tuple[int, int, Action]] = {}  # stage -> rank, step, action where it is first seen
    for rank, row in enumerate(schedule.rows):
        for step, action in enumerate(row):
            stage, kind, i = action
            first = holder.setdefault(stage, (rank, step, action))
            problem = None
            if kind not in tuple(KINDS):
                problem = f"is of kind {kind!r}; the kinds are F, B, I and W."
            elif stage < 0 or i < 0:
                problem = "has a negative number; stages and micro-batches count from 0."
            elif action in where:
                problem = f"is there twice; it was rank {where[action][0]}'s step {where[action][1]}."
            elif first[0] != rank:
                problem = (
                    f"is on the wrong rank: stage {stage} lives on rank {first[0]}, which has {first[2]} at step "
                    f"{first[1]}. A stage has one rank."
                )
            if problem:
                raise ValueError(f"rank {rank}, step {step}: {action} {problem}")
            where[action] = rank, step
    if not where:
        raise ValueError("the schedule has no action.")
    for rank, row in enumerate(schedule.rows):
        if not row:
            raise ValueError(f"rank {rank} has nothing to do; leave it out, or give it a stage.")
    for stage in range(schedule.stages):
        for i in range(schedule.micro_batches):
            _one_micro_batch(stage, i, where, holder)


def _one_micro_batch(stage: int, i: int, where: dict, holder: dict) -> None:
    """F, then B, or I and W, each on its rank and in this order."""
    there = {kind: where.get((stage, kind, i)) for kind in KINDS}
    rank = f"rank {holder[stage][0]}" if stage in holder else "every rank"
    if there["F"] is None:
        raise ValueError(f"{rank} lacks {stage}F{i}: nothing brings micro-batch {i} forward through stage {stage}.")
    for half in "IW":
        if there["B"] and there[half]:
            (_, step), (_, other) = there[half], there["B"]
            raise ValueError(f"{rank}, step {step}: {stage}{half}{i} is part of {stage}B{i}, which is step {other}.")
    if there["B"] is None:
        for half, other in ("IW", "WI"):
            if there[half] is None:
                missing = f"{stage}{half}{i}" if there[other] else f"{stage}B{i} (or {stage}I{i} and {stage}W{i})"
                raise ValueError(f"{rank} lacks {missing}: micro-batch {i} does not come back through stage {stage}.")
    for before, after in ("FB", "FI", "IW"):
        if there[before] and there[after] and there[before] > there[after]:
            raise ValueError(
                f"{rank}, step {there[after][1]}: {stage}{after}{i} comes before {stage}{before}{i}, which is "
                f"step {there[before][1]}."
            )


# ---- no deadlock -----------------------------------------------------------------------------------------------------


def _no_deadlock(schedule: Schedule, buffers: int | None) -> None:
    """Let every rank run until it has to wait, over and over. If nobody can go on and somebody is not done, nobody ever
    will: no rank has a choice, so the order in which they are let run makes no difference."""
    rows, stages, rank_of = schedule.rows, schedule.stages, schedule.rank_of
    step = [0] * len(rows)
    handing: list[Action | None] = [None] * len(rows)  # the action that a rank's message, not yet taken, makes possible
    ready: set[Action] = set()  # actions, as F or I, whose message has come
    lying = {}  # (F or I, stage that it is for) -> messages that have come and are not used

    def is_at(rank: int, wanted: Action) -> bool:
        if handing[rank] is not None or step[rank] == len(rows[rank]):
            return False
        return _as_i(rows[rank][step[rank]]) == wanted

    def run(rank: int) -> bool:
        """Bring a rank as far as it can go; True if it moved."""
        moved = False
        while True:
            if (given := handing[rank]) is not None:
                way, receiver = given[:2], rank_of[given.stage]
                if receiver != rank:
                    if buffers is not None and lying.get(way, 0) >= buffers and not is_at(receiver, given):
                        return moved
                    lying[way] = lying.get(way, 0) + 1
                ready.add(given)
                handing[rank], moved = None, True
            if step[rank] == len(rows[rank]):
                return moved
            action = rows[rank][step[rank]]
            needed = needs(action, stages)
            if needed is not None:
                if _as_i(action) not in ready:
                    return moved
                if rank_of[needed.stage] != rank:
                    lying[_as_i(action)[:2]] -= 1
            step[rank], handing[rank], moved = step[rank] + 1, gives(action, stages), True

    while sum(run(rank) for rank in range(len(rows))):
        pass
    stuck = [rank for rank in range(len(rows)) if step[rank] < len(rows[rank]) or handing[rank] is not None]
    if stuck:
        raise ValueError("deadlock: " + "; ".join(_waits(schedule, stuck[0], step, handing, buffers)) + ".")


def _waits(schedule: Schedule, rank: int, step: list[int], handing: list, buffers: int | None) -> Iterator[str]:
    """From one rank that waits to the one that it waits for, until they come round."""
    seen = set()
    while rank not in seen:
        seen.add(rank)
        if (given := handing[rank]) is not None:
            done, other = schedule.rows[rank][step[rank] - 1], schedule.rank_of[given.stage]
            until = "has come to the action that uses it" if buffers == 0 else f"has used one of the {buffers} it holds"
            what = f"the result of {done} (step {step[rank] - 1})"
            yield f"rank {rank} cannot hand over {what} until rank {other} {until}"
        else:
            action = schedule.rows[rank][step[rank]]
            needed = needs(action, schedule.stages)
            other = schedule.rank_of[needed.stage]
            there = next(i for i, a in enumerate(schedule.rows[other]) if _as_i(a) == needed)
            what = schedule.rows[other][there]
            yield f"rank {rank} waits at step {step[rank]} ({action}) for {what}, which is step {there} of rank {other}"
        rank = other


def _as_i(action: Action) -> Action:
    """B and I give the same gradient."""
    return Action(action.stage, "I", action.micro_batch) if action.kind == "B" else action
