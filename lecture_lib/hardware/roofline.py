"""How fast an operation can be at best: what it computes, against what it has to move.

A machine computes at most ``peak`` FLOP per second and moves at most ``bandwidth`` bytes per second to and from its
memory. An operation with few FLOP per byte waits for the memory however fast the machine computes:

    attainable FLOP/s = min(peak, intensity x bandwidth)        intensity = FLOP / bytes

(Williams, Waterman, Patterson: Roofline, Communications of the ACM 52(4), 2009.)

How things are counted: an addition, multiplication, division, comparison, exponential, tanh or root is one FLOP. Bytes
are those that must cross at least once: every input read once, every output written once, nothing in between.
"""

import math
from dataclasses import dataclass

from lecture_lib.hardware import specs


@dataclass(frozen=True)
class Operation:
    """``flops`` operations on numbers of type ``dtype``, for which ``bytes`` cross between chip and memory."""

    name: str
    flops: float
    bytes: float
    dtype: str = "bf16"

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes


# ---- operations ------------------------------------------------------------------------------------------------------


def matmul(m: int, n: int, k: int, dtype="bf16") -> Operation:
    """(m, k) times (k, n).

    FLOP   2 m n k              a multiplication and an addition for each of k terms of m n results
    bytes  (m k + k n + m n) s  s bytes per number
    """
    _check(m=m, n=n, k=k)
    return _operation(f"matmul {m} x {k} x {n}", 2 * m * n * k, m * k + k * n + m * n, dtype)


def gelu(elements: int, dtype="bf16") -> Operation:
    """0.5 x (1 + tanh(a (x + b x^3))) of each element.

    FLOP   9 for each element   x x x is 2, times b, plus x, times a, tanh, plus 1, times x, times 0.5
    bytes  2 s for each element
    """
    _check(elements=elements)
    return _operation(f"GELU of {elements}", 9 * elements, 2 * elements, dtype)


def softmax(rows: int, columns: int, dtype="bf16") -> Operation:
    """Softmax of each row, in one pass over the memory.

    FLOP   5 for each element   compare for the maximum, subtract it, exponential, add to the sum, divide by it
    bytes  2 s for each element
    """
    _check(rows=rows, columns=columns)
    return _operation(f"softmax {rows} x {columns}", 5 * rows * columns, 2 * rows * columns, dtype)


def layer_norm(rows: int, columns: int, dtype="bf16") -> Operation:
    """Layer norm of each row with weight and bias, in one pass over the memory.

    FLOP   7 for each element   add to the mean, subtract it, square, add to the variance, divide, times weight, plus
                                bias
           5 for each row       divide for the mean and for the variance, plus epsilon, root, reciprocal
    bytes  2 s for each element, and 2 s for each column (weight and bias)
    """
    _check(rows=rows, columns=columns)
    flops = 7 * rows * columns + 5 * rows
    return _operation(f"layer norm {rows} x {columns}", flops, 2 * rows * columns + 2 * columns, dtype)


def attention(
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    head_dim: int,
    dtype="bf16",
    kv_heads: int | None = None,
    causal: bool = False,
    fused: bool = True,
) -> Operation:
    """softmax(Q K^T) V for each head. With ``causal``, a query sees the keys up to its own place, and the last query
    sees all. ``fused`` (FlashAttention) keeps the scores on the chip.

    p      batch heads queries keys pairs; with causal batch heads (queries keys - queries (queries - 1) / 2)
    FLOP   (4 head_dim + 5) p   2 head_dim for Q K^T, 2 head_dim for the product with V, 5 for softmax
    bytes  2 batch heads queries head_dim s    Q and the result
           2 batch kv_heads keys head_dim s    K and V
           4 p s, if not fused                 scores written, read by softmax, written, read by the product with V
    """
    kv_heads = heads if kv_heads is None else kv_heads
    _check(batch=batch, heads=heads, queries=queries, keys=keys, head_dim=head_dim, kv_heads=kv_heads)
    if causal and queries > keys:
        raise ValueError(f"causal attention needs at least as many keys as queries, and has {keys} for {queries}.")
    if heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads, and {heads} is none of {kv_heads}.")
    pairs = batch * heads * (queries * keys - (queries * (queries - 1) // 2 if causal else 0))
    numbers = 2 * batch * heads * queries * head_dim + 2 * batch * kv_heads * keys * head_dim
    name = f"attention {batch} x {heads} x {queries} x {keys} x {head_dim}"
    name += ", causal" * causal + ", unfused" * (not fused)
    return _operation(name, (4 * head_dim + 5) * pairs, numbers + (0 if fused else 4 * pairs), dtype)


def _operation(name: str, flops: int, numbers: int, dtype) -> Operation:
    short = specs.short_dtype(dtype)
    return Operation(name, flops, numbers * specs.DTYPE_BYTES[short], short)


def _check(**sizes) -> None:
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, and is {value!r}.")


# ---- machines --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peaks:
    """What was measured on a machine: ``memory_bandwidth`` in bytes/s, read and written bytes together; ``flops`` the
    FLOP/s of a large matmul by number type."""

    name: str
    memory_bandwidth: float
    flops: dict[str, float]

    def peak(self, dtype) -> float:
        """FLOP/s for a number type."""
        short = specs.short_dtype(dtype)
        if short not in self.flops:
            raise ValueError(f"{short} was not measured here; call measured_peaks(dtypes=({short!r},)).")
        return self.flops[short]


def measured_peaks(dtypes=("fp32",), device: str = "auto") -> Peaks:
    """Peaks of this machine, measured with torch and all its threads: a large matmul for each number type, and a large
    copy. Takes about half a second, more where a processor has no unit for a type. A GPU's fp32 is measured with its
    matrix units off, as in the datasheets."""
    import torch

    from lecture_lib.hardware.probe import _clock, _median

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "this CPU"
    n, nbytes, clock = (8192, 2**30, "cuda") if device.startswith("cuda") else (512, 2**27, "cpu")
    source = torch.ones(nbytes // 4, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * nbytes / _median(lambda: target.copy_(source), 0.15, _clock(clock))
    return Peaks(name, bandwidth, {specs.short_dtype(d): _matmul_rate(d, n, device, clock) for d in dtypes})


def _matmul_rate(dtype, n: int, device: str, clock: str) -> float:
    import torch

    from lecture_lib.hardware.probe import _clock, _median

    short = specs.short_dtype(dtype)
    types = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if short not in types:
        raise ValueError(f"torch.matmul does not multiply {short}; measure one of {', '.join(types)}.")
    a, b = (torch.randn(n, n, device=device, dtype=types[short]) for _ in range(2))
    out = torch.empty_like(a)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = short == "tf32"
    try:
        return 2 * n**3 / _median(lambda: torch.matmul(a, b, out=out), 0.15, _clock(clock))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


# ---- the roof --------------------------------------------------------------------------------------------------------
# A machine is a name ("H100"), an Accelerator, or Peaks.


def roof(intensity: float, machine, dtype="bf16") -> float:
    """The most FLOP/s at ``intensity`` FLOP per byte: min(peak, intensity x bandwidth)."""
    machine = _machine(machine)
    return min(machine.peak(dtype), intensity * machine.memory_bandwidth)


def attainable(operation: Operation, machine) -> float:
    """The most FLOP/s that ``machine`` can reach in ``operation``."""
    return roof(operation.intensity, machine, operation.dtype)


def seconds(operation: Operation, machine) -> float:
    """The least time that ``machine`` needs for ``operation``."""
    return operation.flops / attainable(operation, machine)


def ridge(machine, dtype="bf16") -> float:
    """FLOP per byte from which on computing, not moving, is the limit."""
    machine = _machine(machine)
    return machine.peak(dtype) / machine.memory_bandwidth


def bound(operation: Operation, machine) -> str:
    """ "memory" or "compute": what limits ``operation`` on ``machine``."""
    return "memory" if operation.intensity < ridge(machine, operation.dtype) else "compute"


def table(operations, machine) -> str:
    """A line of text for each operation: intensity, attainable rate, share of the peak, what limits it."""
    name = _machine(machine).name
    lines = [f"{'on ' + name:<44}{'FLOP/byte':>10}{'attainable':>18}{'of peak':>9}  limit"]
    for op in operations:
        best = attainable(op, machine)
        share = best / _machine(machine).peak(op.dtype)
        lines.append(f"{op.name:<44}{op.intensity:>10.4g}{_flops(best):>18}{share:>9.1%}  {bound(op, machine)}")
    return "\n".join(lines)


def _machine(machine):
    return specs.get(machine) if isinstance(machine, str) else machine


def _flops(rate: float) -> str:
    """12.3 TFLOP/s"""
    scale, unit = ((1e12, "T") if rate >= 1e12 else (1e9, "G")) if math.isfinite(rate) else (1, "")
    return f"{rate / scale:.1f} {unit}FLOP/s"
