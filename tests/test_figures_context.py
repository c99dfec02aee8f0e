"""Pictures of chapter 10: drawn from what the library says and the ranks recorded; the widget against the layer."""

import math

import pytest
import torch

from lecture_lib.figures import expert_balance as balance
from lecture_lib.figures import picture
from lecture_lib.figures.context import turning
from lecture_lib.figures.expert import WANTED, load
from lecture_lib.parallel.context import blocks_by_rank, contiguous, ring_attention, zigzag
from lecture_lib.parallel.expert import MoE
from lecture_lib.trace import timeline
from tests.test_figures import check_that_no_text_touches

PNG = b"\x89PNG\r\n"


def test_causal_work_colours_each_block_by_the_rank_that_computes_it():
    drawn = picture("causal_work")
    for layout in (contiguous, zigzag):
        held = ", ".join(f"rank {rank} {a} and {b}" for rank, (a, b) in enumerate(layout(4)))
        work = ", ".join(str(sum(steps)) for steps in blocks_by_rank(4, layout))
        assert f"{held}; they compute {work} blocks" in drawn.text
    blocks = [part for part in drawn.svg.split("<rect")[1:] if 'width="32" height="32"' in part]
    assert len(blocks) == 2 * 64 and sum("#EEEEEE" in part for part in blocks) == 2 * 28  # 36 of 64 are computed


def test_experts_shows_where_every_token_goes():
    arrived = [sum(wanted.count(e) for wanted in WANTED) for e in range(4)]
    assert sum(arrived) == 16 and len(set(arrived)) > 1  # or it would not show imbalance
    assert f"Dispatch brings {', '.join(map(str, arrived))} tokens to experts 0 to 3" in picture("experts").text


def test_turning_is_what_the_ranks_did(world):
    def turned():
        q = torch.randn(1, 2, 8, 4)
        with timeline() as line:
            ring_attention(q, q, q)
        return line

    drawn = turning(world.run(turned))
    assert drawn.png.startswith(PNG)
    assert drawn.text.endswith("rank 0: 0, 3, 2, 1; rank 1: 1, 0, 3, 2; rank 2: 2, 1, 0, 3; rank 3: 3, 2, 1, 0.")


def test_load_counts_by_expert():
    drawn = load([torch.tensor([[1, 2], [3, 4]]), torch.tensor([[0, 9], [0, 1]])], "Hot")
    assert drawn.png.startswith(PNG) and drawn.text == "Hot: copies for each expert. rank 0 4, 6; rank 1 0, 10."


# ---- the widget ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k, skew", [(1, 0.0), (2, 1.0), (8, 1.5)])
def test_each_token_draws_k_experts_and_popular_ones_more(top_k, skew):
    routed = balance.route(64, top_k, skew)
    assert routed.wanted.sum() == balance.RANKS * balance.TOKENS * top_k and routed.dropped == 0
    assert routed.wanted.max() <= balance.TOKENS  # different ones: each token wants an expert once at most
    by_expert = routed.wanted.sum(0)
    ratio = by_expert.max() / by_expert.mean()
    assert ratio < 1.5 if skew == 0 else ratio > 3


def test_the_share_of_an_expert_is_that_of_its_popularity():
    by_expert = sorted(balance.route(8, 1, 1.0).wanted.sum(0), reverse=True)
    harmonic = sum(1 / (i + 1) for i in range(8))
    for i, count in enumerate(by_expert):
        assert count / sum(by_expert) == pytest.approx(1 / (i + 1) / harmonic, rel=0.15)


def test_capacity_drops_what_the_layer_drops():
    """The rule of the widget is that of MoE: route tokens there, and count what is taken."""
    moe = MoE(16, 8, experts=8, top_k=2, capacity_factor=1.25)
    moe(torch.randn(balance.TOKENS, 16))
    capacity = math.ceil(1.25 * 2 * balance.TOKENS / 8)
    assert moe.arrived[0].tolist() == moe.wanted.clamp(max=capacity).tolist()
    free, routed = balance.route(8, 2, 1.0), balance.route(8, 2, 1.0, 1.25)
    assert (routed.wanted == free.wanted).all() and (routed.taken == free.wanted.clip(max=capacity)).all()
    assert routed.dropped > 0 and routed.by_rank.sum() == routed.taken.sum()


def test_bytes_are_those_of_the_copies_that_leave_and_the_results_that_return():
    routed = balance.route(16, 2, 0.5, 1.25)
    by_rank = routed.taken.reshape(balance.RANKS, balance.RANKS, 2).sum(2)  # from, to
    off = by_rank.sum() - by_rank.trace()
    total = sum(routed.bytes_sent(rank) for rank in range(balance.RANKS))
    assert total == 2 * off * balance.HIDDEN * balance.BYTES  # each copy once there, once back


@pytest.mark.parametrize("experts", balance.EXPERTS)
@pytest.mark.parametrize("factor", [1, 4, math.inf])
def test_its_picture_has_room_for_its_words(experts, factor):
    for top_k, skew in ((1, 0.0), (8, 1.5)):
        check_that_no_text_touches(balance.draw(experts, top_k, skew, factor))


def test_controls_redraw_it():
    explorer = balance.BalanceExplorer()
    assert repr(explorer).startswith("16 experts, 8 ranks, top 2, skew 0.5, no capacity: dropped 0%")
    before = explorer.shown.value
    explorer.experts.value, explorer.top_k.value, explorer.skew.value, explorer.capacity.value = 128, 8, 1.5, 1.25
    assert explorer.shown.value != before and explorer.shown.value.startswith("<svg")
    assert "capacity 1.25: dropped " in repr(explorer)
