"""Every benchmark, one after the other: python -m tests.bench"""

from tests.bench import launch

launch.main()
