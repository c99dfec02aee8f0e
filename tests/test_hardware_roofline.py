"""FLOP and bytes of operations against what one counts by hand, and the shape of the roof."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lecture_lib.hardware import (
    Operation,
    Peaks,
    attainable,
    attention,
    bound,
    gelu,
    get,
    layer_norm,
    matmul,
    measured_peaks,
    ridge,
    roof,
    seconds,
    softmax,
)
from lecture_lib.hardware.roofline import table

TOY = Peaks("toy", memory_bandwidth=10.0, flops={"bf16": 1000.0, "fp32": 100.0})  # ridges at 100 and at 10 FLOP/byte


def counts(operation: Operation) -> tuple:
    return operation.flops, operation.bytes


def test_by_hand():
    # 2 x 3 times 3 x 4: 8 results of 3 multiplications and 3 additions; 6 + 12 + 8 numbers of 2 bytes.
    assert counts(matmul(2, 4, 3)) == (2 * 4 * 6, 26 * 2)
    assert counts(matmul(2, 4, 3, "fp32")) == (48, 26 * 4)
    assert counts(gelu(10)) == (90, 40)
    assert counts(softmax(2, 8, "fp32")) == (80, 128)
    # 2 rows of 8: 7 each and 5 a row; 16 numbers read and written, 8 weights, 8 biases.
    assert counts(layer_norm(2, 8)) == (112 + 10, (32 + 16) * 2)
    # One head, 4 queries, 4 keys, 2 numbers each: 16 scores of 2 FLOP x 2, softmax 5, and 2 x 2 for the result.
    assert counts(attention(1, 1, 4, 4, 2)) == (16 * (4 + 5 + 4), 4 * (4 * 2) * 2)
    # Causal: 1 + 2 + 3 + 4 = 10 scores.
    assert counts(attention(1, 1, 4, 4, 2, causal=True)) == (10 * 13, 64)
    # Unfused: the 16 scores are written, read, written as probabilities, read.
    assert counts(attention(1, 1, 4, 4, 2, fused=False)) == (16 * 13, 64 + 4 * 16 * 2)
    # Two queries at the end of 4 keys see 3 and 4; 6 heads share 2 heads of keys.
    grouped = attention(3, 6, 2, 4, 2, kv_heads=2, causal=True)
    assert counts(grouped) == (3 * 6 * 7 * 13, (2 * 3 * 6 * 2 * 2 + 2 * 3 * 2 * 4 * 2) * 2)


def test_square_matmul_has_a_third_of_n():
    # 2 n^3 / (3 n^2 x 2 bytes)
    assert matmul(3000, 3000, 3000).intensity == 1000


def test_attainable_by_hand():
    assert attainable(Operation("copy", 50, 100), TOY) == 5  # half a FLOP a byte, 10 bytes a second
    assert attainable(Operation("busy", 1e6, 1), TOY) == 1000
    assert attainable(Operation("busy", 1e6, 1, "fp32"), TOY) == 100
    assert seconds(Operation("copy", 50, 100), TOY) == 10
    assert (ridge(TOY), ridge(TOY, "fp32")) == (100, 10)
    assert bound(Operation("x", 99, 1), TOY) == "memory" and bound(Operation("x", 100, 1), TOY) == "compute"


def test_on_an_h100():
    assert ridge("H100") == pytest.approx(295.3, abs=0.1)
    big = matmul(4096, 4096, 4096)
    assert attainable(big, "H100") == attainable(big, get("H100")) == 989.4e12
    assert bound(gelu(2**24), "H100") == "memory"
    assert attainable(gelu(2**24), "H100") == pytest.approx(2.25 * 3.35e12)
    assert bound(matmul(1, 4096, 4096), "H100") == "memory"


def test_table_of_operations():
    lines = table([matmul(4096, 4096, 4096), gelu(2**24)], "H100").splitlines()
    assert len(lines) == 3 and lines[0].startswith("on H100")
    assert "989.4 TFLOP/s" in lines[1] and lines[1].endswith("compute")
    assert "7.5 TFLOP/s" in lines[2] and lines[2].endswith("memory")


positive = st.floats(1e-3, 1e18)
dims = st.integers(1, 10**5)


@given(positive, positive, positive, positive)
def test_roof_rises_and_then_is_flat(x, y, peak, bandwidth):
    machine = Peaks("any", bandwidth, {"bf16": peak})
    low, high = sorted((x, y))
    assert roof(low, machine) <= roof(high, machine) <= peak
    assert roof(x, machine) <= x * bandwidth
    assert roof(x, machine) in (peak, x * bandwidth)


@given(positive, positive, positive, positive)
def test_time_is_the_longer_of_computing_and_moving(flops, nbytes, peak, bandwidth):
    operation, machine = Operation("any", flops, nbytes), Peaks("any", bandwidth, {"bf16": peak})
    assert seconds(operation, machine) == pytest.approx(max(flops / peak, nbytes / bandwidth))


@given(dims, dims, dims)
def test_matmul_has_symmetries(m, n, k):
    assert counts(matmul(m, n, k)) == counts(matmul(n, m, k))
    assert counts(matmul(m, n, k))[1] == counts(matmul(n, k, m))[1]  # the same three matrices move, in other roles
    assert matmul(m, n, k, "fp32").bytes == 2 * matmul(m, n, k).bytes
    assert matmul(2 * m, n, k).intensity > matmul(m, n, k).intensity  # more rows for the same weights


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 500), st.integers(0, 500), st.integers(1, 256))
def test_attention_saves(batch, heads, queries, more, head_dim):
    shape = (batch, heads, queries, queries + more, head_dim)
    full, causal = attention(*shape), attention(*shape, causal=True)
    assert full.flops / 2 <= causal.flops <= full.flops and causal.bytes == full.bytes
    assert attention(*shape, fused=False).bytes > full.bytes
    assert attention(*shape, kv_heads=1).bytes <= full.bytes


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        (lambda: matmul(0, 1, 1), "m must be a whole number of at least 1, and is 0"),
        (lambda: matmul(4, 2.5, 1), "n must be a whole number of at least 1, and is 2.5"),
        (lambda: gelu(4, "int8"), "no figures for the number type int8; use one of fp32, tf32, bf16, fp16, fp8"),
        (lambda: attention(1, 6, 4, 4, 8, kv_heads=4), "heads must be a multiple of kv_heads, and 6 is none of 4"),
        (lambda: attention(1, 1, 5, 4, 8, causal=True), "at least as many keys as queries, and has 4 for 5"),
        (lambda: attainable(gelu(4, "fp8"), TOY), r"fp8 was not measured here; call measured_peaks\(dtypes=\('fp8',\)"),
        (lambda: measured_peaks(("fp8",), "cpu"), "torch.matmul does not multiply fp8; measure one of fp32"),
    ],
)
def test_what_cannot_be_is_said(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        wrong()


def test_peaks_of_this_machine():
    peaks = measured_peaks(device="cpu")
    assert peaks.memory_bandwidth > 0 and set(peaks.flops) == {"fp32"}
    assert attainable(matmul(64, 64, 64, "fp32"), peaks) <= peaks.peak("fp32")
