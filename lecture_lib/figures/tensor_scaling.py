"""How much of a layer's step tensor parallelism spends communicating: on paper, with controls."""

import ipywidgets as widgets

from lecture_lib.hardware import get

from .axes import time_words
from .controls import Explorer
from .palette import FAINT, PALETTE
from .svg import Figure, box, figure, label
from .travel import BYTES, MFU, all_reduce_seconds

RANKS = (1, 2, 4, 8, 16, 32)


def step(tokens: int, hidden: int, ranks: int, gpu: str = "H100") -> tuple[float, float]:
    """Seconds that one layer, forward and backward, computes and communicates on each of ``ranks`` GPUs.

    A layer has 12 hidden² parameters: 4 hidden² in attention, 8 hidden² in an MLP four times as wide. 6 FLOPs for each
    of them and each token (attention scores not counted), shared by the ranks. Four all-reduces of tokens x hidden
    numbers, which nothing hides.
    """
    travel = all_reduce_seconds(gpu, ranks, BYTES * tokens * hidden)
    return 6 * 12 * hidden**2 * tokens / ranks / (MFU * get(gpu).bf16), 4 * travel


def draw(tokens: int, hidden: int, gpu: str) -> Figure:
    """A bar for each number of ranks: what a rank computes, then what it communicates."""
    bars = {ranks: step(tokens, hidden, ranks, gpu) for ranks in RANKS}
    left, wide, high, pitch, top = 120, 560, 32, 44, 62
    scale = wide / max(sum(parts) for parts in bars.values())
    strokes = [
        label(16, 24, "tp", anchor="start", bold=True),
        label(left, 24, "a layer, forward and backward", anchor="start"),
        label(884, 24, "communicating", anchor="end", bold=True),
    ]
    shares = {}
    for row, (ranks, (compute, travel)) in enumerate(bars.items()):
        y, at = top + pitch * row, left + compute * scale
        shares[ranks] = travel / (compute + travel)
        strokes += [
            label(16, y, ranks, anchor="start", bold=True),
            box(left, y - high / 2, compute * scale, high, fill=PALETTE[0], stroke=FAINT, radius=0),
            box(at, y - high / 2, travel * scale, high, fill=PALETTE[4], stroke=FAINT, radius=0),
            label(at + travel * scale + 10, y, time_words(compute + travel), anchor="start"),
            label(884, y, f"{shares[ranks]:.0%}", anchor="end", bold=True),
        ]
    said = ", ".join(f"{ranks}: {share:.0%}" for ranks, share in shares.items() if ranks > 1)
    text = f"hidden {hidden:,}, {tokens:,} tokens, {gpu}; communicating, by tp: {said}."
    return figure("tensor_scaling", "A tensor-parallel layer", text, 900, top + pitch * (len(RANKS) - 1) + 34, strokes)


class TensorScalingExplorer(Explorer):
    """Controls for width, tokens and accelerator above the layer that they give."""

    def __init__(self):
        self.hidden = widgets.SelectionSlider(options=[2**i for i in range(10, 16)], value=8192, description="hidden")
        self.tokens = widgets.SelectionSlider(options=[2**i for i in range(18)], value=4096, description="tokens")
        self.gpu = widgets.Dropdown(options=["A100", "H100", "B200", "GB200"], value="H100", description="accelerator")
        super().__init__((self.hidden, self.tokens, self.gpu), label_width="90px")

    def drawn(self) -> Figure:
        return draw(self.tokens.value, self.hidden.value, self.gpu.value)
