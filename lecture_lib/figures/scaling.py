"""When data parallelism stops paying: a step on paper, with controls."""

from typing import NamedTuple

import ipywidgets as widgets

from lecture_lib.hardware import get

from .axes import time_words
from .controls import Explorer
from .palette import FAINT, INK, PALETTE
from .svg import Figure, box, figure, label, line
from .travel import BYTES, MFU, all_reduce_seconds


class Step(NamedTuple):
    """Seconds of the parts of one data-parallel step."""

    forward: float
    backward: float
    all_reduce: float

    @property
    def exposed(self) -> float:
        """What is left of the all-reduce when the backward pass, which hides it, is over."""
        return max(0.0, self.all_reduce - self.backward)

    @property
    def efficiency(self) -> float:
        """The share of the step in which the GPU computes."""
        compute = self.forward + self.backward
        return compute / (compute + self.exposed)


def step(parameters: float, tokens: int, gpus: int, gpu: str = "H100") -> Step:
    """``tokens``: of one GPU in one step. 2 FLOPs for each parameter and token forward, 4 backward; one
    all-reduce of the bf16 gradients."""
    flops = MFU * get(gpu).bf16
    travel = all_reduce_seconds(gpu, gpus, BYTES * parameters)
    return Step(2 * parameters * tokens / flops, 4 * parameters * tokens / flops, travel)


def draw(parameters: float, tokens: int, gpus: int, gpu: str) -> Figure:
    """The step as bars: forward, backward, and the all-reduce that begins with the backward pass."""
    parts = step(parameters, tokens, gpus, gpu)
    left, wide, high = 150, 560, 44
    scale = wide / (parts.forward + max(parts.backward, parts.all_reduce))
    middle, end = left + parts.forward * scale, left + (parts.forward + parts.backward) * scale
    last = middle + parts.all_reduce * scale
    rows = {"compute": 50, "all-reduce": 114}
    strokes = [label(16, y, name, anchor="start", bold=True) for name, y in rows.items()]
    y, below = rows.values()
    strokes += [
        box(left, y - high / 2, middle - left, high, fill=PALETTE[5], stroke=FAINT, radius=0),
        box(middle, y - high / 2, end - middle, high, fill=PALETTE[0], stroke=FAINT, radius=0),
        box(middle, below - high / 2, last - middle, high, fill=PALETTE[4], stroke=FAINT, radius=0),
        line([(end, 16), (end, 146)], color=INK, dash="5 5"),
        label(left, 164, f"forward {time_words(parts.forward)}", anchor="start"),
        label(left + 190, 164, f"backward {time_words(parts.backward)}", anchor="start"),
        label(left + 400, 164, f"all-reduce {time_words(parts.all_reduce)}", anchor="start"),
        label(884, y, f"{parts.efficiency:.0%}", anchor="end", bold=True, size=30),
        label(884, below, "computing", anchor="end"),
    ]
    size = f"{parameters / 1e9:g} B"
    text = (
        f"{size} parameters, {tokens:,} tokens on each of {gpus:,} {gpu}: computes {parts.efficiency:.0%} of the time."
    )
    return figure("scaling", "A data-parallel step", text, 900, 188, strokes)


class ScalingExplorer(Explorer):
    """Controls for model, batch, GPUs and accelerator above the step that they give."""

    def __init__(self):
        billions = (0.1, 0.4, 1, 3, 7, 13, 34, 70)
        self.parameters = widgets.SelectionSlider(options=billions, value=7, description="parameters, B")
        self.tokens = widgets.SelectionSlider(
            options=[2**i for i in range(8, 18)], value=4096, description="tokens a GPU"
        )
        self.gpus = widgets.SelectionSlider(options=[2**i for i in range(15)], value=64, description="GPUs")
        self.gpu = widgets.Dropdown(options=["A100", "H100", "B200"], value="H100", description="accelerator")
        super().__init__((self.parameters, self.tokens), (self.gpus, self.gpu), label_width="110px")

    def drawn(self) -> Figure:
        return draw(self.parameters.value * 1e9, self.tokens.value, self.gpus.value, self.gpu.value)
