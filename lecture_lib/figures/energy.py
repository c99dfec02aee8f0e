"""What arithmetic and moving cost in energy."""

from lecture_lib.hardware import ENERGY

from .axes import LogAxis, beside_bar, short, vertical_grid
from .palette import PALETTE
from .svg import Figure, box, figure, label

PAD, LEFT, RIGHT, PITCH = 16, 400, 800, 40


def energy(name: str) -> Figure:
    """A bar for each: arithmetic on two numbers, or 8 bytes from somewhere."""
    axis = LogAxis(1e-13, 1e-8, LEFT, RIGHT)
    bottom = 52 + PITCH * len(ENERGY)
    strokes = [
        label(PAD, 26, "one operation, or 8 bytes moved", anchor="start", bold=True),
        label((LEFT + RIGHT) / 2, 26, "energy", bold=True),
        *vertical_grid(axis, 48, bottom, picojoules),
    ]
    words = []
    for i, cost in enumerate(ENERGY):
        what, joules = in_short(cost)
        y, color = 52 + PITCH * (i + 0.5), PALETTE[0] if cost.nbytes is None else PALETTE[1]
        strokes += [
            label(PAD, y, what, anchor="start"),
            box(LEFT, y - 13, axis.at(joules) - LEFT, 26, fill=color, stroke=color, radius=2),
            beside_bar(axis.at(joules), y, picojoules(joules)),
        ]
        words.append(f"{what} {picojoules(joules)}")
    return figure(name, "Energy", "; ".join(words) + ".", 900, bottom + 40, strokes)


def in_short(cost) -> tuple[str, float]:
    """Few words, and the joules; what moves is brought to 8 bytes."""
    if cost.nbytes is None:
        return cost.name.replace("two 32-bit floating-point numbers", "two fp32 numbers"), cost.joules
    return cost.name.replace("move 1 byte", "move 8 bytes"), 8 * cost.joules_per_byte


def picojoules(joules: float) -> str:
    return f"{short(joules * 1e12)} pJ" if joules < 0.99e-9 else f"{short(joules * 1e9)} nJ"
