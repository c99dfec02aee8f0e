"""Every benchmark, one after the other: python -m tests.bench"""

from tests.bench import collectives, hardware, kernels, launch, trace

for benchmark in (launch, trace, collectives, hardware, kernels):
    benchmark.main()
    print("\n")
