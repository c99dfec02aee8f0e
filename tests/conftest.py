import sys

import cloudpickle
import comparing
import pytest

from lecture_lib import World

cloudpickle.register_pickle_by_value(comparing)  # the ranks do not find tests/


@pytest.fixture(scope="module")
def world(request):
    """Four ranks for a module's tests. Its functions travel by value, as a notebook's do."""
    cloudpickle.register_pickle_by_value(sys.modules[request.module.__name__])
    with World(4, timeout=20) as world:
        yield world


@pytest.fixture(scope="module")
def worlds(request):
    """Worlds of one to four ranks, by their size."""
    cloudpickle.register_pickle_by_value(sys.modules[request.module.__name__])
    worlds = {n: World(n, timeout=20, threads=1) for n in (1, 2, 3, 4)}
    yield worlds
    for world in worlds.values():
        world.close()


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def sized(request):
    """A world of each size from 1 to 4."""
    cloudpickle.register_pickle_by_value(sys.modules[request.module.__name__])
    with World(request.param, timeout=60, threads=1) as world:
        yield world
