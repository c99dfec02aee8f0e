"""Every benchmark, one after the other: python -m tests.bench"""

from tests.bench import (
    collectives,
    hardware,
    kernels,
    launch,
    parallel_context,
    parallel_data,
    parallel_pipeline,
    parallel_tensor,
    planner,
    trace,
    train,
)

for benchmark in (
    launch,
    trace,
    collectives,
    hardware,
    kernels,
    parallel_data,
    parallel_tensor,
    parallel_pipeline,
    parallel_context,
    train,
    planner,
):
    benchmark.main()
    print("\n")
