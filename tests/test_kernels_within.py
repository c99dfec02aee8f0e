"""Kernels inside one GPU: the right numbers, and exactly the bytes that their formulas say."""

import os
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lecture_lib import World
from lecture_lib.kernels import (
    Traffic,
    copy,
    copy_traffic,
    count_traffic,
    gelu,
    gelu_traffic,
    matmul,
    matmul_gelu,
    matmul_gelu_traffic,
    matmul_traffic,
    softmax,
    softmax_in_steps_traffic,
    softmax_traffic,
)
from lecture_lib.kernels.language import INSTALLED, INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(not INSTALLED, reason="Triton exists on Linux only")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="a GPU does not tell what it loads")

FLOATS = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
SIZES = st.integers(1, 70)
fast = settings(max_examples=12, deadline=None)


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)


def close(ours, reference):
    """Equal up to the last bit or two of the dtype: sums are in another order."""
    digits = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[ours.dtype]
    scale = max(1.0, reference.abs().max().item())
    return torch.allclose(ours.double(), reference, rtol=digits, atol=digits * scale)


# ---- bytes -----------------------------------------------------------------------------------------------------------


@interpreted
@fast
@given(SIZES, SIZES, SIZES, st.sampled_from([16, 32, 64, 128]), FLOATS)
def test_matmul_moves_what_its_formula_says(m, n, k, tile, dtype):
    x, w = random(m, k, dtype=dtype), random(k, n, dtype=dtype)
    with count_traffic() as traffic:
        matmul(x, w, tile)
    assert traffic == matmul_traffic(m, n, k, tile, dtype.itemsize)


@interpreted
@fast
@given(SIZES, SIZES, FLOATS)
def test_other_kernels_move_what_their_formulas_say(rows, columns, dtype):
    x = random(rows, columns, dtype=dtype)
    for kernel, expected in (
        (copy, copy_traffic(rows * columns, dtype.itemsize)),
        (gelu, gelu_traffic(rows * columns, dtype.itemsize)),
        (softmax, softmax_traffic(rows, columns, dtype.itemsize)),
    ):
        with count_traffic() as traffic:
            kernel(x)
        assert traffic == expected, kernel


@interpreted
def test_traffic_falls_as_the_tile_grows():
    x, w = random(128, 128), random(128, 128)
    loaded = {}
    for tile in (16, 32, 64, 128):
        with count_traffic() as traffic:
            matmul(x, w, tile)
        loaded[tile] = traffic.loaded
        assert traffic.stored == 128 * 128 * 4
    assert loaded == {16: 1_048_576, 32: 524_288, 64: 262_144, 128: 131_072}


@interpreted
def test_the_fused_kernel_saves_a_store_and_a_load_of_the_product():
    m, n, k = 40, 50, 60
    x, w = random(m, k), random(k, n)
    with count_traffic() as fused:
        matmul_gelu(x, w, tile=32)
    with count_traffic() as pair:
        gelu(matmul(x, w, tile=32))
    assert fused == matmul_gelu_traffic(m, n, k, 32, 4)
    assert pair == matmul_traffic(m, n, k, 32, 4) + gelu_traffic(m * n, 4)
    assert pair.total - fused.total == 2 * m * n * 4


def test_formulas_by_hand():
    # 2 x 3 tiles of 16: x is loaded 3 times, w twice.
    assert matmul_traffic(m=20, n=40, k=10, tile=16, itemsize=2) == Traffic(
        loaded=(3 * 20 * 10 + 2 * 10 * 40) * 2, stored=20 * 40 * 2
    )
    assert matmul_traffic(64, 64, 64, tile=1, itemsize=4).loaded == 2 * 64**3 * 4  # no tile: every product loads both
    assert softmax_in_steps_traffic(10, 100, 4) == Traffic(loaded=(5 * 1000 + 20) * 4, stored=(3 * 1000 + 20) * 4)
    assert softmax_in_steps_traffic(10, 100, 4).total > 4 * softmax_traffic(10, 100, 4).total - 100
    assert Traffic(1, 2) + Traffic(3, 4) == Traffic(4, 6)


@interpreted
def test_counting_ends_with_its_block_and_can_be_nested():
    x = random(100)
    with count_traffic() as outer:
        copy(x)
        with count_traffic() as inner:
            copy(x)
    copy(x)
    assert inner == copy_traffic(100, 4) and outer == copy_traffic(200, 4)
    with pytest.raises(ZeroDivisionError), count_traffic() as failed:
        raise ZeroDivisionError
    copy(x)
    assert failed.total == 0


@interpreted
def test_a_boolean_takes_a_byte():
    with count_traffic() as traffic:
        copy(torch.ones(100, dtype=torch.bool))
    assert traffic == copy_traffic(100, 1)


# ---- numbers ---------------------------------------------------------------------------------------------------------


@fast
@given(SIZES, SIZES, SIZES, st.sampled_from([16, 32, 64]), FLOATS)
def test_matmul_and_its_fused_twin(m, n, k, tile, dtype):
    x, w = random(m, k, dtype=dtype), random(k, n, dtype=dtype)
    product = x.double() @ w.double()
    assert close(matmul(x, w, tile), product)
    assert close(matmul_gelu(x, w, tile), F.gelu(product))


def test_matmul_takes_any_strides():
    x, w = random(50, 40), random(30, 50)
    assert close(matmul(x.T, w.T, 16), x.T.double() @ w.T.double())
    assert close(matmul(x[:, ::2], random(20, 7), 32), x[:, ::2].double() @ random(20, 7).double())


def test_more_rows_of_tiles_than_are_grouped():
    x, w = random(200, 20), random(20, 40)  # 13 rows of tiles, groups of 8
    assert close(matmul(x, w, 16), x.double() @ w.double())


def test_matmul_without_a_shared_dimension_is_zero():
    assert torch.equal(matmul(random(20, 0), random(0, 30), 16), torch.zeros(20, 30, device=DEVICE))


@fast
@given(SIZES, st.integers(1, 300), FLOATS)
def test_softmax_and_gelu(rows, columns, dtype):
    x = random(rows, columns, dtype=dtype)
    assert close(softmax(x), x.double().softmax(1))
    assert close(gelu(x), F.gelu(x.double()))


def test_softmax_of_large_and_of_masked_elements():
    x = torch.tensor([[1e30, 1e30, -float("inf")], [-1e30, 0.0, 1.0]], device=DEVICE)
    assert torch.equal(softmax(x)[0], torch.tensor([0.5, 0.5, 0.0], device=DEVICE))
    assert close(softmax(x), x.double().softmax(1))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (100_003,)])
def test_copy_of_any_shape_and_dtype(shape, dtype):
    x = torch.randint(0, 2, shape).to(DEVICE, dtype)
    y = copy(x)
    assert torch.equal(x, y) and y.data_ptr() != x.data_ptr() or x.numel() == 0


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_what_cannot_be_says_why():
    x = random(8, 9)
    with pytest.raises(ValueError, match=r"needs \(m, k\) and \(k, n\) and got \(8, 9\) and \(8, 9\)"):
        matmul(x, x)
    with pytest.raises(ValueError, match="tile is 24 and must be one of 16, 32, 64, 128"):
        matmul(x, x.T, tile=24)
    with pytest.raises(TypeError, match=r"one dtype and got torch.float32 and torch.float16"):
        matmul(x, x.T.half())
    with pytest.raises(TypeError, match="takes float32, float16 or bfloat16 and got torch.int64"):
        matmul_gelu(x.long(), x.long().T)
    with pytest.raises(ValueError, match=r"of shape \(9, 8\) has strides \(1, 9\): call .contiguous\(\)"):
        copy(x.T)
    with pytest.raises(ValueError, match=r"1 to 65536 columns and got \(3,\)"):
        softmax(random(3))
    with pytest.raises(ValueError, match=r"1 to 65536 columns and got \(1, 65537\)"):
        softmax(random(1, 65537))
    with pytest.raises(ValueError, match="kernels are (interpreted|compiled) here and need tensors on"):
        gelu(x.to("meta"))


# ---- importing -------------------------------------------------------------------------------------------------------


def test_without_triton_everything_imports_and_kernels_say_so():
    def on_a_mac():
        sys.modules["triton"] = None  # what `import triton` finds on macOS: nothing
        sys.platform = "darwin"
        from lecture_lib import kernels

        assert kernels.matmul_traffic(10, 10, 10, 16, 4).stored == 400
        try:
            kernels.matmul(torch.ones(2, 2), torch.ones(2, 2))
        except RuntimeError as error:
            return str(error)

    with World(1) as world:
        assert world.run(on_a_mac) == ["kernels need Triton, which exists on Linux only, and this is darwin."]


@interpreted
def test_a_rank_imports_nothing_that_draws_and_interprets_what_was_imported_for_compiling():
    def fresh():
        del os.environ["TRITON_INTERPRET"]
        import triton  # tl.max and tl.sum are decorated for a compiler now
        from triton.runtime.jit import JITFunction

        for_compiling = isinstance(triton.language.max, JITFunction)
        before = set(sys.modules)
        from lecture_lib.kernels import softmax

        loaded = set(sys.modules) - before
        return for_compiling, loaded & {"IPython", "matplotlib", "lecture_lib.figures"}, softmax(torch.zeros(1, 4))

    with World(1) as world:
        ((for_compiling, drawing, row),) = world.run(fresh)
    assert for_compiling and not drawing and row.tolist() == [[0.25] * 4]
