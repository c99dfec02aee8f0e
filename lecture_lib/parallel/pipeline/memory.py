"""What a rank holds: the activations of every micro-batch that it has brought forward and not yet backward.

That depends only on the order of its row, not on how long anything takes.
"""

import math
import numbers
from collections.abc import Sequence

from lecture_lib.parallel.pipeline.table import Schedule

Number = float | int


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """For each rank, the most micro-batches whose activations it holds at once; one that is in two of the rank's stages
    counts twice. They are held from F until B or W is done."""
    return peak_memory(schedule)


def peak_memory(
    schedule: Schedule, activation: Number | Sequence[Number] = 1, kept_for_w: Number | Sequence[Number] | None = None
) -> tuple[Number, ...]:
    """The most activation memory that each rank holds at once, in the unit of ``activation``.

    activation:  of one micro-batch in one stage, or a list with each stage's
    kept_for_w:  what of that is left between I and W, or a list with each stage's; None: all of it

    Raises ValueError for numbers below 0, and for more that is left than there was.
    """
    whole = per_stage(activation, schedule.stages, "activation")
    kept = whole if kept_for_w is None else per_stage(kept_for_w, schedule.stages, "kept_for_w")
    for stage, (left, was) in enumerate(zip(kept, whole)):
        if left > was:
            raise ValueError(f"kept_for_w is {left} and activation {was} in stage {stage}; what is kept is part of it.")
    peaks = []
    for row in schedule.rows:
        held = peak = 0
        for stage, kind, _ in row:
            if kind == "F":
                held += whole[stage]
                peak = max(peak, held)
            else:  # during I the memory for W comes to be: count it when I is done
                held -= {"B": whole[stage], "I": whole[stage] - kept[stage], "W": kept[stage]}[kind]
        peaks.append(peak)
    return tuple(peaks)


def per_stage(value: Number | Sequence[Number], stages: int, name: str) -> list[Number]:
    """One number for all stages, or a list with one for each."""
    values = list(value) if isinstance(value, Sequence) else [value] * stages
    if len(values) != stages:
        raise ValueError(f"{name} has {len(values)} values, and the schedule has {stages} stages; give one for each.")
    for number in values:
        if not isinstance(number, numbers.Real) or not math.isfinite(number) or number < 0:
            raise ValueError(f"{name}={value!r}: {number!r} is not a number from 0 on.")
    return values
