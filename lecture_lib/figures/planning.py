"""A layout with controls: what the planner makes of it, live."""

import textwrap

import ipywidgets as widgets

from lecture_lib.hardware.specs import GIB
from lecture_lib.planner import Cluster, Estimate, Layout, estimate, preset
from lecture_lib.planner.memory import OUTSIDE

from .controls import Explorer
from .palette import FAINT, INK, PALETTE, PAPER
from .planning_bars import COLORS, WAITS, held
from .svg import Figure, box, figure, label, line

GROUPS = {  # drawn together, for small bars
    "computes": ("matmuls", "attention", "element-wise", "optimizer"),
    "tp, cp": ("tensor parallel", "context parallel", "expert parallel"),
    "pp sends": ("pipeline sends",),
    "dp": ("data parallel",),
    "bubble": ("pipeline bubble",),
    "other": ("launches", "stragglers"),
}
GROUP_COLORS = dict(zip(GROUPS, (PALETTE[0], PALETTE[1], PALETTE[2], PALETTE[4], PAPER, WAITS), strict=True))


def draw(e: Estimate) -> Figure:
    """Time and memory as two bars, and under each what its colours are."""
    left, wide = 110, 620
    time = {group: sum(e.seconds[part] for part in parts) for group, parts in GROUPS.items()}
    limit = (e.cluster.memory_bytes - OUTSIDE) / GIB
    span = max(1.2 * limit, e.memory_gib)
    strokes = [label(16, 34, "time", anchor="start", bold=True), label(16, 190, "memory", anchor="start", bold=True)]
    strokes += [
        label(884, 34, f"{three_digits(e.step_seconds)} s", anchor="end", bold=True, size=26),
        label(884, 190, f"{three_digits(e.memory_gib)} GiB", anchor="end", bold=True, size=26),
    ]
    strokes += _bar(left, 34, wide, time, GROUP_COLORS, e.step_seconds, lambda s: f"{s / e.step_seconds:.0%}")
    strokes += _bar(left, 190, wide, held(e), COLORS, span, three_digits)
    x = left + wide * limit / span
    strokes += [
        line([(x, 160), (x, 216)], color=INK, width=3, dash="6 5"),
        label(x, 146, f"{limit:.0f} GiB are there" if e.fits else f"more than {limit:.0f} GiB", bold=not e.fits),
    ]
    axes = f"dp {e.layout.dp}, tp {e.layout.tp}, pp {e.layout.pp}, cp {e.layout.cp}"
    text = f"{axes}: {e.step_seconds:.3g} seconds, MFU {e.mfu:.0%}, {e.memory_gib:.3g} GiB"
    text += "." if e.fits else ", does not fit."
    verdict = "fits" if e.fits else "does not fit"
    strokes.append(label(16, 306, f"{axes}: MFU {e.mfu:.0%}, {verdict}", anchor="start", bold=True))
    return figure("layout", "A layout", text, 900, 326, strokes)


def _bar(x, y, wide, parts, colors, whole, write) -> list[str]:
    """A stacked bar, and under it what each colour is, three in a row."""
    strokes, at = [], x
    for slot, (name, size) in enumerate(parts.items()):
        long = wide * size / whole
        strokes.append(box(at, y - 20, long, 40, fill=colors[name], stroke=FAINT, radius=0))
        strokes += key(x + 250 * (slot % 3), y + 46 + 30 * (slot // 3), colors[name], f"{name} {write(size)}")
        at += long
    return strokes


def key(x, y, color, words) -> list[str]:
    """A square of a colour, and what it stands for."""
    return [box(x, y - 9, 18, 18, fill=color, stroke=FAINT, radius=0), label(x + 26, y, words, anchor="start")]


def three_digits(value: float) -> str:
    """Three digits, and more before a point."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def refusal(why: str) -> Figure:
    """A layout that cannot run, and the reason."""
    lines = textwrap.wrap(why, 66)
    strokes = [label(16, 36, "This layout cannot run.", anchor="start", bold=True)]
    strokes += [label(16, 80 + 30 * i, words, anchor="start") for i, words in enumerate(lines)]
    return figure("layout", "A layout", textwrap.shorten(why, 106, placeholder=" ..."), 900, 326, strokes)


class LayoutExplorer(Explorer):
    """Controls for model, cluster and layout above the time and the memory that they give."""

    def __init__(
        self, model: str = "llama3-405b", gpu: str = "H100", gpus: int = 16384, global_batch: int = 2048, v: int = 8
    ):
        powers = [2**i for i in range(15)]
        models = ["llama3-8b", "llama2-13b", "llama3-70b", "gpt3-175b", "llama3-405b"]
        chips = ["A100-40GB", "A100", "H100", "H200", "B200", "GB200"]
        choose, slide = widgets.Dropdown, widgets.SelectionSlider
        self.model = choose(options=models, value=model, description="model")
        self.gpu = choose(options=chips, value=gpu, description="GPU")
        self.gpus = slide(options=powers, value=gpus, description="GPUs")
        self.tp = slide(options=powers[:7], value=8, description="tp")
        self.pp = slide(options=powers[:8], value=16, description="pp")
        self.cp = slide(options=powers[:5], value=1, description="cp")
        self.parts = slide(options=powers[:4], value=v, description="v")
        self.micro_batch = slide(options=powers[:5], value=1, description="micro-batch")
        self.global_batch = slide(options=powers, value=global_batch, description="batch")
        self.zero = choose(options=[0, 1, 2, 3], value=1, description="ZeRO")
        self.recompute = choose(options=["none", "selective", "full"], value="none", description="recompute")
        rows = (
            (self.model, self.gpu, self.zero, self.recompute),
            (self.gpus, self.global_batch, self.micro_batch),
            (self.tp, self.pp, self.cp, self.parts),
        )
        for control in (control for row in rows for control in row):
            control.layout.width = "290px" if control in rows[1] else "220px"
        super().__init__(*rows, label_width="80px")

    def estimate(self) -> Estimate:
        """Of what the controls say. Raises ValueError for a layout that cannot run."""
        axes = {axis: getattr(self, axis).value for axis in ("tp", "pp", "cp")}
        policies = {"zero_stage": self.zero.value, "recompute": self.recompute.value, "attention": "flash2"}
        policies |= {"micro_batch": self.micro_batch.value, "global_batch": self.global_batch.value}
        gpus = self.gpus.value
        node = min(64, gpus) if self.gpu.value == "GB200" else None  # 64 of a rack's 72, for powers of two
        parts = self.parts.value if self.pp.value > 1 else None
        layout = Layout(**axes, **policies, virtual_stages=parts)
        return estimate(preset(self.model.value), Cluster(self.gpu.value, gpus, node), layout)

    def drawn(self) -> Figure:
        try:
            return draw(self.estimate())
        except ValueError as error:
            return refusal(str(error))
