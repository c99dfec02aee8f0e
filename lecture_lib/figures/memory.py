"""What a rank held at its fullest moment, measured by lecture_lib.trace.memory."""

from .palette import FAINT, PALETTE, text_color
from .svg import Figure, box, figure, label

COLORS = {
    "parameters": PALETTE[5],
    "gradients": PALETTE[4],
    "optimizer": PALETTE[6],
    "activations": "#D9D9D9",
}
LEFT, WIDE, PITCH, HIGH = 196, 560, 62, 42


def memory_bars(held: dict) -> Figure:
    """``held``: a lecture_lib.trace.Memory for each name, drawn as bars of their parts when their sum was greatest."""
    most = max(each.total for each in held.values())
    strokes, words = [], []
    x = LEFT
    for kind, color in COLORS.items():
        strokes += [box(x, 14, 24, 24, fill=color, stroke=FAINT), label(x + 32, 26, kind, anchor="start")]
        x += 58 + 10 * len(kind)
    for i, (name, each) in enumerate(held.items()):
        y, x = 78 + PITCH * i, float(LEFT)
        strokes.append(label(16, y, name, anchor="start", bold=True))
        for kind, color in COLORS.items():
            wide = WIDE * each.at_peak[kind] / most
            strokes.append(box(x, y - HIGH / 2, wide, HIGH, fill=color, stroke=FAINT, radius=0))
            share = f"{each.at_peak[kind] / 1e6:.1f}"
            if wide > 44:
                strokes.append(label(x + wide / 2, y, share, color=text_color(color)))
            x += wide
        total = f"{each.total / 1e6:.1f} MB"
        strokes.append(label(x + 10, y, total, anchor="start", bold=True))
        parts = ", ".join(f"{kind} {each.at_peak[kind] / 1e6:.1f}" for kind in COLORS)
        words.append(f"{name} {total} ({parts})")
    text = f"MB held at the fullest moment of a step: {'; '.join(words)}."
    return figure("memory", "Memory of a rank", text, 900, 78 + PITCH * (len(held) - 1) + HIGH / 2 + 16, strokes)
