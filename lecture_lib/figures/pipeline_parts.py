"""Pipeline parallelism in fixed drawings: layers cut by depth, a backward pass cut in two, and schedules on paper."""

from fractions import Fraction

from .data_parallel import RANKS
from .palette import INK, WASH, rank_color, text_color
from .pipeline import BACKWARD, FORWARD, WEIGHTS, chart
from .svg import Figure, box, figure, label, line
from .tensor_parallel import both_ways


def pipeline_cut(name: str, layers: int = 8) -> Figure:
    """A stage for each rank, from left to right, and what goes from one to the next and back."""
    each = layers // RANKS
    top, high, wide, pitch, left = 62, 46, 124, 178, 100
    middle = top + (high * each) / 2
    strokes = [box(16, middle - 30, 44, 60, fill=WASH, radius=8), label(38, middle, "x", bold=True)]
    strokes += both_ways(60, left, middle + 9)[:2]  # nobody wants the gradient of the data
    for rank in range(RANKS):
        color, x = rank_color(rank), left + pitch * rank
        strokes.append(label(x + wide / 2, 30, f"rank {rank}", bold=True))
        for i in range(each):
            strokes.append(box(x, top + high * i, wide, high - 3, fill=color, stroke=color, radius=6))
            words = f"layer {each * rank + i}"
            strokes.append(label(x + wide / 2, top + high * (i + 0.5) - 1.5, words, color=text_color(color)))
        if rank < RANKS - 1:
            strokes += both_ways(x + wide, x + pitch, middle)
    end = left + pitch * (RANKS - 1) + wide
    strokes += [*both_ways(end, end + 42, middle), label(end + 44, middle, "loss", anchor="start", bold=True)]
    ways = {"forward: activations, (batch, width)": FORWARD, "backward: their gradients, as many": BACKWARD}
    for i, (words, color) in enumerate(ways.items()):
        x, y = left + 360 * i, top + high * each + 36
        strokes += [box(x, y - 9, 26, 18, fill=color, stroke=color), label(x + 36, y, words, anchor="start")]
    text = (
        f"{layers} layers on {RANKS} ranks, {each} on each, in order. Forward, each rank sends its activations to the "
        "next; the last one has the loss. Backward, each rank sends the gradient of what it got to the rank before."
    )
    return figure(name, "Layers cut by depth", text, 900, top + high * each + 66, strokes)


def backward_in_two(name: str) -> Figure:
    """One linear layer y = x A: the gradient g of y, the two products that it is needed for, and who waits for each."""
    rows = {
        "I": (70, "g Aᵀ", "gradient of x", "the rank before waits for it", BACKWARD),
        "W": (166, "xᵀ g", "gradient of A", "nobody waits, until the optimizer does", WEIGHTS),
    }
    middle = sum(y for y, *_ in rows.values()) / 2
    strokes = [box(16, middle - 34, 116, 68, fill=WASH, radius=8), label(74, middle - 13, "g", bold=True)]
    strokes.append(label(74, middle + 14, "from ahead"))
    for kind, (y, product, what, who, color) in rows.items():
        strokes += [
            line([(132, middle), (168, middle), (168, y), (196, y)], width=3),
            f'<path d="M210 {y:g}l-15 -9v18z" fill="{INK}"/>',
            box(212, y - 30, 168, 60, fill=color, stroke=color, radius=8),
            label(230, y, kind, anchor="start", bold=True, color=text_color(color)),
            label(314, y, product, mono=True, color=text_color(color)),
            label(400, y - 14, what, anchor="start", bold=True),
            label(400, y + 14, who, anchor="start"),
        ]
    text = (
        "a layer y = x A gets the gradient g of y from the rank ahead. I is g Aᵀ, the gradient of x, and the rank "
        "before waits for it. W is xᵀ g, the gradient of A; nobody waits for it, until the optimizer's step."
    )
    return figure(name, "A backward pass in two", text, 900, 226, strokes)


# ---- schedules -------------------------------------------------------------------------------------------------------

# They come with torch, which takes seconds to load: so not before one is drawn.


def gpipe_and_1f1b(name: str) -> Figure:
    from lecture_lib.parallel.pipeline import gpipe, one_f_one_b, simulate

    runs = {"GPipe": simulate(gpipe(RANKS, 8)), "1F1B": simulate(one_f_one_b(RANKS, 8))}
    return chart(name, "Same bubble, less held", runs)


def interleaving(name: str) -> Figure:
    from lecture_lib.parallel.pipeline import interleaved, one_f_one_b, simulate

    runs = {
        "1F1B": simulate(one_f_one_b(RANKS, 4)),
        "two stages a rank, interleaved": simulate(interleaved(RANKS, 4, virtual=2), halves()),
    }
    return chart(name, "A smaller bubble", runs)


def zero_bubble(name: str) -> Figure:
    from lecture_lib.parallel.pipeline import one_f_one_b, simulate, zbv, zero_bubble_h1

    runs = {
        "1F1B": simulate(one_f_one_b(RANKS, 6)),
        "zero bubble H1": simulate(zero_bubble_h1(RANKS, 6)),
        "two stages a rank in a V, ZBV": simulate(zbv(RANKS, 6), halves()),
    }
    return chart(name, "W fills the bubble", runs)


def halves():
    """The cost of a stage with half of a rank's layers: half the time, and it leaves half the activations."""
    from lecture_lib.parallel.pipeline import Cost

    half = Fraction(1, 2)
    return Cost(F=half, I=half, W=half, activation=half)
