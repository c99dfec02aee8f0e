"""What goes to the ranks and what comes back: by value, whole, and of the right class."""

import dataclasses
import enum
import importlib
import sys
import threading
import warnings
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from lecture_lib import RankError, World
from lecture_lib.launch import wire

COUNTER = 0
CUDA = [f"cuda:{i}" for i in range(torch.cuda.device_count())]


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Point:
    x: int
    colour: Colour = Colour.RED

    def doubled(self):
        return Point(2 * self.x, self.colour)


def test_every_rank_runs_and_results_come_by_rank(world):
    assert world.run(lambda factor, offset=0: dist.get_rank() * factor + offset, 10, offset=1) == [1, 11, 21, 31]


def test_collectives_really_travel(world):
    def total():
        x = torch.arange(4.0) + dist.get_rank()
        dist.all_reduce(x)
        return x

    for out in world.run(total):
        assert out.tolist() == [6.0, 10.0, 14.0, 18.0]


def test_closures_lambdas_and_module_state_travel(world):
    global COUNTER
    base = [1, 2]

    def outer():
        return [b + COUNTER + dist.get_rank() for b in base]

    COUNTER = 5
    assert world.run(outer)[3] == [9, 10]
    COUNTER = 7  # the value at the time of the call, not of the definition
    assert world.run(outer)[0] == [8, 9]
    assert world.run(lambda f: f(2), lambda x: x * 3) == [6] * 4


def test_instances_come_back_as_instances_of_the_callers_class(world):
    def make():
        return {"point": Point(dist.get_rank(), Colour.BLUE).doubled(), "colour": Colour.RED}

    outs = world.run(make)
    assert all(isinstance(out["point"], Point) for out in outs)
    assert outs[3]["point"] == Point(6, Colour.BLUE)
    assert outs[0]["colour"] is Colour.RED
    assert Point(1).doubled() == Point(2), "the caller's class still works after the round trip"


def test_a_class_that_is_defined_again_is_the_new_one(world):
    def define(value):
        class Model:
            def forward(self):
                return value

        return Model

    for value in (1, 2):
        model = define(value)
        outs = world.run(lambda model=model: (model(), model().forward()))
        assert all(isinstance(out, model) and number == value for out, number in outs)


def test_a_local_module_that_was_edited_is_new_after_restart(tmp_path, monkeypatch):
    (tmp_path / "helpers_of_mine.py").write_text("def answer():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    helpers = importlib.import_module("helpers_of_mine")
    try:
        with World(1) as world:
            assert world.run(helpers.answer) == [1]
            (tmp_path / "helpers_of_mine.py").write_text("def answer():\n    return 'edited'\n")
            world.restart()
            assert world.run(helpers.answer) == ["edited"]
    finally:
        del sys.modules["helpers_of_mine"]


def test_tensors_that_require_grad_come_back_detached(world):
    def loss():
        w = torch.ones(3, requires_grad=True)
        return (w * 2).sum(), w, torch.nn.Parameter(torch.ones(2))

    value, leaf, parameter = world.run(loss)[1]
    assert not value.requires_grad and not leaf.requires_grad and value.item() == 6
    assert isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad


def test_a_leaf_that_requires_grad_still_does_in_the_ranks(world):
    w = torch.ones(3, requires_grad=True)
    assert world.run(lambda w: (w * w).sum().backward() or w.grad.tolist(), w)[2] == [2.0, 2.0, 2.0]


def test_modules_travel_both_ways_with_tied_weights(world):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    out = world.run(lambda model: model, model)[0]
    assert out[0].weight is out[1].weight
    assert len(list(out.parameters())) == 3
    assert torch.equal(out[0].weight, model[0].weight)


def test_dtensors_come_back_as_local_shards(world):
    def shard():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (4,))
        return distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])

    assert [out.tolist() for out in world.run(shard)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.skipif(not CUDA, reason="this machine has no GPU")
def test_cuda_tensors_come_back_on_cpu():
    with World(1, device="cuda:0") as world:
        assert world.run(lambda: torch.ones(3, device="cuda:0"))[0].device.type == "cpu"


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=4), st.sampled_from([*DTYPES, torch.complex64]), st.booleans())
def test_any_tensor_survives_the_wire(shape, dtype, transpose):
    tensor = (torch.rand(shape) * 9).to(dtype)
    tensor = tensor.transpose(0, -1) if transpose and tensor.dim() > 1 else tensor
    back = wire.unpack(wire.pack(tensor))
    assert back.dtype == dtype and back.shape == tensor.shape and torch.equal(back, tensor)


def test_a_slice_travels_without_the_rest_of_its_storage():
    assert wire.size(wire.pack(torch.zeros(1_000_000)[:10])) < 2_000


def test_numpy_arrays_and_sparse_tensors_travel(world):
    sparse = torch.eye(3).to_sparse()
    array, back = world.run(lambda s: (np.arange(5) * dist.get_rank(), s), sparse)[2]
    assert array.tolist() == [0, 2, 4, 6, 8]
    assert torch.equal(back.to_dense(), torch.eye(3))


def test_more_bytes_come_back_than_31_bits_can_count():
    with World(1) as world:
        (out,) = world.run(lambda: torch.full((2**31 + 1,), 7, dtype=torch.uint8))
    assert out.numel() == 2**31 + 1 and out[0] == out[-1] == 7


def test_what_cannot_come_back_is_named_and_the_world_stays(world):
    pids = world.pids
    with pytest.raises(RankError, match=r"rank 2 returned a dict whose item \['lock'\] is of type lock") as error:
        world.run(lambda: {"lock": threading.Lock()} if dist.get_rank() == 2 else 1)
    assert error.value.rank == 2
    assert world.pids == pids and world.run(lambda: 1) == [1] * 4


@dataclasses.dataclass(slots=True)
class Slotted:
    x: int


class Named(NamedTuple):
    x: int

    @property
    def doubled(self):
        return 2 * self.x


@pytest.mark.parametrize("kind", [Slotted, Named])
def test_instances_with_slots_come_back(world, kind):
    out = world.run(lambda: kind(dist.get_rank()))
    assert out == [kind(i) for i in range(4)] and type(out[0]) is kind
    assert kind is Slotted or out[3].doubled == 6


class NeedsTwo(Exception):
    def __init__(self, a, b):
        super().__init__(a)


def test_a_result_that_cannot_be_rebuilt_names_rank_and_type_and_costs_nothing(world):
    def makes():
        return NeedsTwo(1, 2) if dist.get_rank() == 2 else None

    pids = world.pids
    with pytest.raises(
        RankError, match="rank 2 returned an object of type NeedsTwo, which the notebook cannot rebuild"
    ):
        world.run(makes)
    with pytest.raises(RankError, match="cannot rebuild .EOFError"):
        world.run(lambda: RaisesWhenRead())
    assert world.pids == pids and world.run(dist.get_rank) == [0, 1, 2, 3]


class RaisesWhenRead:
    def __reduce__(self):
        return _raise_eof, ()


def _raise_eof():
    raise EOFError("no more")


def test_what_cannot_be_sent_is_named(world):
    lock = threading.Lock()

    def locked():
        with lock:
            return 1

    with pytest.raises(TypeError, match="cannot send locked to the ranks because of 'lock', a lock"):
        world.run(locked)
    with pytest.raises(TypeError, match="argument 0"):
        world.run(lambda x: x, lock)
    with pytest.raises(TypeError, match="needs a function and got 3 of type int"):
        world.run(3)
    assert world.run(lambda: 1) == [1] * 4


def test_a_heavy_closure_says_so_and_an_argument_does_not():
    table = torch.zeros(17 * 2**20)
    with World(1) as world:
        with pytest.warns(UserWarning, match=r"<lambda> carries 68 MiB to every rank, most of it in 'table'"):
            assert world.run(lambda: table.sum().item()) == [0.0]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert world.run(lambda t: t.numel(), table) == [17 * 2**20]


def test_an_exception_of_the_persons_own_class_arrives_as_that_class(world):
    class TooBig(Exception):
        pass

    class Demanding(Exception):
        def __init__(self, a, b):
            super().__init__(f"{a} and {b}")

    def fail(kind):
        raise kind

    with pytest.raises(RankError, match="TooBig: by 3") as error:
        world.run(fail, TooBig("by 3"))
    assert isinstance(error.value.exception, TooBig)

    def fail_hard():
        raise Demanding(1, 2)

    with pytest.raises(RankError, match="Demanding: 1 and 2"):  # its pickle cannot be loaded; the message is there
        world.run(fail_hard)
