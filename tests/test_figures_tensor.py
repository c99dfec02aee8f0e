"""The tensor-parallel layer on paper: its numbers against the formula, and controls that redraw it."""

import pytest

from lecture_lib.figures.tensor_scaling import RANKS, TensorScalingExplorer, draw, step
from lecture_lib.figures.travel import ALPHA_LINK, MFU
from lecture_lib.hardware import get
from tests.test_figures import check_that_no_text_touches


def test_inside_a_node_a_layer_takes_what_the_formulas_say():
    gpu, tokens, hidden, n = get("H100"), 4096, 8192, 8
    compute, travel = step(tokens, hidden, n)
    assert compute == pytest.approx(72 * hidden**2 * tokens / n / (MFU * gpu.bf16))
    nbytes = 2 * (n - 1) / n * 2 * tokens * hidden
    assert travel == pytest.approx(4 * (2 * (n - 1) * ALPHA_LINK + nbytes / gpu.link_bandwidth))
    assert step(tokens, hidden, 1)[1] == 0


def test_across_nodes_each_network_card_carries_its_part():
    gpu, tokens, hidden = get("H100"), 4096, 8192
    more = step(tokens, hidden, 16)[1] - step(tokens, hidden, 8)[1]
    assert more == pytest.approx(4 * 2 * tokens * hidden / 8 / gpu.nic_bandwidth, rel=0.2)  # two nodes: 2 (2-1)/2 S/8
    assert step(tokens, hidden, 32, "GB200")[1] < step(tokens, hidden, 32, "B200")[1]


@pytest.mark.parametrize("gpu", ["A100", "H100", "B200", "GB200"])
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 1024), (1, 32768), (131072, 1024), (131072, 32768)])
def test_its_picture_has_room_for_its_words(gpu, tokens, hidden):
    figure = draw(tokens, hidden, gpu)
    check_that_no_text_touches(figure)
    for ranks in RANKS[1:]:
        compute, travel = step(tokens, hidden, ranks, gpu)
        assert f"{ranks}: {travel / (compute + travel):.0%}" in figure.text


def test_controls_redraw_it():
    explorer = TensorScalingExplorer()
    assert repr(explorer).startswith("hidden 8,192, 4,096 tokens, H100; communicating, by tp: 2: 2%")
    before = explorer.shown.value
    explorer.hidden.value, explorer.tokens.value, explorer.gpu.value = 32768, 131072, "GB200"
    assert explorer.shown.value != before and explorer.shown.value.startswith("<svg")
    assert repr(explorer).startswith("hidden 32,768, 131,072 tokens, GB200;") and len(repr(explorer)) <= 110
