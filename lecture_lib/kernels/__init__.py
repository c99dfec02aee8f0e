"""Kernels: what moves inside one GPU, and between the memories of several.

Read in this order:

    language.py   Triton, compiled where there is a GPU and interpreted where there is none
    within.py     copy, GELU, softmax, matmul: tiles and fusion, and the bytes that they save
    traffic.py    those bytes, counted while a kernel runs
    symmetric.py  SymmetricBuffer: the same buffer on every rank, which all ranks can read and write
    barrier.py    how processes wait for each other
    agree.py      how an error on one rank becomes the same error on all
    between.py    all-reduce, all-gather, put and get as kernels over such buffers

SymmetricBuffer needs no Triton. Where there is none (macOS), kernels say so when they are called.
"""

from lecture_lib.kernels.between import all_gather, get, one_shot_all_reduce, put, signal, two_shot_all_reduce, wait
from lecture_lib.kernels.symmetric import SymmetricBuffer
from lecture_lib.kernels.traffic import Traffic, count_traffic
from lecture_lib.kernels.within import (
    copy,
    copy_traffic,
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

__all__ = [
    "SymmetricBuffer",
    "Traffic",
    "all_gather",
    "copy",
    "copy_traffic",
    "count_traffic",
    "gelu",
    "gelu_traffic",
    "get",
    "matmul",
    "matmul_gelu",
    "matmul_gelu_traffic",
    "matmul_traffic",
    "one_shot_all_reduce",
    "put",
    "signal",
    "softmax",
    "softmax_in_steps_traffic",
    "softmax_traffic",
    "two_shot_all_reduce",
    "wait",
]
