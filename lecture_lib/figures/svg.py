"""A picture that also says what it shows, and the few strokes that all pictures are drawn with.

Each stroke is a function that returns a piece of SVG. Text is real text, so that a screen reader, a search and a copy
find it; every label has room to spare, because each machine brings its own fonts.
"""

from dataclasses import dataclass
from html import escape

from .palette import INK, PAPER, text_color

SANS = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
MONO = "Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"
SIZE = 20  # pixels; 14 pt is 18.7 pixels
ROW = 32  # pixels from a line of a table to the next


@dataclass(frozen=True, repr=False)
class Figure:
    """Show it with `display(figure)`; `figure.text` says in one line what it shows, numbers included."""

    name: str
    svg: str
    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {"image/svg+xml": self.svg, "text/plain": self.text}


def figure(name: str, title: str, words: str, width: float, height: float, strokes: list[str]) -> Figure:
    """Strokes on white paper. The paper is part of the picture, so that it reads the same on a dark theme."""
    w, h = n(width), n(height)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}"'
        f' role="img" aria-labelledby="{name}-title {name}-desc" font-family="{SANS}">'
    )
    lines = [
        head,
        f'<title id="{name}-title">{escape(title)}</title>',
        f'<desc id="{name}-desc">{escape(words)}</desc>',
        f'<rect width="100%" height="100%" rx="10" fill="{PAPER}"/>',
        *strokes,
        "</svg>",
    ]
    return Figure(name, "\n".join(lines) + "\n", f"{title}: {words}")


def n(number: float) -> str:
    """A coordinate with one decimal at most."""
    return f"{round(number, 1):g}"


def label(x, y, words, *, size=SIZE, anchor="middle", color=INK, bold=False, mono=False) -> str:
    """Text with its middle at height y. (SVG's own way to centre vertically differs between viewers.)"""
    style = ' font-weight="bold"' * bold + f' font-family="{MONO}"' * mono
    return (
        f'<text x="{n(x)}" y="{n(y + 0.35 * size)}" font-size="{size}" text-anchor="{anchor}" fill="{color}"{style}>'
        f"{escape(str(words))}</text>"
    )


def table(y, rows, columns, colors=None) -> list[str]:
    """Rows of words, the first at height y. ``columns``: where each column begins; the words of the first are bold, and
    may each have a colour of their own."""
    strokes = []
    for i, (head, *others) in enumerate(rows):
        color = (colors or {}).get(head, INK)
        strokes.append(label(columns[0], y + ROW * i, head, anchor="start", color=color, bold=True))
        strokes += [label(x, y + ROW * i, words, anchor="start") for x, words in zip(columns[1:], others, strict=True)]
    return strokes


def box(x, y, w, h, *, fill=PAPER, stroke=INK, width=1.5, radius=4, dash="") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<rect x="{n(x)}" y="{n(y)}" width="{n(w)}" height="{n(h)}" rx="{n(radius)}"'
        f' fill="{fill}" stroke="{stroke}" stroke-width="{n(width)}"{dashed}/>'
    )


def tag(x, y, w, words, fill, *, h=34) -> str:
    """A filled, rounded label with its middle at height y."""
    return box(x, y - h / 2, w, h, fill=fill, stroke=fill, radius=h / 2) + label(
        x + w / 2, y, words, color=text_color(fill), bold=True
    )


def line(points, *, color=INK, width=2.0, dash="") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    path = " ".join(f"{n(x)},{n(y)}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{n(width)}"{dashed}/>'


def arrows(ends, color, width=3.0, *, heads=True) -> str:
    """Arrows from one sender, left to right in soft curves: (x0, y0, x1, y1) for each.

    A white edge keeps them apart from arrows that they cross, but not from each other: they may fork from one point.
    """
    length, half = (6 + 2.2 * width, 3 + 1.3 * width) if heads else (0, 0)
    curve = points = ""
    for x0, y0, x1, y1 in ends:
        stop = x1 - length + bool(heads)  # the line ends a little inside the head
        bend = 0.5 * (stop - x0)
        curve += f"M{n(x0)} {n(y0)}C{n(x0 + bend)} {n(y0)} {n(stop - bend)} {n(y1)} {n(stop)} {n(y1)}"
        points += f"M{n(x1)} {n(y1)}l{n(-length)} {n(-half)}v{n(2 * half)}z"
    return (
        f'<path d="{curve}" fill="none" stroke="{PAPER}" stroke-width="{n(width + 4)}"/>'
        f'<path d="{curve}" fill="none" stroke="{color}" stroke-width="{n(width)}"/>'
    ) + (f'<path d="{points}" fill="{color}"/>' if heads else "")


def plus(x, y, radius=23) -> str:
    """The place where a sum is made."""
    arm = 0.5 * radius
    return (
        f'<circle cx="{n(x)}" cy="{n(y)}" r="{n(radius)}" fill="{PAPER}" stroke="{INK}" stroke-width="3"/>'
        f'<path d="M{n(x - arm)} {n(y)}h{n(2 * arm)}M{n(x)} {n(y - arm)}v{n(2 * arm)}"'
        f' stroke="{INK}" stroke-width="4"/>'
    )
