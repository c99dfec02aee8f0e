"""The story of the course in one picture: compute is far from data, and each step away from it is slower."""

import math

from .palette import FAINT, INK, PAPER
from .svg import Figure, box, figure, label, line

# Bytes per second into one H100 SXM, one direction.
SHARED = 132 * 128 * 1.83e9  # SMs x (32 banks x 4 bytes) per clock x boost clock; NVIDIA H100 architecture whitepaper
HBM = 3.35e12  # NVIDIA H100 datasheet
NVLINK = 450e9  # the same, which says 900 GB/s for both directions
NETWORK = 400e9 / 8  # one 400 Gbit/s adapter per GPU, as in NVIDIA's DGX H100 datasheet

STEPS = (
    ("shared memory and L1", SHARED, "1: tile and fuse"),
    ("HBM, the GPU's memory", HBM, "1: count the bytes"),
    ("NVLink, GPUs of one node", NVLINK, "2 to 5: shard"),
    ("network, other nodes", NETWORK, "4, 6, 8: replicate, pipeline"),
)
PAD, LEFT, DECADE, PITCH, HEIGHT, FROM = 16, 280, 84, 58, 36, 1e-5


def ladder(name: str) -> Figure:
    top = 70
    strokes = [
        label(PAD, 30, "where the data is", anchor="start", bold=True),
        label(LEFT, 30, "time to move 1 GB", anchor="start", bold=True),
        label(640, 30, "chapter", anchor="start", bold=True),
    ]
    for decade in range(4):
        x = LEFT + DECADE * decade
        strokes.append(line([(x, 50), (x, top + PITCH * len(STEPS) - 14)], color="#D0D0D0", width=1.2))
        strokes.append(label(x, top + PITCH * len(STEPS) + 6, _time(FROM * 10**decade)))
    words = []
    for i, (place, rate, chapters) in enumerate(STEPS):
        seconds, y = 1e9 / rate, top + PITCH * i + HEIGHT / 2
        width = DECADE * math.log10(seconds / FROM)
        strokes += [
            label(PAD, y, place, anchor="start"),
            box(LEFT, y - HEIGHT / 2, width, HEIGHT, fill=FAINT, stroke=FAINT),
            box(LEFT + width + 6, y - 14, 78, 28, fill=PAPER, stroke=PAPER),
            label(LEFT + width + 10, y, _time(seconds), anchor="start", bold=True, color=INK),
            label(640, y, chapters, anchor="start"),
        ]
        words.append(f"{place} {_time(seconds)}")
    text = f"time to move 1 GB into the compute units of one H100: {'; '.join(words)}."
    return figure(name, "Compute is far from data", text, 900, top + PITCH * len(STEPS) + 30, strokes)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2g} ms" if seconds > 0.99e-4 else f"{seconds * 1e6:.2g} µs"
