"""A schedule on paper, with controls."""

from itertools import pairwise

import ipywidgets as widgets

from lecture_lib.parallel import pipeline
from lecture_lib.parallel.pipeline import Cost, Schedule

from .controls import Explorer
from .pipeline import NAMES, WIDTH, layout, strokes, summary
from .svg import Figure, figure


def table(name: str, ranks: int, micro_batches: int, virtual: int) -> Schedule:
    """The schedule of that name. ``virtual``: stages a rank, where that is a choice."""
    if name == "interleaved":
        return pipeline.interleaved(ranks, micro_batches, virtual)
    return getattr(pipeline, name)(ranks, micro_batches)


def draw(name: str, ranks: int, micro_batches: int, virtual: int, backward: tuple[float, float], send: float) -> Figure:
    """The chart of a schedule. Times are in forward passes of a micro-batch through a rank's layers, memory in what
    such a pass leaves there, however many stages the layers make.

    backward:  what I and W take
    send:      what a message takes; as long for a short stage as for a long one, since it has the same size
    """
    schedule = table(name, ranks, micro_batches, virtual)
    each = schedule.ranks / schedule.stages
    cost = Cost(F=each, I=each * backward[0], W=each * backward[1], send=send, activation=each)
    run = pipeline.simulate(schedule, cost)
    crossings = sum(a != b for a, b in pairwise(schedule.rank_of))  # each there and back with every micro-batch
    messages = 2 * micro_batches * crossings
    title = f"{NAMES[name]}: {float(run.makespan):.3g} forward passes long, {messages:,} messages"
    boxes, words, height = layout({title: run})
    return figure("pipeline_explorer", "A schedule", summary(title, run) + ".", WIDTH, height, strokes(boxes, words))


class PipelineExplorer(Explorer):
    """Controls for schedule, sizes and costs above the chart that they give."""

    def __init__(self):
        names = [(said, name) for name, said in NAMES.items()]
        ratios = [0, 0.1, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3]
        self.schedule = widgets.Dropdown(options=names, value="one_f_one_b", description="schedule")
        self.ranks = widgets.IntSlider(4, 1, 8, description="ranks")
        self.micro_batches = widgets.IntSlider(8, 1, 32, description="micro-batches")
        self.virtual = widgets.IntSlider(2, 1, 4, description="stages a rank")
        self.I = widgets.SelectionSlider(options=ratios, value=1, description="I / F")
        self.W = widgets.SelectionSlider(options=ratios, value=1, description="W / F")
        self.send = widgets.SelectionSlider(options=ratios, value=0, description="message / F")
        super().__init__(
            (self.schedule, self.ranks, self.micro_batches),
            (self.virtual, self.I),
            (self.W, self.send),
            label_width="100px",
        )

    def drawn(self) -> Figure:
        name = self.schedule.value
        self.virtual.disabled = name != "interleaved"
        backward = self.I.value, self.W.value
        return draw(name, self.ranks.value, self.micro_batches.value, self.virtual.value, backward, self.send.value)
