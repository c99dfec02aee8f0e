"""What failures cost: how often a job stops, how often to save, how much of the time is useful.

One GPU (with its part of the node, the network and the software) fails every ``mtbf_hours``; n of them stop the job n
times as often, M = mtbf / n. A job that saves every tau seconds, each time for C seconds, and after a failure needs R
seconds to be running again, spends for tau seconds of progress on average

    T = M e^(R / M) (e^((tau + C) / M) - 1)            goodput = tau / T

if failures come at random (Daly, A higher order estimate of the optimum checkpoint interval, 2006, equation 20). The
best tau is about sqrt(2 C M) (Young, 1974), and nearer, for C < 2 M (Daly, equation 37; from there on it is M):

    tau = sqrt(2 C M) (1 + x / 3 + x^2 / 9) - C                        x = sqrt(C / (2 M))
"""

import math
from dataclasses import dataclass

from lecture_lib.planner.numbers import positive, whole

# Llama team, The Llama 3 Herd of Models, 2024, https://arxiv.org/abs/2407.21783, section 3.3.4: the job on 16,384 GPUs
# was interrupted 466 times in 54 days, 47 times as planned and 419 times unexpectedly.
LLAMA3 = dict(gpus=16384, days=54, interruptions=466, unexpected=419)
LLAMA3_MTBF_HOURS = LLAMA3["gpus"] * LLAMA3["days"] * 24 / LLAMA3["unexpected"]


@dataclass(frozen=True)
class Reliability:
    """Of a job on n GPUs. Seconds, if not said otherwise.

    interval: between checkpoints. goodput: useful time over all time. lost_to_checkpoints, lost_to_failures: the rest.
    """

    gpus: int
    seconds_between_failures: float
    interval: float
    goodput: float
    lost_to_checkpoints: float
    lost_to_failures: float

    def interruptions(self, days: float) -> float:
        """How often the job stops in so many days."""
        return days * 86400 / self.seconds_between_failures

    def table(self) -> str:
        """One line for each figure."""
        rows = (
            ("hours between failures", f"{self.seconds_between_failures / 3600:.1f}"),
            ("minutes between checkpoints", f"{self.interval / 60:.1f}"),
            ("useful time", f"{self.goodput:.1%}"),
            ("saving", f"{self.lost_to_checkpoints:.1%}"),
            ("restarting, doing again", f"{self.lost_to_failures:.1%}"),
        )
        return "\n".join(f"{name:<28}{value:>8}" for name, value in rows)


def reliability(
    gpus: int,
    mtbf_hours: float = LLAMA3_MTBF_HOURS,
    checkpoint_seconds: float = 10.0,
    restart_seconds: float = 600.0,
    interval: float | None = None,
) -> Reliability:
    """Goodput of a job that stops when one of its GPUs does.

    mtbf_hours: of one GPU; that of Llama 3's, if not given. checkpoint_seconds: that training pauses to save.
    restart_seconds: from a failure to the first new step. interval: seconds between checkpoints; Daly's, if None, whose
    goodput is within 0.1 % of the best. Raises ValueError for numbers that are not above 0.
    """
    gpus = whole("gpus", gpus)
    m = positive("mtbf_hours", mtbf_hours) * 3600 / gpus
    c, r = positive("checkpoint_seconds", checkpoint_seconds), positive("restart_seconds", restart_seconds)
    tau = best_interval(c, m) if interval is None else positive("interval", interval)
    try:
        goodput = tau / (m * math.exp(r / m) * math.expm1((tau + c) / m))
    except OverflowError:
        goodput = 0.0
    saving = goodput * c / tau
    return Reliability(gpus, m, tau, goodput, saving, 1 - goodput - saving)


def best_interval(c: float, m: float) -> float:
    """Seconds between checkpoints that take ``c``, if a failure comes every ``m`` (Daly, 2006, equation 37)."""
    if c >= 2 * m:
        return m
    x = math.sqrt(c / (2 * m))
    return math.sqrt(2 * c * m) * (1 + x / 3 + x**2 / 9) - c
