"""What the machines are made of, from the registers of a GPU to the network between nodes.

Read in this order:

    specs.py     what datasheets print: accelerators, networks, energy; each number with its source
    detect.py    what is in this machine, asked from the operating system, CUDA and NVML
    probe.py     how fast it is, measured: caches, memory, other processes, GPUs
    roofline.py  how fast an operation can be on a machine: computing against moving

echo.py is the other process of a measurement between two, chase.py the pointer chase that runs on a GPU.
"""

from lecture_lib.hardware.detect import Machine, detect
from lecture_lib.hardware.probe import probe
from lecture_lib.hardware.roofline import (
    Operation,
    Peaks,
    attainable,
    attention,
    bound,
    gelu,
    layer_norm,
    matmul,
    measured_peaks,
    ridge,
    roof,
    seconds,
    softmax,
)
from lecture_lib.hardware.specs import ACCELERATORS, ENERGY, NETWORKS, Accelerator, get, ladder

__all__ = [
    "ACCELERATORS",
    "ENERGY",
    "NETWORKS",
    "Accelerator",
    "Machine",
    "Operation",
    "Peaks",
    "attainable",
    "attention",
    "bound",
    "detect",
    "gelu",
    "get",
    "ladder",
    "layer_norm",
    "matmul",
    "measured_peaks",
    "probe",
    "ridge",
    "roof",
    "seconds",
    "softmax",
]
