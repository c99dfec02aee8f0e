"""The roofline: what a machine can reach at each arithmetic intensity, and where operations lie on it."""

from lecture_lib.hardware import (
    Operation,
    attainable,
    attention,
    bound,
    gelu,
    get,
    layer_norm,
    matmul,
    ridge,
    roof,
    softmax,
)

from .axes import LogAxis, number_words, rate_words
from .palette import FAINT, GRID, INK, PALETTE, PAPER
from .svg import Figure, figure, label, line, n

LEFT, RIGHT, TOP, BOTTOM, NAMES = 96, 560, 66, 356, 590


def of_a_layer(tokens: int, width: int, dtype: str = "bf16") -> dict[str, Operation]:
    """Operations of a transformer layer on ``tokens`` rows of ``width`` numbers, by a short name."""
    heads = dict(batch=1, heads=max(1, width // 128), queries=tokens, keys=tokens, head_dim=128, dtype=dtype)
    return {
        "attention": attention(**heads),
        "attention, unfused": attention(**heads, fused=False),
        "matmul": matmul(tokens, width, width, dtype),
        "matmul, 1 token": matmul(1, width, width, dtype),
        "GELU": gelu(tokens * width, dtype),
        "layer norm": layer_norm(tokens, width, dtype),
        "softmax": softmax(tokens, width, dtype),
    }


def roofline(name: str, operations: dict[str, Operation], machine, dtype: str = "bf16", title: str = "") -> Figure:
    """``machine``: a name, an Accelerator or Peaks. A line leads from each operation on the roof to its name."""
    machine = get(machine) if isinstance(machine, str) else machine
    title = title or machine.name
    peak, corner = machine.peak(dtype), ridge(machine, dtype)
    x = LogAxis(0.1, 1e5, LEFT, RIGHT)
    y = LogAxis(2.5 * peak / 10**4.5, 2.5 * peak, BOTTOM, TOP)
    strokes = [
        label(16, 28, f"{title}, {dtype}: FLOP/s at best", anchor="start", bold=True),
        label(884, 28, "FLOP per byte", anchor="end", bold=True),
        label((LEFT + RIGHT) / 2, BOTTOM + 50, "FLOP per byte (arithmetic intensity)"),
    ]
    for tick in x.decades():
        strokes.append(line([(x.at(tick), TOP), (x.at(tick), BOTTOM)], color=GRID, width=1.2))
        strokes.append(label(x.at(tick), BOTTOM + 20, f"{tick:,g}" if tick < 1e5 else "100k"))
    for tick in y.decades():
        strokes.append(line([(LEFT, y.at(tick)), (RIGHT, y.at(tick))], color=GRID, width=1.2))
        strokes.append(label(LEFT - 8, y.at(tick), rate_words(tick).removesuffix("FLOP/s"), anchor="end"))
    low = max(x.low, y.low / machine.memory_bandwidth)  # where the roof enters the picture
    under = [(i, roof(i, machine, dtype)) for i in (low, corner, x.high)]
    strokes.append(line([(x.at(i), y.at(rate)) for i, rate in under], width=5))
    strokes.append(line([(x.at(corner), y.at(peak)), (x.at(corner), BOTTOM)], color=FAINT, width=2, dash="6 6"))

    # Names in the order of intensity, as the points are along the roof, so that no line crosses another.
    ranked = sorted(operations.items(), key=lambda item: -item[1].intensity)
    slot = TOP + 8
    words = [f"peak {rate_words(peak)} from {number_words(corner)} FLOP per byte on"]
    for short_name, op in ranked:
        best, limit = attainable(op, machine), bound(op, machine)
        color = PALETTE[0] if limit == "compute" else PALETTE[1]
        px, py = x.at(op.intensity), y.at(best)
        strokes += [
            line([(px, py), (RIGHT + 8, slot), (NAMES - 6, slot)], color=color, width=1.5),
            f'<circle cx="{n(px)}" cy="{n(py)}" r="7" fill="{color}" stroke="{PAPER}" stroke-width="1.5"/>',
            label(NAMES, slot, short_name, anchor="start", color=INK),
            label(884, slot, number_words(op.intensity), anchor="end"),
        ]
        words.append(f"{short_name} {number_words(op.intensity)}, at most {best / peak:.1%} of the peak, {limit}-bound")
        slot += 36
    strokes += [label(NAMES, BOTTOM + 20, "● computes", anchor="start", color=PALETTE[0], bold=True)]
    strokes += [label(NAMES, BOTTOM + 50, "● waits for memory", anchor="start", color=PALETTE[1], bold=True)]
    return figure(name, f"Roofline of {title}, {dtype}", "; ".join(words) + ".", 900, BOTTOM + 76, strokes)
