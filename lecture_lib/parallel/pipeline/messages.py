"""What has to be sent, and in which order, so that no table can deadlock.

The table says what each rank computes. An activation or gradient for a stage on another rank has to travel. That sends
and receives do not block is not enough: a GPU handles those of one process one after the other, so if two ranks each
put a send first that the other expects second, both wait for ever.

The cure: put all messages of the whole run into one order in which they could happen one at a time, the same on every
rank, since every rank has the whole table. Each rank then issues its own sends and receives in this order. Take the
first message, in this order, that is not through: everything that its sender and its receiver have to do before it is
done, so both have come to it, and it goes through. Those that a rank issues between two actions are one batch.
"""

from typing import NamedTuple

from lecture_lib.parallel.pipeline.check import gives
from lecture_lib.parallel.pipeline.simulate import simulate
from lecture_lib.parallel.pipeline.table import Action, Schedule


class Message(NamedTuple):
    """What ``use``, an F or an I, needs: an activation or a gradient. Ranks are those of the table."""

    use: Action
    source: int
    target: int


class Slot(NamedTuple):
    """The batch of messages that a rank issues, and the action that it computes then; None after its last."""

    messages: list[Message]
    action: Action | None


def program(schedule: Schedule) -> list[list[Slot]]:
    """For each rank, what it does: its row, with the messages in between. The table has to be a valid one."""
    run = simulate(schedule)
    ends = [(run.end[rank][step], rank, step) for rank, row in enumerate(schedule.rows) for step in range(len(row))]
    slots: list[list[Slot]] = [[] for _ in schedule.rows]
    waiting: list[list[Message]] = [[] for _ in schedule.rows]  # issued since the rank's last action
    for _, rank, step in sorted(ends):
        action = schedule.rows[rank][step]
        slots[rank].append(Slot(waiting[rank], action))
        waiting[rank] = []
        use = gives(action, schedule.stages)
        if use is not None and (target := schedule.rank_of[use.stage]) != rank:
            message = Message(use, rank, target)
            waiting[rank].append(message)
            waiting[target].append(message)
    for rank, messages in enumerate(waiting):
        slots[rank].append(Slot(messages, None))
    return slots
