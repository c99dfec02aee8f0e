"""Schedules that cut the backward pass in two: I, which the stage before waits for, and W, which can fill a bubble.

    zero_bubble_h1    1F1B, with W put off to the end       bubble (p-1)(F+I-W) instead of (p-1)(F+I+W), same memory
    zbv               two stages a rank, in a V             no bubble but the fill, where F = I = W; same memory
    dualpipe_v        the V, forward and backward in pairs  pairs that can hide each other's messages

In a V, rank r holds stages r and 2p-1-r: the first half of the model goes down the ranks, the second half comes up
again, so that the rank that begins also ends, and the turn costs no message.

Source: Qi et al. 2023, Zero bubble pipeline parallelism (H1); Qi et al. 2024, Pipeline parallelism with controllable
memory (the V); DeepSeek-AI 2024, DeepSeek-V3 technical report, section 3.2.1, and github.com/deepseek-ai/DualPipe.
"""

from collections import Counter, deque

from lecture_lib.parallel.pipeline.schedules import at_least_one, schedule
from lecture_lib.parallel.pipeline.table import Action, Schedule


def zero_bubble_h1(ranks: int, micro_batches: int) -> Schedule:
    """1F1B with I in place of B; rank r does the W of a micro-batch r micro-batches late.

    Rank r holds p-1-r micro-batches less than rank 0 in 1F1B. It fills that room with r that wait for their W: so every
    rank holds min(m, p), and has r W's left for the end, when it would be idle.
    """
    at_least_one(ranks=ranks, micro_batches=micro_batches)
    p, m = ranks, micro_batches
    rows = []
    for rank in range(p):
        warm_up = min(p - 1 - rank, m)
        row = [Action(rank, "F", i) for i in range(warm_up)]
        for i in range(m + rank):
            if warm_up + i < m:
                row.append(Action(rank, "F", warm_up + i))
            if i < m:
                row.append(Action(rank, "I", i))
            if 0 <= i - rank < m:
                row.append(Action(rank, "W", i - rank))
        rows.append(row)
    return schedule("zero_bubble_h1", rows)


def zbv(ranks: int, micro_batches: int) -> Schedule:
    """Stages in a V; each rank holds at most 2p activations of a half-sized stage, as much as rank 0 in 1F1B."""
    at_least_one(ranks=ranks, micro_batches=micro_batches)
    p = ranks
    m = max(micro_batches, 2 * p - 1)  # the fewest that fill it; those that do not exist are left out below
    rows = []
    for rank in range(p):
        row = _Row()
        down, up = rank, 2 * p - 1 - rank
        row.add(2 * (p - rank) - 1, (down, "F"))
        row.add(rank, (up, "F"), (down, "F"))
        row.add(p - rank, (up, "F"), (up, "I"), (up, "W"))
        row.add(m - (2 * p - rank - 1), (down, "F"), (down, "I"), (down, "W"), (up, "F"), (up, "I"), (up, "W"))
        row.add(p - rank - 1, (down, "I"), (down, "W"), (up, "F"), (up, "I"), (up, "W"))
        row.add(rank, (down, "I"), (up, "I"))
        row.add(p - rank, (down, "I"), (down, "W"))
        row.add(rank, (up, "W"))
        row.add(rank, (down, "W"))
        rows.append(row.of_the_first(micro_batches))
    return schedule("zbv", rows)


def dualpipe_v(ranks: int, micro_batches: int) -> Schedule:
    """Stages in a V; in the steady state each rank has a forward pass of one half and a backward pass of the other side
    by side, so that on a GPU the messages of one can travel while the other computes. A rank here runs a pair one after
    the other; each rank holds at most 2p+1 activations of a half-sized stage."""
    at_least_one(ranks=ranks, micro_batches=micro_batches)
    p = ranks
    m = max(micro_batches, 2 * p)  # the fewest that fill it; those that do not exist are left out below
    rows = []
    for rank in range(p):
        row = _Row()
        down, up = rank, 2 * p - 1 - rank
        behind = p - 1 - rank  # how many ranks are nearer to the turn
        row.add(2 * behind, (down, "F"))
        row.add(rank + 1, (down, "F"), (up, "F"))
        row.add(behind, (up, "I"), "W", (up, "F"))
        row.add(m - 2 * p + rank + 1, (down, "F"), (up, "B"), (up, "F"), (down, "B"))
        row.add(behind, (up, "B"), (up, "F"), (down, "B"))
        for i in range(2 * (rank + 1)):  # the second half of these leave their W for the end
            row.add(1, ((up, down)[i % 2], "B" if i <= rank else "I"))
        row.add(behind, "W", (down, "I"))
        row.add(rank + 1, "W")
        rows.append(row.of_the_first(micro_batches))
    return schedule("dualpipe_v", rows)


class _Row:
    """A rank's row as it is written: each stage takes its micro-batches in order, so only stage and kind are said."""

    def __init__(self):
        self.actions: list[Action] = []
        self._next = Counter()
        self._without_w: deque[Action] = deque()

    def add(self, times: int, *what: tuple[int, str] | str) -> None:
        """These actions, so many times. A "W" without a stage is the oldest that is left, if any."""
        for _ in range(times):
            for item in what:
                if item == "W":
                    if self._without_w:
                        stage, _, i = self._without_w.popleft()
                        self.actions.append(Action(stage, "W", i))
                    continue
                stage, kind = item
                key = stage, "I" if kind == "B" else kind  # B and I take from the same micro-batches
                action = Action(stage, kind, self._next[key])
                self._next[key] += 1
                self.actions.append(action)
                if kind == "I":
                    self._without_w.append(action)

    def of_the_first(self, micro_batches: int) -> list[Action]:
        return [action for action in self.actions if action.micro_batch < micro_batches]
