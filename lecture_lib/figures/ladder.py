"""The story of the course in one picture: compute is far from data, and each step away from it is slower."""

from lecture_lib.hardware import get
from lecture_lib.hardware import ladder as steps_of

from .axes import LogAxis, beside_bar, time_words, vertical_grid
from .palette import FAINT
from .svg import Figure, box, figure, label

# Steps of an H100 by the first word of their name, our words for them, and the chapters about them.
PLACES = {
    "L1": ("shared memory and L1", "1: tile and fuse"),
    "HBM": ("HBM, the GPU's memory", "1: count the bytes"),
    "NVLink": ("NVLink, GPUs of one node", "2 to 5: shard"),
    "network": ("network, other nodes", "4, 6, 8: replicate, pipeline"),
}
PAD, LEFT, DECADE, PITCH, HEIGHT, FROM = 16, 280, 84, 58, 36, 1e-5


def ladder(name: str) -> Figure:
    seconds = {first_word(step.name): step.seconds() for step in steps_of(get("H100"))}
    top = 70
    bottom = top + PITCH * len(PLACES) - 14
    axis = LogAxis(FROM, FROM * 1e4, LEFT, LEFT + 4 * DECADE)
    labelled = LogAxis(FROM, FROM * 1e3, LEFT, LEFT + 3 * DECADE)  # the names of chapters begin after it
    strokes = [
        label(PAD, 30, "where the data is", anchor="start", bold=True),
        label(LEFT, 30, "time to move 1 GB", anchor="start", bold=True),
        label(640, 30, "chapter", anchor="start", bold=True),
        *vertical_grid(labelled, 50, bottom, time_words),
    ]
    words = []
    for i, (step, (place, chapters)) in enumerate(PLACES.items()):
        time, y = time_words(seconds[step]), top + PITCH * i + HEIGHT / 2
        right = axis.at(seconds[step])
        strokes += [
            label(PAD, y, place, anchor="start"),
            box(LEFT, y - HEIGHT / 2, right - LEFT, HEIGHT, fill=FAINT, stroke=FAINT),
            beside_bar(right, y, time),
            label(640, y, chapters, anchor="start"),
        ]
        words.append(f"{place} {time}")
    text = f"time to move 1 GB into the compute units of one H100: {'; '.join(words)}."
    return figure(name, "Compute is far from data", text, 900, bottom + 44, strokes)


def first_word(name: str) -> str:
    """ "NVLink" of "NVLink 4, 8 accelerators"."""
    return name.split()[0].rstrip(",")
