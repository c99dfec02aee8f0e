import sys

import cloudpickle
import pytest

from lecture_lib import World


@pytest.fixture(scope="module")
def world(request):
    """Four ranks for a module's tests. Its functions travel by value, as a notebook's do."""
    cloudpickle.register_pickle_by_value(sys.modules[request.module.__name__])
    with World(4, timeout=20) as world:
        yield world
