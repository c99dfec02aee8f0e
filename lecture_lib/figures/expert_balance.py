"""What skew does to experts over ranks, with controls: load by rank, what is dropped, what is sent."""

import functools
import math
from typing import NamedTuple

import ipywidgets as widgets
import numpy

from .controls import Explorer
from .palette import FAINT, INK, WASH, rank_color, text_color
from .svg import Figure, box, figure, label, line

RANKS, TOKENS = 8, 512  # tokens of each rank
EXPERTS = (8, 16, 32, 64, 128)
HIDDEN, BYTES = 4096, 2  # numbers of a token, and bytes of each: bf16


class Routed(NamedTuple):
    """wanted, taken: int (ranks, experts), copies by rank of origin: as routed, and as an expert's capacity lets in."""

    wanted: numpy.ndarray
    taken: numpy.ndarray

    @property
    def by_rank(self) -> numpy.ndarray:
        """Copies that each rank computes: int (ranks,)"""
        return self.taken.sum(0).reshape(RANKS, -1).sum(1)

    @property
    def dropped(self) -> float:
        """The share of all copies."""
        return 1 - self.taken.sum() / self.wanted.sum()

    def bytes_sent(self, rank: int) -> int:
        """Forward: copies that leave the rank, and results that it sends back."""
        per_rank = self.taken.reshape(RANKS, RANKS, -1).sum(2)  # from, to
        leave = per_rank[rank].sum() - per_rank[rank, rank]
        return int(leave + per_rank[:, rank].sum() - per_rank[rank, rank]) * HIDDEN * BYTES


@functools.cache
def chance() -> numpy.ndarray:
    """What the choices of all tokens are drawn from, the same each time: (ranks, tokens, most experts)"""
    return numpy.random.default_rng(0).gumbel(size=(RANKS, TOKENS, max(EXPERTS))).astype(numpy.float32)


def route(experts: int, top_k: int, skew: float = 0.0, capacity_factor: float = math.inf) -> Routed:
    """Each token draws k different experts; the i-th of them, in some order, is as popular as (i+1)^-skew.

    An expert takes ceil(factor k T / E) copies of the T tokens of each rank, as ``lecture_lib.parallel.expert.MoE``.
    """
    order = numpy.random.default_rng(1).permutation(experts)
    scores = chance()[..., :experts] - (skew * numpy.log(order + 1)).astype(numpy.float32)
    chosen = numpy.argpartition(-scores, top_k - 1, axis=-1)[..., :top_k]  # the k largest are such a draw
    wanted = numpy.stack([numpy.bincount(own.ravel(), minlength=experts) for own in chosen])
    capacity = numpy.ceil(capacity_factor * top_k * TOKENS / experts)
    return Routed(wanted, numpy.minimum(wanted, capacity).astype(int))


def draw(experts: int, top_k: int, skew: float, capacity_factor: float) -> Figure:
    """A bar for each rank: the copies that it computes, against an even share."""
    routed = route(experts, top_k, skew, capacity_factor)
    even, busiest = routed.wanted.sum() / RANKS, routed.by_rank.max()
    left, wide, high, pitch, top = 110, 560, 30, 40, 66
    scale = wide / max(busiest, even * 1.2)
    strokes = [
        label(left, 24, "copies to compute", anchor="start", bold=True),
        label(884, 24, "sends, forward", anchor="end", bold=True),
    ]
    for rank, count in enumerate(routed.by_rank):
        y, color = top + pitch * rank, rank_color(rank)
        strokes += [
            label(16, y, f"rank {rank}", anchor="start", bold=True),
            box(left, y - high / 2, wide, high, fill=WASH, stroke=WASH, radius=0),
            box(left, y - high / 2, count * scale, high, fill=color, stroke=color, radius=0),
            label(884, y, f"{routed.bytes_sent(rank) / 1e6:,.0f} MB", anchor="end"),
        ]
        inside = count * scale > 90
        strokes.append(
            label(
                left + count * scale + (-10 if inside else 8),
                y,
                f"{count:,}",
                anchor="end" if inside else "start",
                color=text_color(color) if inside else INK,
            )
        )
    bottom = top + pitch * (RANKS - 1) + high / 2
    strokes += [
        line([(left + even * scale, top - high / 2 - 6), (left + even * scale, bottom + 6)], dash="6 5"),
        label(left + even * scale, bottom + 22, f"even: {even:,.0f}"),
        label(16, bottom + 56, f"dropped: {routed.dropped:.0%}", anchor="start", bold=True),
        label(250, bottom + 56, f"the busiest has {busiest / even:.2f} times an even share", anchor="start", bold=True),
        line([(16, bottom + 36), (884, bottom + 36)], color=FAINT, width=1),
    ]
    factor = "no capacity" if capacity_factor == math.inf else f"capacity {capacity_factor:g}"
    text = (
        f"{experts} experts, {RANKS} ranks, top {top_k}, skew {skew:g}, {factor}: dropped {routed.dropped:.0%}, the "
        f"busiest rank has {busiest / even:.2f} times its share."
    )
    return figure("expert_balance", "Load of experts", text, 900, bottom + 80, strokes)


class BalanceExplorer(Explorer):
    """Controls for experts, top-k, skew and capacity above the load that they give."""

    def __init__(self):
        self.experts = widgets.SelectionSlider(options=EXPERTS, value=16, description="experts")
        self.top_k = widgets.IntSlider(min=1, max=8, value=2, description="top k")
        self.skew = widgets.FloatSlider(min=0, max=1.5, step=0.1, value=0.5, description="skew")
        factors = [(f"{factor:g}", factor) for factor in (1, 1.25, 1.5, 2, 4)] + [("none", math.inf)]
        self.capacity = widgets.SelectionSlider(options=factors, value=math.inf, description="capacity factor")
        super().__init__((self.experts, self.top_k), (self.skew, self.capacity), label_width="110px")

    def drawn(self) -> Figure:
        return draw(self.experts.value, self.top_k.value, self.skew.value, self.capacity.value)
