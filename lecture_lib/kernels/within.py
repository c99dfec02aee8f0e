"""Kernels inside one GPU: what they load and store, and how tiles and fusion make that less.

A kernel is launched as a grid of programs that know only their number. Each loads a block of elements into registers,
computes, and stores a block. Memory is far away: the bytes that cross the way to it decide how long most kernels take
(Williams, Waterman, Patterson 2009, "Roofline"). So beside each kernel stands a formula for its bytes, ``*_traffic``,
and ``count_traffic()`` of traffic.py counts them while the kernel runs interpreted. Both agree exactly.
"""

import torch

from lecture_lib.kernels.language import INTERPRETED, check_devices, tl, triton
from lecture_lib.kernels.traffic import Traffic

BLOCK_BYTES = 16384  # what one program of an elementwise kernel loads
LINE_BYTES = 128  # what the memory of a GPU delivers at once; a step of matmul takes as much from each row
TILES = (16, 32, 64, 128)  # a GPU's matrix units want 16 at least, and two tiles of 256 do not fit into shared memory
ROWS_TOGETHER = 4096  # elements; a program of softmax takes several rows if they are short
LONGEST_ROW = 65536  # elements of a softmax row, which one program holds in registers


# ---- one element at a time -------------------------------------------------------------------------------------------


@triton.jit
def _copy(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,), this program's elements
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def _gelu_of(x):
    return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))  # x / 2 (1 + erf(x / sqrt 2))


@triton.jit
def _gelu(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    value = tl.load(x + i, mask=i < n).to(tl.float32)
    tl.store(out + i, _gelu_of(value), mask=i < n)


def copy(x: torch.Tensor) -> torch.Tensor:
    """A copy of ``x``, any shape and dtype: the kernel that does nothing but move bytes.

    Moves ``copy_traffic(x.numel(), x.element_size())``: every byte once in, once out. Raises ValueError if ``x`` is not
    contiguous or not where kernels run.
    """
    return _elementwise(_copy, x)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU of each element of ``x``, any shape, float32, float16 or bfloat16; computed in float32 with the exact erf.

    Moves ``gelu_traffic(x.numel(), x.element_size())``, as much as a copy: the arithmetic hides behind the memory.
    Hendrycks, Gimpel 2016, "Gaussian Error Linear Units", section 2. Raises as ``copy`` does, TypeError for the dtype.
    """
    _check_float(x)
    return _elementwise(_gelu, x)


def copy_traffic(elements: int, itemsize: int) -> Traffic:
    """Bytes that ``copy`` moves."""
    return Traffic(loaded=elements * itemsize, stored=elements * itemsize)


gelu_traffic = copy_traffic


def _elementwise(kernel, x: torch.Tensor) -> torch.Tensor:
    check_devices(x)
    _check_contiguous(x)
    out = torch.empty_like(x)
    block = BLOCK_BYTES // triton.next_power_of_2(x.element_size())
    kernel[(triton.cdiv(x.numel(), block),)](x, out, x.numel(), BLOCK=block, num_warps=8)
    return out


# ---- one row at a time -----------------------------------------------------------------------------------------------


@triton.jit
def _softmax(x, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]  # (ROWS, 1)
    column = tl.arange(0, COLUMNS)[None, :]  # (1, COLUMNS), at least as many as there are
    i = row.to(tl.int64) * columns + column  # (ROWS, COLUMNS)
    inside = (row < rows) & (column < columns)
    nothing = tl.where(
        row < rows, -float("inf"), 0.0
    )  # (ROWS, 1), adds no power to a row; a row that is not there is 0
    block = tl.load(x + i, mask=inside, other=nothing).to(tl.float32)
    # Less the largest of its row, no element exceeds 0 and no power 1, so nothing overflows.
    powers = tl.exp(block - tl.max(block, axis=1, keep_dims=True))
    tl.store(out + i, powers / tl.sum(powers, axis=1, keep_dims=True), mask=inside)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension of ``x`` (rows, columns), float32, float16 or bfloat16, in one pass.

    A program keeps its rows in registers, so each is loaded once and stored once:
    ``softmax_traffic(rows, columns, itemsize)``. Written as five PyTorch operations it would cross memory eight times.
    Raises ValueError for more than 65536 columns, which registers do not hold (longer rows need the online softmax:
    Milakov, Gimelshein 2018, section 3), for another number of dimensions, and as ``copy`` does; TypeError for the
    dtype.
    """
    check_devices(x)
    _check_float(x)
    _check_contiguous(x)
    if x.dim() != 2 or not 0 < x.shape[1] <= LONGEST_ROW:
        raise ValueError(
            f"softmax takes a tensor (rows, columns) with 1 to {LONGEST_ROW} columns and got {tuple(x.shape)}: "
            "reshape it to that first."
        )
    rows, columns = x.shape
    out = torch.empty_like(x)
    width = triton.next_power_of_2(columns)
    height = max(1, ROWS_TOGETHER // width)
    warps = min(32, max(4, width // 512))
    _softmax[(triton.cdiv(rows, height),)](x, out, rows, columns, ROWS=height, COLUMNS=width, num_warps=warps)
    return out


def softmax_traffic(rows: int, columns: int, itemsize: int) -> Traffic:
    """Bytes that ``softmax`` moves: each element once in, once out."""
    return copy_traffic(rows * columns, itemsize)


def softmax_in_steps_traffic(rows: int, columns: int, itemsize: int) -> Traffic:
    """Bytes of the same softmax as five operations, each of which loads its input and stores its result:
    max over the row, subtract it, exp, sum over the row, divide by it."""
    n = rows * columns
    loaded = n + (n + rows) + n + n + (n + rows)
    stored = rows + n + n + rows + n
    return Traffic(loaded=loaded * itemsize, stored=stored * itemsize)


# ---- one tile at a time ----------------------------------------------------------------------------------------------


@triton.jit
def _matmul(
    x, w, out, M, N, K, tile_rows, tile_columns, x_row, x_column, w_row, w_column,
    TILE: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    # Which tile of the result this program computes. GROUP rows of tiles are done column by column, so that programs
    # that run at the same time want the same tiles of x and w, and the L2 cache has them, as in Triton's tutorial on
    # matrix multiplication. It changes no byte asked for.
    group = tl.program_id(0) // (GROUP * tile_columns)
    place = tl.program_id(0) % (GROUP * tile_columns)
    height = min(tile_rows - group * GROUP, GROUP)
    m = (group * GROUP + place % height) * TILE + tl.arange(0, TILE)  # (TILE,), rows of x and of the result
    n = (place // height) * TILE + tl.arange(0, TILE)  # (TILE,), columns of w and of the result
    k = tl.arange(0, STEP)  # (STEP,)
    x_tile = x + m[:, None].to(tl.int64) * x_row + k[None, :] * x_column  # (TILE, STEP), addresses
    w_tile = w + k[:, None] * w_row + n[None, :].to(tl.int64) * w_column  # (STEP, TILE)
    in_rows = m[:, None] < M
    in_columns = n[None, :] < N

    total = tl.full((TILE, TILE), 0.0, tl.float32)  # stays in registers until all of K is done
    for start in range(0, K, STEP):
        # What lies outside of x and w is 0, and is not loaded.
        x_block = tl.load(x_tile, mask=in_rows & (k[None, :] < K - start), other=0.0)
        w_block = tl.load(w_tile, mask=in_columns & (k[:, None] < K - start), other=0.0)
        total = tl.dot(x_block, w_block, total, input_precision="ieee")
        x_tile += STEP * x_column
        w_tile += STEP * w_row

    if GELU:
        total = _gelu_of(total)  # the epilogue: the result is in registers anyway
    tl.store(out + m[:, None].to(tl.int64) * N + n[None, :], total, mask=in_rows & in_columns)


def matmul(x: torch.Tensor, w: torch.Tensor, tile: int = 128) -> torch.Tensor:
    """``x @ w`` with x (m, k) and w (k, n), float32, float16 or bfloat16, any strides; sums in float32.

    Each program computes one (tile, tile) square of the result: it loads ``tile`` rows of x and ``tile`` columns of w,
    and uses each loaded element ``tile`` times. So the bytes loaded fall as 1 / tile: ``matmul_traffic``.
    Hwu, Kirk, El Hajj 2022, "Programming Massively Parallel Processors", section 5.3.

    Raises ValueError for shapes that do not match, a tile that is not 16, 32, 64 or 128, or tensors not where kernels
    run; TypeError for the dtype.
    """
    return _tiled(x, w, tile, epilogue=False)


def matmul_gelu(x: torch.Tensor, w: torch.Tensor, tile: int = 128) -> torch.Tensor:
    """``gelu(x @ w)`` in one kernel, x (m, k) and w (k, n): GELU is applied to the tile while it is in registers.

    Moves ``matmul_gelu_traffic``, the same as ``matmul`` alone. The pair ``gelu(matmul(x, w))`` stores the product,
    loads it again and stores it again: 2 m n elements more. Raises as ``matmul`` does.
    """
    return _tiled(x, w, tile, epilogue=True)


def matmul_traffic(m: int, n: int, k: int, tile: int, itemsize: int) -> Traffic:
    """Bytes that ``matmul`` moves, (m, k) times (k, n).

    The result has ceil(m / tile) rows and ceil(n / tile) columns of tiles. Every column of tiles loads all of x, every
    row of tiles all of w; the result is stored once.
    """
    loaded = m * k * triton.cdiv(n, tile) + k * n * triton.cdiv(m, tile)
    return Traffic(loaded=loaded * itemsize, stored=m * n * itemsize)


matmul_gelu_traffic = matmul_traffic


def _tiled(x: torch.Tensor, w: torch.Tensor, tile: int, epilogue: bool) -> torch.Tensor:
    check_devices(x, w)
    _check_float(x)
    if x.dtype != w.dtype:
        raise TypeError(f"matmul needs two tensors of one dtype and got {x.dtype} and {w.dtype}: convert one.")
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[0]:
        raise ValueError(f"matmul needs (m, k) and (k, n) and got {tuple(x.shape)} and {tuple(w.shape)}.")
    if tile not in TILES:
        raise ValueError(f"tile is {tile!r} and must be one of {', '.join(map(str, TILES))}.")
    (m, k), n = x.shape, w.shape[1]
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    rows, columns = triton.cdiv(m, tile), triton.cdiv(n, tile)
    # Interpreted, each operation takes as long for 1 element as for 1000: few, large steps. No byte more or less moves.
    step = min(512, max(16, triton.next_power_of_2(k))) if INTERPRETED else LINE_BYTES // x.element_size()
    _matmul[(rows * columns,)](
        x, w, out, m, n, k, rows, columns, *x.stride(), *w.stride(),
        TILE=tile, STEP=step, GROUP=8, GELU=epilogue, num_warps=8 if tile == 128 else 4,
        num_stages=3,
    )  # fmt: skip
    return out


# ---- bad input -------------------------------------------------------------------------------------------------------


def _check_float(x: torch.Tensor) -> None:
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"this kernel takes float32, float16 or bfloat16 and got {x.dtype}: convert it first.")


def _check_contiguous(x: torch.Tensor) -> None:
    if not x.is_contiguous():
        raise ValueError(
            f"this kernel needs a contiguous tensor, and one of shape {tuple(x.shape)} has strides {x.stride()}: "
            "call .contiguous() on it first, which copies it."
        )
