"""Which layout is best: try all that can run, keep those that fit, fastest first, and say why the others are out.

    plans = best(preset("llama3-405b"), Cluster("H100", 16384), global_batch=2048)
    plans[0].table()      plans.pareto()      plans.rejected      plans.rank(tp=8, pp=16)

Memory grows with the micro-batch: where one does not fit, no larger one is tried. The time of a search is in proportion
to the layouts that it tries.
"""

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lecture_lib.hardware.specs import GIB
from lecture_lib.planner.cluster import Cluster
from lecture_lib.planner.constants import calibrated
from lecture_lib.planner.estimate import Estimate
from lecture_lib.planner.layout import RECOMPUTE, Layout, check, complete
from lecture_lib.planner.memory import OUTSIDE, memory_bytes
from lecture_lib.planner.model import Transformer
from lecture_lib.planner.numbers import whole
from lecture_lib.planner.step import step_seconds

SHORTEST = 2048  # tokens: a sequence is not split into pieces that are shorter, for attention to hide the traffic


_NUMBER = re.compile(r"\d+(?:\.\d+)?")


class Reason(NamedTuple):
    """Why layouts are out. times: how many; kind: the sentence, with N for each number; example: one as it was said."""

    times: int
    kind: str
    example: str


@dataclass(frozen=True)
class Plans:
    """fits: fastest first. rejected: layouts and why each is out; one that is out by its axes leaves the rest open.
    tried: how many were looked at."""

    fits: list[Estimate]
    rejected: list[tuple[Layout, str]]
    tried: int

    def __getitem__(self, i) -> Estimate:
        return self.fits[i]

    def __len__(self) -> int:
        return len(self.fits)

    def __iter__(self) -> Iterator[Estimate]:
        return iter(self.fits)

    def pareto(self) -> list[Estimate]:
        """Those that no other beats in both memory and speed, from the smallest to the fastest."""
        front: list[Estimate] = []
        for e in sorted(self.fits, key=lambda e: (e.memory_gib, e.step_seconds)):
            if not front or e.step_seconds < front[-1].step_seconds:
                front.append(e)
        return front

    def rank(self, **wanted) -> int | None:
        """The place, from 1, of the fastest that fits with these fields of its layout; None if there is none."""
        for place, e in enumerate(self.fits, 1):
            if all(getattr(e.layout, name) == value for name, value in wanted.items()):
                return place
        return None

    def reasons(self) -> list["Reason"]:
        """What was said of those that are out, the most frequent first: sentences that differ in numbers are alike."""
        found: dict[str, list[str]] = {}
        for _, why in self.rejected:
            found.setdefault(_NUMBER.sub("N", why), []).append(why)
        return sorted((Reason(len(said), kind, said[0]) for kind, said in found.items()), key=lambda r: -r.times)

    def table(self, n: int = 10) -> str:
        """The n fastest, one line each."""
        head = f"{'':>3}  {'step':>8}  {'MFU':>6}  {'GiB':>5}  layout"
        lines = [
            f"{place:>3}  {e.step_seconds:>7.2f}s  {e.mfu:>6.1%}  {e.memory_gib:>5.1f}  {e.layout.axes()}"
            for place, e in enumerate(self.fits[:n], 1)
        ]
        tail = f"{self.tried} layouts tried, {len(self.fits)} fit, {len(self.rejected)} reasons why others are out"
        return "\n".join([head, *lines, tail])


def best(
    model: Transformer,
    cluster: Cluster,
    global_batch: int,
    *,
    precision: str = "bf16",
    attention: str = "flash2",
    tp: Iterable[int] | None = None,
    pp: Iterable[int] | None = None,
    cp: Iterable[int] | None = None,
    ep: Iterable[int] | None = None,
    micro_batches: Iterable[int] = (1, 2, 4, 8),
    parts: Iterable[int] = (1, 2, 4, 8),
    zero_stages: Iterable[int] = (1, 2, 3),
    recompute: Iterable[str] = RECOMPUTE,
    constants: dict | None = None,
) -> Plans:
    """All layouts that can run and fit, fastest first.

    tp, pp, cp, ep: sizes to try; if None, all divisors that make sense: tp inside a node, cp with pieces of 2,048
    tokens or more. parts: virtual stages to try; micro_batches: powers of two up to 64, or one of any size. zero_stages
    leave out 0, which is never better than 1; with a pipeline 3 is the same as 1, and tried only in its absence.
    attention: the kernel, the same for all. Raises ValueError for a batch or a precision that no layout could run with.
    """
    constants = calibrated() if constants is None else constants
    global_batch = whole("global_batch", global_batch)
    policies = dict(precision=precision, attention=attention)
    check(model, cluster, Layout(dp=cluster.gpus, **policies))
    divisors = [d for d in range(1, min(cluster.gpus, 4096) + 1) if cluster.gpus % d == 0]
    tps = [d for d in divisors if d <= cluster.gpus_per_node and model.heads % d == 0] if tp is None else list(tp)
    cps = [d for d in divisors if d == 1 or model.seq // d >= SHORTEST] if cp is None else list(cp)
    pps = [d for d in divisors if d <= model.layers + 2] if pp is None else list(pp)
    eps = [d for d in divisors if model.experts % d == 0] if ep is None else list(ep)
    zero_stages, recompute = tuple(zero_stages), tuple(recompute)
    micro_batches, parts = set(micro_batches), set(parts)
    # What is given, and not to be chosen, is checked with the axes: the reason is then told.
    (batch,) = micro_batches if len(micro_batches) == 1 else (None,)
    (part,) = parts if len(parts) == 1 else (None,)
    fits, rejected, tried = [], [], 0
    for axes in (dict(tp=t, pp=p, cp=c, ep=e) for t in tps for p in pps for c in cps for e in eps):
        asked = Layout(**axes, **policies, global_batch=global_batch, micro_batch=batch)
        asked = asked.with_(virtual_stages=part if asked.pp > 1 else None)
        try:
            (base, *_) = complete(model, cluster, asked)
            if base.pp == 1 and 1 not in parts:
                raise ValueError(f"without a pipeline there are no virtual stages, and {min(parts)} are asked for.")
        except ValueError as error:
            tried += 1
            rejected.append((asked, str(error)))
            continue
        for zero, again in itertools.product(zero_stages, recompute):
            if zero == 3 and base.pp > 1 and 1 in zero_stages:
                continue  # the same as 1, see layout.py
            options = complete(model, cluster, asked.with_(zero_stage=zero, recompute=again))
            for v in sorted({o.virtual_stages for o in options} & parts):
                for layout in (o for o in options if o.virtual_stages == v and o.micro_batch in micro_batches):
                    tried += 1
                    needed = memory_bytes(model, layout)
                    if sum(needed.values()) + OUTSIDE > cluster.memory_bytes:
                        rejected.append((layout, _too_much(needed, cluster)))
                        break  # larger micro-batches need more
                    fits.append(
                        Estimate(model, cluster, layout, step_seconds(model, cluster, layout, constants), needed)
                    )
    return Plans(sorted(fits, key=lambda e: e.step_seconds), rejected, tried)


def _too_much(needed: dict[str, float], cluster: Cluster) -> str:
    largest = max(needed, key=needed.get)
    total = (sum(needed.values()) + OUTSIDE) / GIB
    return f"it needs {total:.1f} GiB of {cluster.memory_bytes / GIB:.0f}, most of it for {largest}."
