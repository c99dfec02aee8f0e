import sys

import cloudpickle
import comparing
import pytest

from lecture_lib import World

cloudpickle.register_pickle_by_value(comparing)  # the ranks do not find tests/


class Worlds(dict):
    """Worlds by their number of ranks, each started when it is first asked for."""

    def __missing__(self, size):
        self[size] = World(size, threads=1)
        return self[size]


@pytest.fixture(scope="module")
def worlds(request):
    """``worlds[n]``: n ranks for all tests of a module. Its functions travel by value, as a notebook's do."""
    cloudpickle.register_pickle_by_value(sys.modules[request.module.__name__])
    worlds = Worlds()
    yield worlds
    for world in worlds.values():
        world.close()


@pytest.fixture(scope="module")
def world(worlds):
    return worlds[4]


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def sized(request, worlds):
    """A world of each size from 1 to 4."""
    return worlds[request.param]
