"""What the planner says, drawn: bars add up to the estimate, points lie where they belong, controls redraw."""

import io
import itertools
import re

import numpy as np
import pytest
from PIL import Image

from lecture_lib.figures import planning_bars, planning_points, planning_roofline, plot
from lecture_lib.figures.planning import LayoutExplorer, draw, refusal
from lecture_lib.figures.planning_bars import DOES, held, memory_bars, shares, step_bar
from lecture_lib.figures.planning_points import all_layouts, measured, published
from lecture_lib.figures.planning_roofline import step_roofline
from lecture_lib.figures.planning_scaling import COLORS as SIZE_COLORS
from lecture_lib.figures.planning_scaling import SIZES, ScalingPlans, time_of
from lecture_lib.figures.planning_scaling import draw as draw_sizes
from lecture_lib.planner import Cluster, Layout, best, estimate, preset, reliability
from lecture_lib.planner.published import read
from tests.test_figures import check_that_no_text_touches

LLAMA, H100S = preset("llama3-405b"), Cluster("H100", 16384)
THEIRS = Layout(tp=8, pp=16, virtual_stages=8, micro_batch=1, global_batch=2048, zero_stage=1)


@pytest.fixture(scope="module")
def e():
    return estimate(LLAMA, H100S, THEIRS)


def check_png(drawn):
    """A picture of at most 900 pixels that says in one line what it shows."""
    image = Image.open(io.BytesIO(drawn.png))
    assert image.width <= 900 and image.height <= 520
    assert repr(drawn) == drawn.text and "\n" not in drawn.text
    assert set(drawn._repr_mimebundle_()) == {"image/png", "text/plain"}


@pytest.fixture
def drawn_axes(monkeypatch):
    """The axes that a drawing was made on, to look at what is there."""
    made = []

    def keep(height):
        made.append(plot.canvas(height))
        return made[-1]

    for module in (planning_bars, planning_points, planning_roofline):
        monkeypatch.setattr(module, "canvas", keep)
    return lambda: made[-1][1]


def test_every_part_of_a_step_is_drawn_as_something(e):
    assert set(DOES) == set(e.seconds)
    assert sum(shares(e).values()) == pytest.approx(1)
    computes = sum(e.seconds[part] for part in ("matmuls", "attention", "element-wise", "optimizer"))
    assert shares(e)["computes"] == pytest.approx(computes / e.step_seconds)
    assert sum(held(e).values()) == pytest.approx(e.memory_gib)
    assert held(e)["optimizer"] == pytest.approx((e.bytes["optimizer"] + e.bytes["master weights"]) / 2**30)


def test_a_step_is_as_long_as_its_parts(e, drawn_axes):
    drawn = step_bar(e)
    check_png(drawn)
    for name, seconds in e.seconds.items():
        assert (f"{name} {seconds / e.step_seconds:.1%}" in drawn.text) == (seconds > 0.0005 * e.step_seconds)
    bars = drawn_axes().patches
    assert bars[0].get_x() == 0
    assert all(b.get_x() == pytest.approx(a.get_x() + a.get_width()) for a, b in itertools.pairwise(bars))
    assert bars[-1].get_x() + bars[-1].get_width() == pytest.approx(e.step_seconds, rel=0.001)


def test_bars_of_memory_are_what_the_planner_says(e, drawn_axes):
    other = estimate(LLAMA, H100S, THEIRS.with_(zero_stage=0))
    drawn = memory_bars({"ZeRO 1": e, "ZeRO 0": other})
    check_png(drawn)
    wide = [bar.get_width() for bar in drawn_axes().patches]
    assert len(wide) == 10
    assert sum(wide[:5]) == pytest.approx(e.memory_gib) and sum(wide[5:]) == pytest.approx(other.memory_gib)
    assert f"ZeRO 0 {other.memory_gib:,.0f} (weights" in drawn.text and "of 78" in drawn.text


def test_what_a_run_measured_does_not_depend_on_the_planner():
    runs = [run for run in read() if run.convention == "model" and "tflops_per_gpu" in run.measured]
    assert runs and all(measured(run) == pytest.approx(run.measured["tflops_per_gpu"]) for run in runs)


def test_a_run_that_is_predicted_exactly_lies_on_the_line(drawn_axes):
    runs = read()
    off = [0.0] * len(runs)
    off[3] = 0.25  # a quarter longer than measured: slower
    drawn = published(runs, off, misses=1)
    check_png(drawn)
    dots = np.concatenate([group.get_offsets() for group in drawn_axes().collections])
    assert len(dots) == len(runs)
    beside = dots[np.abs(dots[:, 1] / dots[:, 0] - 1) > 1e-9]
    assert beside.tolist() == [pytest.approx([measured(runs[3]), measured(runs[3]) / 1.25])]
    assert f"{runs[3].name} -20%" in drawn.text and "off by 0.0% (median)" in drawn.text


def test_no_layout_lies_above_the_front(drawn_axes):
    plans = best(preset("llama3-8b"), Cluster("H100", 64), 64)
    drawn = all_layouts(plans, {"the fastest": plans[0]})
    check_png(drawn)
    (dots,) = (group.get_offsets() for group in drawn_axes().collections)
    front = drawn_axes().lines[0].get_xydata()
    assert len(dots) == sum(plans[0].step_seconds / e.step_seconds >= 0.5 for e in plans) > 100
    assert all((front[front[:, 0] <= gib][:, 1] >= speed).any() for gib, speed in dots)
    assert drawn_axes().lines[1].get_xydata().tolist() == [[plans[0].memory_gib, 1.0]]


def test_a_point_is_on_the_roof_of_its_link(drawn_axes):
    drawn = step_roofline(1e15, {"memory": (1e12, 1e12), "network": (1e12, 1e11)}, peak=1e15, reached=4e14)
    check_png(drawn)
    assert "memory 1,000, ridge 1,000, +100%; network 1,000, ridge 10,000, +1000%" in drawn.text
    assert "40% reached" in drawn.text
    points = [line.get_xydata().tolist()[0] for line in drawn_axes().lines if len(line.get_xdata()) == 1]
    assert points == [[1000, 1000], [1000, 100]], "ten times below its ridge it reaches a tenth of the peak"


@pytest.mark.parametrize("changes", [{}, {"tp": 1, "zero_stage": 0}, {"global_batch": 512}, {"recompute": "full"}])
def test_a_layout_has_room_for_its_words(changes):
    check_that_no_text_touches(draw(estimate(LLAMA, H100S, THEIRS.with_(**changes))))


def test_a_small_model_has_room_for_its_words():
    check_that_no_text_touches(draw(estimate(preset("llama3-8b"), Cluster("H100", 1), Layout(micro_batch=16))))


def test_controls_redraw_it():
    explorer = LayoutExplorer()
    e = explorer.estimate()
    assert (
        repr(explorer)
        == f"dp 128, tp 8, pp 16, cp 1: {e.step_seconds:.3g} seconds, MFU {e.mfu:.0%}, {e.memory_gib:.3g} GiB."
    )
    before = explorer.shown.value
    explorer.zero.value = 0
    assert explorer.shown.value != before and repr(explorer).endswith("does not fit.")
    assert "more than 78 GiB" in explorer.shown.value and len(repr(explorer)) <= 110


def test_controls_say_why_a_layout_cannot_run():
    explorer = LayoutExplorer()
    explorer.gpus.value = 64
    assert repr(explorer) == "tp x pp x cp = 8 x 16 x 1 = 128 does not divide the cluster's 64 GPUs."
    assert "cannot run" in explorer.shown.value
    explorer.pp.value = 1
    assert "dp 8, tp 8, pp 1" in repr(explorer)
    explorer.pp.value, explorer.parts.value = 128, 8
    assert len(repr(explorer)) <= 110 and len(refusal("word " * 60).text.removeprefix("A layout: ")) <= 110
    check_that_no_text_touches(refusal("word " * 30))


def test_it_can_start_from_another_layout():
    explorer = LayoutExplorer("llama3-70b", "A100-40GB", gpus=512, global_batch=1024, v=1)
    layout = explorer.estimate().layout
    assert (layout.virtual_stages, layout.pp, layout.global_batch) == (1, 16, 1024)
    assert repr(explorer).startswith("dp 4, tp 8, pp 16, cp 1: ")


def test_a_rack_counts_as_a_node():
    explorer = LayoutExplorer(gpu="GB200")
    assert explorer.estimate().cluster.gpus_per_node == 64
    explorer.gpus.value, explorer.tp.value, explorer.pp.value = 8, 8, 1
    assert explorer.estimate().cluster.gpus_per_node == 8


# ---- sizes of a cluster ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sizes():
    return ScalingPlans()


def test_a_gpu_spends_all_of_its_time(sizes):
    for plans in sizes.plans.values():
        assert [e.cluster.gpus for e in plans] == list(SIZES) and SIZES[0] == 8 and SIZES[-1] > 100_000
        for e in plans:
            parts, goodput = time_of(e), reliability(e.cluster.gpus).goodput
            assert sum(parts.values()) == pytest.approx(1) and parts["lost to failures"] == pytest.approx(1 - goodput)
            assert parts["computes"] == pytest.approx(goodput * shares(e)["computes"])


def test_the_same_batch_computes_less_and_a_growing_one_more(sizes):
    same, growing = sizes.plans.values()
    assert {e.layout.global_batch for e in same} == {2048}
    assert [e.layout.global_batch for e in growing] == [2 * n for n in SIZES]
    computes = [time_of(e)["computes"] for e in same]
    assert computes == sorted(computes, reverse=True)
    assert all(g.mfu > s.mfu for s, g in zip(same, growing, strict=True) if s.cluster.gpus > 1024)


def test_columns_are_as_high_as_their_shares(sizes):
    plans = sizes.plans[sizes.batch.value]
    drawn = draw_sizes(plans, 3)
    boxes = re.findall(r'height="([\d.]+)" rx="0" fill="(#\w+)"', drawn.svg)[: 4 * len(SIZES)]
    for e, column in zip(plans, (boxes[i : i + 4] for i in range(0, len(boxes), 4)), strict=True):
        assert [fill for _, fill in column] == list(SIZE_COLORS.values())
        assert [float(high) / 190 for high, _ in column] == pytest.approx(list(time_of(e).values()), abs=1e-3)


def test_all_sizes_have_room_for_their_words_and_redraw(sizes):
    for kind in sizes.batch.options:
        sizes.batch.value = kind
        for n in SIZES:
            sizes.gpus.value = n
            e = sizes.plans[kind][SIZES.index(n)]
            check_that_no_text_touches(draw_sizes(sizes.plans[kind], SIZES.index(n)))
            assert repr(sizes).startswith(f"{n:,} GPUs: MFU {e.mfu:.0%}, ") and len(repr(sizes)) <= 110
            assert f"{n:,} GPUs" in sizes.shown.value and f"dp {e.layout.dp}, tp {e.layout.tp}" in sizes.shown.value


def test_a_model_that_is_too_large_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match="no layout of llama3-405b with 2048 sequences a step fits on 8 H100."):
        ScalingPlans("llama3-405b")
