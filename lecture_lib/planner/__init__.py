"""A cluster that nobody in the room owns, on paper: does it fit, how long does a step take, which layout is best.

    from lecture_lib.planner import Cluster, Layout, estimate, preset
    e = estimate(preset("llama3-405b"), Cluster("H100", 16384), Layout(tp=8, pp=16, global_batch=2048, zero_stage=1))
    print(e.table())

Read in this order:

    model.py      a transformer: parameters and FLOP
    cluster.py    GPUs and what joins them
    layout.py     the axes of parallelism, the batch, the policies
    memory.py     bytes on the fullest rank, by part
    step.py       seconds of a step, by part
    estimate.py   both together: tokens/s, MFU, HFU, energy, cost
    search.py     all layouts: which fit, which is fastest, why the others are out
    failures.py   how often a job stops, and what that costs
    growth.py     ten times the GPUs; two sites
    published.py  runs that people published, read from published_runs.csv
    constants.py  what datasheets do not say, with what one would guess
    calibrate.py  the constants that explain the published runs, and the error on those left out

All of it is plain arithmetic: no GPU, no PyTorch; only calibrate.py needs SciPy. numbers.py makes numbers whole or
refuses them.
"""

from lecture_lib.planner.cluster import Cluster
from lecture_lib.planner.estimate import Estimate, estimate
from lecture_lib.planner.failures import Reliability, reliability
from lecture_lib.planner.growth import grow, two_sites
from lecture_lib.planner.layout import Layout
from lecture_lib.planner.model import PRESETS, Transformer, preset
from lecture_lib.planner.search import Plans, best

__all__ = [
    "PRESETS",
    "Cluster",
    "Estimate",
    "Layout",
    "Plans",
    "Reliability",
    "Transformer",
    "best",
    "estimate",
    "grow",
    "preset",
    "reliability",
    "two_sites",
]
