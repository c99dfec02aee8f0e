"""One colour per rank, the same in every picture of the course.

The colours are those of Okabe and Ito, "Color Universal Design" (2008), https://jfly.uni-koeln.de/color/ , chosen so
that people with any common form of colour blindness can tell them apart. The order is ours: the first four have a
contrast of at least 3 to 1 with white paper, so that an arrow in the colour of its rank can be seen from the back
of a room. Colour is never the only sign: every row and cell is also labelled.
"""

PALETTE = (
    "#0072B2",  # rank 0, blue
    "#D55E00",  # rank 1, vermillion
    "#009E73",  # rank 2, bluish green
    "#CC79A7",  # rank 3, reddish purple
    "#E69F00",  # rank 4, orange
    "#56B4E9",  # rank 5, sky blue
    "#F0E442",  # rank 6, yellow
    "#000000",  # rank 7, black
)

INK = "#000000"  # text, outlines, and sums: what belongs to no single rank
FAINT = "#8A8A8A"  # lines in the background
GRID = "#D0D0D0"  # lines behind a drawing to scale
GREY = "#D9D9D9"  # the fill of what is no rank's own, or is there for a moment only
WASH = "#EEEEEE"  # the fill of what holds no data
PALE = "#BBD7EA"  # a light PALETTE[0]
PAPER = "#FFFFFF"


def rank_color(rank: int) -> str:
    """The colour of a rank; from rank 8 on they repeat."""
    return PALETTE[rank % len(PALETTE)]


def text_color(fill: str) -> str:
    """Ink or paper, whichever reads better on `fill`."""
    return max((INK, PAPER), key=lambda color: contrast(color, fill))


def contrast(a: str, b: str) -> float:
    """Contrast ratio of two colours, from 1 to 21, as WCAG 2.2 defines it; text needs at least 4.5."""
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


def luminance(color: str) -> float:
    r, g, b = linear_rgb(color)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def linear_rgb(color: str) -> tuple[float, float, float]:
    """'#RRGGBB' as three amounts of light from 0 to 1 (screens store a power of it)."""
    channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return tuple(c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
