"""A tiled matmul, at a small and a large tile: what one program loads, and what all load together."""

from .palette import FAINT, INK, PALETTE, PAPER, WASH
from .svg import Figure, box, figure, label, line

SIDE, GAP, LEFT = 136, 14, 56
N, TILES = 128, (16, 64)


def tiles(name: str) -> Figure:
    from lecture_lib.kernels import matmul_traffic  # loads torch, which only this picture needs

    strokes, words = [], []
    for left, tile in zip((LEFT, LEFT + 460), TILES):
        loaded = matmul_traffic(N, N, N, tile, 4).loaded // 2**10
        programs = (N // tile) ** 2
        strokes += panel(left, tile)
        strokes += [
            label(left + SIDE + GAP / 2, 28, f"tile {tile}", bold=True),
            label(left + SIDE + GAP / 2, 378, f"{programs} programs load {loaded:,} KiB", bold=True),
        ]
        words.append(f"with tiles of {tile}, {programs} programs load {loaded:,} KiB")
    text = (
        f"x times w, {N} by {N} numbers of 4 bytes each: a program computes one tile of the result and loads the rows "
        f"of x and the columns of w that it needs; {'; '.join(words)}."
    )
    return figure(name, "Tiles", text, 900, 402, strokes)


def panel(left: float, tile: int) -> list[str]:
    """x to the left of the result, w above it, so that a tile lies where its rows and columns cross."""
    top = 62
    right, low = left + SIDE + GAP, top + SIDE + GAP
    pixels = SIDE * tile / N
    row = low + pixels * (1 if tile < N // 2 else 0)  # the tile that is drawn
    column = right + pixels * (3 if tile < N // 4 else 1)
    strokes = [
        box(left, low, SIDE, SIDE, fill=WASH, radius=0),
        box(right, top, SIDE, SIDE, fill=WASH, radius=0),
        box(right, low, SIDE, SIDE, fill=PAPER, radius=0),
        box(left, row, SIDE, pixels, fill=PALETTE[0], stroke=PALETTE[0], radius=0),
        box(column, top, pixels, SIDE, fill=PALETTE[1], stroke=PALETTE[1], radius=0),
    ]
    for i in range(1, N // tile):
        strokes.append(line([(right + i * pixels, low), (right + i * pixels, low + SIDE)], color=FAINT, width=1))
        strokes.append(line([(right, low + i * pixels), (right + SIDE, low + i * pixels)], color=FAINT, width=1))
    strokes += [
        box(column, row, pixels, pixels, fill=INK, radius=0),
        label(left - 20, low + SIDE / 2, "x", mono=True, bold=True),
        label(right + SIDE + 20, top + SIDE / 2, "w", mono=True, bold=True),
        label(right + SIDE + 16, low + SIDE / 2, "x @ w", mono=True, bold=True, anchor="start"),
    ]
    return strokes
