"""GELU of a product: two kernels with a trip to memory between them, or one."""

from .palette import INK, PALETTE, WASH
from .svg import Figure, box, figure, label, line

N, TILE = 128, 64
MEMORY, KERNEL, DEEP = 84, 230, 64


def fusion(name: str) -> Figure:
    from lecture_lib.kernels import gelu_traffic, matmul_gelu_traffic, matmul_traffic  # loads torch

    product, then = matmul_traffic(N, N, N, TILE, 4), gelu_traffic(N * N, 4)
    fused = matmul_gelu_traffic(N, N, N, TILE, 4)
    pair = product + then
    strokes = [
        label(268, 28, f"two kernels: {kib(pair.total)}", bold=True),
        label(740, 28, f"one kernel: {kib(fused.total)}", bold=True),
        box(16, MEMORY - 34, 504, 50, fill=WASH, radius=8),
        box(596, MEMORY - 34, 288, 50, fill=WASH, radius=8),
        label(268, MEMORY - 9, "memory"),
        label(740, MEMORY - 9, "memory"),
        *kernel(16, 238, "matmul"),
        *kernel(282, 238, "gelu"),
        *kernel(596, 288, "matmul, then gelu"),
        *load(56, "x, w", product.loaded),
        *store(170, "product", product.stored),
        *load(310, "product", then.loaded),
        *store(424, "result", then.stored),
        *load(640, "x, w", fused.loaded),
        *store(790, "result", fused.stored),
    ]
    text = (
        f"gelu(x @ w) for {N} by {N} numbers of 4 bytes, tiles of {TILE}; two kernels: matmul loads "
        f"{kib(product.loaded)} and stores {kib(product.stored)}, gelu loads {kib(then.loaded)} and stores "
        f"{kib(then.stored)}, together {kib(pair.total)}; one kernel: loads {kib(fused.loaded)}, stores "
        f"{kib(fused.stored)}, together {kib(fused.total)}."
    )
    return figure(name, "Fusion", text, 900, KERNEL + DEEP + 20, strokes)


def kib(nbytes: int) -> str:
    return f"{nbytes // 2**10} KiB"


def kernel(x: float, w: float, name: str) -> list[str]:
    return [box(x, KERNEL, w, DEEP, radius=8, width=3), label(x + w / 2, KERNEL + DEEP / 2, name, mono=True, bold=True)]


def load(x: float, what: str, nbytes: int) -> list[str]:
    return arrow(x, MEMORY + 18, KERNEL - 4, PALETTE[0], what, nbytes)


def store(x: float, what: str, nbytes: int) -> list[str]:
    return arrow(x, KERNEL - 2, MEMORY + 20, PALETTE[1], what, nbytes)


def arrow(x: float, start: float, end: float, color: str, what: str, nbytes: int) -> list[str]:
    """Straight up or down, with what it carries to its right. As thick as it carries much."""
    width = 4 + nbytes // 2**10 / 32
    sign = 1 if end > start else -1
    half = width / 2 + 7
    middle = (MEMORY + 16 + KERNEL) / 2
    return [
        line([(x, start), (x, end - sign * 14)], color=color, width=width),
        f'<path d="M{x:g} {end:g}l{-half:g} {-sign * 16:g}h{2 * half:g}z" fill="{color}"/>',
        label(x + 16, middle - 13, what, anchor="start", color=INK),
        label(x + 16, middle + 13, kib(nbytes), anchor="start", color=INK),
    ]
