"""Every benchmark, one after the other: python -m tests.bench"""

from tests.bench import hardware, kernels, launch, trace

for benchmark in (launch, trace, hardware, kernels):
    benchmark.main()
    print("\n")
