"""Pictures of real runs: chunks replayed from ledgers, timelines, curves. Their words do not depend on the machine."""

import io

import pytest
import torch
from PIL import Image

from lecture_lib import collectives
from lecture_lib.collectives.bench import Row
from lecture_lib.figures.bandwidth import time_by_size
from lecture_lib.figures.chunks import ChunkStepper, chunks, states
from lecture_lib.figures.gantt import gantt
from lecture_lib.trace import Call, Event, Timeline, ledger


def ledgers_of(world, algorithm):
    def traced():
        with ledger() as led:
            getattr(collectives, algorithm)(torch.ones(16))
        return led

    return world.run(traced)


def test_a_replayed_ring_ends_with_every_chunk_whole_everywhere(world):
    found = states(ledgers_of(world, "ring_all_reduce"))
    assert len(found) == 1 + 2 * 3
    assert all(len(moves) == 4 for moves, _ in found[1:]), "all four send in each step"
    whole = [sum(len(whose) == 4 for row in holds for whose in row) for _, holds in found]
    assert whole == [0, 0, 0, 4, 8, 12, 16]
    assert all(holds[r][c] == {r} for _, holds in found[:1] for r in range(4) for c in range(4))


def test_the_stepper_redraws_and_says_what_it_shows(world):
    stepper = ChunkStepper(ledgers_of(world, "ring_all_reduce"))
    assert repr(stepper) == "Step 0 of 6: 0 of 16 chunks are whole."
    before = stepper.shown.value
    stepper.step.value = 6
    assert repr(stepper) == "Step 6 of 6: 16 of 16 chunks are whole." and stepper.shown.value != before
    assert stepper.shown.value.startswith("<svg") and len(repr(stepper)) < 110
    assert "rank 0 sends chunk" in chunks("c", ledgers_of(world, "ring_all_reduce"), 1).text


def line_of(rank):
    call = Call("all_reduce", (0, 1), "float32", 4, 16)
    return Timeline(
        rank, [Event("forward", 0.0, 0.2), Event("all_reduce", 0.1, 0.3, call), Event("send", 0.2, None, call)]
    )


def test_a_gantt_chart_says_what_ran_and_not_how_long():
    chart = gantt([line_of(0), line_of(1)])
    assert repr(chart) == ("Timeline of 2 ranks: rank 0 forward, all_reduce, send; rank 1 forward, all_reduce, send.")
    assert Image.open(io.BytesIO(chart.png)).width <= 900
    assert set(chart._repr_mimebundle_()) == {"image/png", "text/plain"}
    assert gantt([Timeline(0)]).text.startswith("Timeline of 1 ranks")


@pytest.mark.parametrize("predicted", [None, {"torch": [1e-3, 2e-3]}])
def test_curves_name_what_they_show(predicted):
    rows = [Row("all_reduce", "torch", 4, nbytes, seconds) for nbytes, seconds in ((64, 1e-3), (1 << 20, 3e-3))]
    drawn = time_by_size(rows, predicted)
    assert drawn.text.startswith("Time of all_reduce on 4 ranks against size, 64 B to 1 MiB: torch")
    assert ("dashed" in drawn.text) == bool(predicted)
    assert Image.open(io.BytesIO(drawn.png)).size == (900, 380)
