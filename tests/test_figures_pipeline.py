"""Charts of schedules: a box for each action, where and as long as it is; words; controls; legible at any setting."""

import io
import itertools
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from PIL import Image

from lecture_lib.figures import picture, rank_color
from lecture_lib.figures.palette import luminance
from lecture_lib.figures.pipeline import (
    BACKWARD,
    FORWARD,
    LEFT,
    NAMES,
    RIGHT,
    WEIGHTS,
    WIDTH,
    in_order,
    layout,
    real_and_paper,
    shade_of,
    strokes,
)
from lecture_lib.figures.pipeline_explorer import PipelineExplorer, draw, table
from lecture_lib.parallel import pipeline
from lecture_lib.parallel.pipeline import Cost, simulate
from tests.test_figures import check_that_no_text_touches

SIZES = [(1, 1), (2, 3), (4, 8), (8, 5)]  # ranks, micro-batches


def boxes_of(rank: int, run):
    """The boxes in a rank's row, without the mark in the rank's colour."""
    boxes, _, _ = layout({"a run": run})
    y = next(box.y for i, box in enumerate(b for b in boxes if b.x == 8) if i == rank)
    return [box for box in boxes if box.y == y and box.x != 8]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_a_box_for_each_action_and_paper_where_a_rank_is_idle(name, size):
    schedule = table(name, *size, virtual=2)
    run = simulate(schedule, Cost(F=2, I=3, W=1, send=0.5))
    scale, shades = (RIGHT - LEFT) / run.makespan, shade_of(schedule)
    for rank, row in enumerate(schedule.rows):
        boxes = boxes_of(rank, run)
        assert [box.fill for box in boxes] == [shades[stage][kind] for stage, kind, _ in row]
        assert [box.x for box in boxes] == pytest.approx([LEFT + begin * scale for begin in run.begin[rank]])
        assert sum(box.wide for box in boxes) == pytest.approx(run.busy[rank] * scale)
        assert all(a.x + a.wide <= b.x + 1e-6 for a, b in itertools.pairwise(boxes))
        assert boxes[-1].x + boxes[-1].wide <= RIGHT + 1e-6


def test_runs_below_each_other_have_one_scale_of_time():
    long, short = simulate(pipeline.gpipe(2, 8)), simulate(pipeline.gpipe(2, 4))
    boxes, words, height = layout({"long": long, "short": short})
    actions = [box for box in boxes if box.x >= LEFT and box.y < height - 40]  # not the legend
    assert len(actions) == 2 * 2 * (8 + 4)
    assert max(box.x + box.wide for box in actions[:32]) == pytest.approx(RIGHT)
    last = max(box.x + box.wide for box in actions[32:])
    assert (last - LEFT) / (RIGHT - LEFT) == pytest.approx(short.makespan / long.makespan)
    assert {"long, 11% idle", "short, 20% idle"} <= {word.words for word in words}


def test_in_a_box_stands_its_micro_batch_and_beside_a_row_what_it_holds():
    run = simulate(pipeline.one_f_one_b(3, 4))
    _, words, _ = layout({"1F1B": run})
    for rank, row in enumerate(run.schedule.rows):
        y = next(word.y for word in words if word.words == f"rank {rank}")
        said = [word.words for word in sorted(words, key=lambda word: word.x) if word.y == y]
        assert said == [f"rank {rank}", *(str(action.micro_batch) for action in row), str(3 - rank)]


def test_a_number_that_does_not_fit_is_left_out():
    _, words, _ = layout({"long": simulate(pipeline.gpipe(2, 60))})
    assert not {str(i) for i in range(10, 60)} & {word.words for word in words}


def test_forward_is_light_backward_is_dark_and_later_stages_a_shade_further():
    schedule = pipeline.interleaved(2, 2, virtual=3)
    shades = shade_of(schedule)
    assert (shades[0]["F"], shades[0]["B"], shades[0]["W"]) == (FORWARD, BACKWARD, WEIGHTS)
    assert shades[0] == shades[1] and all(each["I"] == each["B"] for each in shades)
    for earlier, later in ((0, 2), (2, 4)):
        assert luminance(shades[earlier]["F"]) < luminance(shades[later]["F"])
        assert luminance(shades[earlier]["B"]) > luminance(shades[later]["B"])
        assert luminance(shades[earlier]["W"]) > luminance(shades[later]["W"])
    assert min(luminance(each["F"]) for each in shades) > 2 * max(luminance(each["B"]) for each in shades)


def test_a_rank_is_marked_in_its_colour():
    boxes, _, _ = layout({"gpipe": simulate(pipeline.gpipe(4, 2))})
    assert [box.fill for box in boxes if box.x == 8] == [rank_color(rank) for rank in range(4)]


def test_all_boxes_of_a_colour_are_one_path():
    boxes, words, _ = layout({"zbv": simulate(pipeline.zbv(4, 8))})
    paths = [stroke for stroke in strokes(boxes, words) if stroke.startswith("<path")]
    assert len(paths) == len({box.fill for box in boxes})
    assert sum(path.count("M") for path in paths) == len(boxes)


# ---- a real run beside the one on paper ------------------------------------------------------------------------------


def as_measured(paper, longer: float):
    """As if every action had begun and ended so many times later."""
    begin, end = (tuple(tuple(longer * t for t in row) for row in times) for times in (paper.begin, paper.end))
    return replace(paper, begin=begin, end=end, peak_memory=None)


@pytest.mark.parametrize("schedule", [pipeline.naive(4), pipeline.gpipe(2, 3), pipeline.zbv(3, 5)])
def test_the_words_of_a_real_run_are_the_same_on_every_machine(schedule):
    paper = simulate(schedule, Cost(F=0.02, I=0.02, W=0.02))
    fast, slow = (real_and_paper(as_measured(paper, longer), paper) for longer in (1.01, 1.7))
    assert fast.text == slow.text and "\n" not in fast.text and fast.png != slow.png
    assert f"the bubble is {paper.bubble:.1%} of {paper.makespan * 1e3:,.0f} milliseconds" in fast.text
    assert all(f"rank {rank} does {in_order(schedule, rank)}" in fast.text for rank in range(schedule.ranks))
    image = Image.open(io.BytesIO(fast.png))
    assert image.width == WIDTH and image.height <= 520


def test_one_micro_batch_is_no_micro_batches():
    paper = simulate(pipeline.naive(2), Cost(F=0.1))
    assert real_and_paper(paper, paper).text.startswith("naive, 1 micro-batch on 2 ranks, ")


def test_an_order_in_words():
    assert in_order(pipeline.gpipe(2, 3), 0) == "F0-2 B0-2"
    assert in_order(pipeline.one_f_one_b(2, 4), 0) == "F0-1 B0 F2 B1 F3 B2-3"
    assert in_order(pipeline.interleaved(2, 2), 0) == "0F0-1 2F0-1 2B0-1 0B0-1"
    assert in_order(pipeline.one_f_one_b(2, 8), 1) == "F0 B0 F1 B1 F2 B2 F3 B3 and so on"


# ---- controls --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [(1, 1, 1), (4, 8, 2), (8, 32, 4), (3, 11, 3)])
@pytest.mark.parametrize("cost", [((1, 1), 0), ((0, 3), 0.25), ((0.1, 0), 3)])
def test_legible_at_any_setting(name, size, cost):
    drawn = draw(name, *size, *cost)
    check_that_no_text_touches(drawn)
    assert 'width="900"' in drawn.svg and "\n" not in drawn.text


@pytest.mark.parametrize("name", NAMES)
def test_counted_messages_are_those_of_the_program(name):
    said = draw(name, 4, 6, 2, (1, 1), 0).text
    slots = [slot for row in pipeline.program(table(name, 4, 6, 2)) for slot in row]
    assert f", {sum(len(slot.messages) for slot in slots) // 2:,} messages" in said


def test_a_short_stage_takes_and_holds_its_share():
    assert "27 forward passes long" in draw("zero_bubble_h1", 4, 8, 1, (1, 1), 0).text
    assert "25.5 forward passes long" in draw("zbv", 4, 8, 1, (1, 1), 0).text  # 24 and the fill of half-sized stages
    peaks = pipeline.peak_in_flight(pipeline.interleaved(4, 8, 2))
    held = ", ".join(f"{peak / 2:g}" for peak in peaks)
    assert f"hold at most {held}" in draw("interleaved", 4, 8, 2, (1, 1), 0).text


def test_controls_redraw_the_chart():
    explorer = PipelineExplorer()
    assert repr(explorer) == (
        "1F1B: 33 forward passes long, 48 messages: 27.3% idle, the ranks hold at most 4, 3, 2, 1."
    )
    seen = {explorer.shown.value}
    moves = [("micro_batches", 16), ("ranks", 3), ("I", 2), ("W", 0.5), ("send", 0.25), ("schedule", "interleaved")]
    for name, value in [*moves, ("virtual", 3)]:
        assert explorer.virtual.disabled == (name != "virtual"), "stages a rank are a choice only if interleaved"
        getattr(explorer, name).value = value
        assert explorer.shown.value not in seen, name
        seen.add(explorer.shown.value)
    run = simulate(pipeline.interleaved(3, 16, 3), Cost(F=1 / 3, I=2 / 3, W=0.5 / 3, send=0.25))
    assert f"{run.makespan:.3g} forward passes long" in repr(explorer) and f"{run.bubble:.1%} idle" in repr(explorer)


# ---- drawings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tables"),
    [
        ("gpipe_and_1f1b", [pipeline.gpipe(4, 8), pipeline.one_f_one_b(4, 8)]),
        ("interleaving", [pipeline.one_f_one_b(4, 4), pipeline.interleaved(4, 4, 2)]),
        ("zero_bubble", [pipeline.one_f_one_b(4, 6), pipeline.zero_bubble_h1(4, 6), pipeline.zbv(4, 6)]),
    ],
)
def test_drawings_of_schedules_are_the_schedules(name, tables):
    drawn = picture(name)
    found = re.findall(r"([\d.]+)% idle, the ranks hold at most ([\d., ]+);", drawn.text)
    assert len(found) == len(tables)
    for (idle, held), schedule in zip(found, tables):
        share = schedule.ranks / schedule.stages
        assert float(idle) == pytest.approx(100 * float(simulate(schedule).bubble), abs=0.06)
        assert [float(each) for each in held.split(",")] == [share * peak for peak in pipeline.peak_in_flight(schedule)]


def test_pictures_are_there_before_torch_is():
    code = "import sys, lecture_lib.figures, lecture_lib.figures.pipeline; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
