"""Drawings of training runs: what is drawn is what was given, and the words say no number of one machine."""

import io

import pytest
from PIL import Image

from lecture_lib.figures import layouts, plot, training
from lecture_lib.figures.layouts import held
from lecture_lib.figures.training import KINDS, held_bars, loss_curves, step_bars
from lecture_lib.trace.memory import Memory


@pytest.fixture
def drawn_axes(monkeypatch):
    """The axes that a drawing was made on, to look at what is there."""
    made = []

    def keep(height):
        made.append(plot.canvas(height))
        return made[-1]

    monkeypatch.setattr(training, "canvas", keep)
    return lambda: made[-1][1]


def check_png(drawn):
    image = Image.open(io.BytesIO(drawn.png))
    assert image.width <= 900 and image.height <= 520
    assert repr(drawn) == drawn.text and "\n" not in drawn.text


def test_a_curve_is_drawn_for_each_run_and_the_words_keep_its_losses_to_themselves(drawn_axes):
    runs = {"one process": [5.5, 4.25, 3.0], "four ranks": [5.5, 4.25]}
    drawn = loss_curves(runs)
    check_png(drawn)
    lines = drawn_axes().get_lines()
    assert [list(line.get_ydata()) for line in lines] == list(runs.values())
    assert lines[0].get_linewidth() > lines[1].get_linewidth()  # the first can be seen under the second
    assert drawn.text == "Loss by step: one process for 3 steps, four ranks for 2 steps; each falls."
    assert loss_curves({"up": [1.0, 2.0]}).text == "Loss by step: up for 2 steps; not each falls."


def test_the_shares_of_a_step_are_those_of_its_seconds_and_fill_the_bar(drawn_axes):
    rows = {"one": dict(zip(KINDS, (1.0, 1.0, 2.0, 0.0))), "four": dict(zip(KINDS, (0.1, 0.1, 0.2, 0.6)))}
    drawn = step_bars(rows)
    check_png(drawn)
    bars = [bar for bar in drawn_axes().patches if bar.get_y() > -0.5]
    widths = [round(bar.get_width(), 6) for bar in bars]
    assert widths == [25, 25, 50, 0, 10, 10, 20, 60]
    for row in (bars[:4], bars[4:]):
        ends = [bar.get_x() + bar.get_width() for bar in row]
        assert row[0].get_x() == 0 and ends[-1] == pytest.approx(100)
        assert [bar.get_x() for bar in row[1:]] == pytest.approx(ends[:-1])
    assert drawn.text.endswith("one, four.") and not any(letter.isdigit() for letter in drawn.text)


def test_a_bar_of_what_is_held_reaches_as_far_as_the_most(drawn_axes):
    at_end = {"parameters": 1_000_000, "gradients": 500_000, "optimizer": 2_000_000, "activations": 0}
    at_peak = at_end | {"gradients": 250_000, "activations": 3_000_000}
    drawn = held_bars({"dp 4": Memory(at_peak, at_peak, at_end)})
    check_png(drawn)
    bars = [bar for bar in drawn_axes().patches if bar.get_y() > -0.5]
    assert [bar.get_width() for bar in bars] == pytest.approx([1, 0.5, 2, 2.75])
    assert [text.get_text() for text in drawn_axes().texts if "MB" in text.get_text()] == [" 6.25 MB"]
    assert drawn.text == (
        "MB that a rank holds: dp 4 6.25 (parameters 1.00, gradients 0.50, optimizer 2.00, for a moment 2.75)."
    )


def test_what_is_held_in_the_three_ways():
    """Every way does each layer forward and backward; storing holds most, and only recomputing does more work."""
    for way in ("store", "recompute", "communicate"):
        kinds = [kind for kind, _ in held(way)]
        assert kinds.count("F") == kinds.count("B") == layouts.LAYERS
        assert kinds.count("R") == (layouts.LAYERS if way == "recompute" else 0)
    most = {way: max(layers for _, layers in held(way)) for way in ("store", "recompute", "communicate")}
    assert most["store"] == layouts.LAYERS
    assert most["recompute"] == pytest.approx(1 + layouts.INPUT * (layouts.LAYERS - 1))
    assert most["communicate"] == layouts.LAYERS * layouts.SHARE
