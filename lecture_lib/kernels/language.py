"""Triton: compiled where there is a GPU, interpreted where there is none. The one place that decides it.

A Triton kernel is Python source. On a GPU it is compiled; with TRITON_INTERPRET=1 the same source runs as Python, one
program of the grid after the other, on tensors in the CPU's memory. That is slow, and it is enough to see what a kernel
does, to count what it moves, and to test it on a machine without a GPU.

Every file with kernels takes its names from here:  from lecture_lib.kernels.language import tl, triton
"""

import os
import sys
import types

import torch

# Triton reads this when it is imported and when a kernel is decorated. A value that somebody has set stays.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheel for this system
    triton = None

INSTALLED = triton is not None
INTERPRETED = INSTALLED and triton.knobs.runtime.interpret

if not INSTALLED:  # enough to import the files with kernels; check_devices() refuses to run them
    triton = types.SimpleNamespace(jit=lambda function: function, cdiv=lambda x, y: -(-x // y))
    tl = types.SimpleNamespace(constexpr=object)


def _interpret_triton_itself() -> None:
    """Have tl.sum, tl.max and other functions that Triton has written in Triton interpreted too.

    Parts of torch import Triton, and if that was before the line above set the variable, these were decorated for a
    compiler that has no GPU to compile for.
    """
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for module in (tl.standard, tl):
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                same = vars(tl.standard).get(name)  # tl.sum is tl.standard.sum, and must stay the same object
                setattr(module, name, same if isinstance(same, InterpretedFunction) else InterpretedFunction(value.fn))


def _let_dot_take_bfloat16() -> None:
    """numpy has no bfloat16: the interpreter keeps its bits as integers, and tl.dot multiplies those. Widen first."""
    from triton.runtime.interpreter import interpreter_builder as interpreter

    dot = interpreter.create_dot

    def widened(x):
        return interpreter.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    interpreter.create_dot = lambda a, b, *rest: dot(widened(a), widened(b), *rest)


if INTERPRETED:
    _interpret_triton_itself()
    _let_dot_take_bfloat16()


def check_devices(*tensors: torch.Tensor) -> None:
    """Raise ValueError where kernels cannot reach the tensors, RuntimeError where there is no Triton."""
    if not INSTALLED:
        raise RuntimeError(f"kernels need Triton, which exists on Linux only, and this is {sys.platform}.")
    devices = sorted({str(tensor.device) for tensor in tensors})
    needed = "cpu" if INTERPRETED else "cuda"
    if len(devices) > 1:
        raise ValueError(f"this kernel got tensors on {' and '.join(devices)}: move all of them to one device.")
    if tensors[0].device.type != needed:
        if INTERPRETED:
            advice = "move them to the CPU, or unset TRITON_INTERPRET to have kernels compiled"
        else:
            advice = "move them to the GPU, or set TRITON_INTERPRET=1 before Python starts to have kernels interpreted"
        how = "interpreted" if INTERPRETED else "compiled"
        raise ValueError(
            f"kernels are {how} here and need tensors on {needed}, and these are on {devices[0]}: {advice}."
        )
