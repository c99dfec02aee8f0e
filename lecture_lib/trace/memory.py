"""How many bytes of tensors a rank holds, by what they are: parameters, gradients, optimizer state, activations.

    with memory(module, optimizer) as held:
        loss = loss_of(module(x)); loss.backward(); optimizer.step(); optimizer.zero_grad()
    held.peak["gradients"]                      # the most that were there at any time

Counted, not sampled: after each operator of torch, the sizes of all tensors' storages that are alive. So the number is
the same on every run and every machine; it leaves out what an operator takes and gives back while it runs, and what the
allocator keeps in reserve. And what gloo's threads still hold of a collective that is over: before a count becomes the
most that there was, they are given the time to let go of it.
"""

import contextlib
import os
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

SETTLE_SECONDS = 1.0
KINDS = ("parameters", "gradients", "optimizer", "activations")


@dataclass
class Memory:
    """Bytes that one rank held in a block. Can be returned from it.

    peak:     the most of each kind at any time: "parameters" (with buffers; whole ones that were gathered for a while
              count too), "gradients" (and the buckets that they travel in), "optimizer" (its state), "activations" (all
              else that was made in the block)
    at_peak:  of each kind at the moment when their sum was greatest
    total:    that sum
    at_end:   of each kind when the block ended
    """

    peak: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    at_peak: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    at_end: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    @property
    def total(self) -> int:
        return sum(self.at_peak.values())


@contextlib.contextmanager
def memory(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[Memory]:
    """Count the bytes held by this rank in the block. Tensors that were there before and are none of the module's or
    the optimizer's (the data) are left out."""
    counter = _Counter(module, optimizer)
    with counter:
        yield counter.memory
    wait_for_gloo()
    counter.count()
    counter.memory.at_end = dict(counter._now)


class _Counter(TorchDispatchMode):
    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None):
        super().__init__()
        self.memory = Memory()
        self._optimizer = optimizer
        self._named = [named for m in module.modules() for named in (m._parameters, m._buffers) if named]
        self._alive: dict[int, weakref.ref] = {}  # storage -> itself, which ends when torch frees it
        self._kind: dict[int, str] = {}
        self._size: dict[int, int] = {}
        self._now = dict.fromkeys(KINDS, 0)
        self._ended: list[int] = []  # storages that were freed since the last count, also by the backend's threads
        self._sent = False  # whether the backend's threads were given anything
        self.count()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in lecture_lib.trace.calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._forget_ended()
        before = {_key(tensor) for tensor in _tensors((*args, *kwargs.values()))}
        result = func(*args, **kwargs)
        self._forget_ended()
        made = [tensor for tensor in _tensors((result,)) if _key(tensor) not in before]
        for tensor in made:
            self._see(tensor, "activations")
        self._sent |= func.namespace in ("c10d", "_c10d_functional")
        if made or func._schema.is_mutable:  # a view changes nothing, and half of the operators are views
            self.count()
        return result

    def count(self) -> None:
        """What is alive now, and is it more than ever?"""
        self._forget_ended()
        for kind, tensors in self._owned():
            for tensor in tensors:
                if self._kind.get(_key(tensor)) != kind:  # new, or an activation until now
                    self._see(tensor, kind)
        for key, reference in self._alive.items():
            storage = reference()
            if storage is not None and storage.nbytes() != self._size[key]:  # a sharded parameter's grows and shrinks
                self._set(key, self._kind[key], storage.nbytes())
        held, now = self.memory, self._now
        if self._sent and (sum(now.values()) > held.total or any(now[kind] > held.peak[kind] for kind in KINDS)):
            wait_for_gloo()
            self._forget_ended()
        held.peak = {kind: max(held.peak[kind], now[kind]) for kind in KINDS}
        if sum(now.values()) > held.total:
            held.at_peak = dict(now)

    def _owned(self):
        tensors = [tensor for named in self._named for tensor in named.values() if tensor is not None]
        yield "parameters", tensors
        yield "gradients", [t.grad for t in tensors if t.is_leaf and t.grad is not None]
        if self._optimizer is not None:
            states = [value for state in list(self._optimizer.state.values()) for value in state.values()]
            yield "optimizer", [value for value in states if isinstance(value, Tensor)]

    def _see(self, tensor: Tensor, kind: str) -> None:
        """Remember a storage, and what it is. An activation that has become a gradient stays one."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._ended.append(key))
        elif self._kind[key] != "activations":
            kind = self._kind[key]
        if (kind, size) != (self._kind.get(key), self._size.get(key)):
            self._set(key, kind, size)

    def _set(self, key: int, kind: str, size: int) -> None:
        if key in self._kind:
            self._now[self._kind[key]] -= self._size[key]
        self._kind[key], self._size[key] = kind, size
        self._now[kind] += size

    def _forget_ended(self) -> None:
        while self._ended:
            key = self._ended.pop()
            self._now[self._kind.pop(key)] -= self._size.pop(key)
            del self._alive[key]


def wait_for_gloo() -> None:
    """Until none of gloo's threads runs. A rank goes on as soon as a collective is over; the thread that has carried it
    out lets go of the tensors a moment later, or many milliseconds where cores are few. Without gloo, or on a system
    without /proc, this waits for nothing."""
    end, still = time.monotonic() + SETTLE_SECONDS, 0
    while still < 2 and time.monotonic() < end:
        time.sleep(1e-4)  # to free a tensor a thread needs the GIL
        still = 0 if any(state == "R" for state in _gloo_threads()) else still + 1


def _gloo_threads() -> Iterator[str]:
    """What each does: "R" if it runs or waits for a core, "S" if it waits for anything else (man 5 proc)."""
    tasks = "/proc/self/task"
    for thread in os.listdir(tasks) if os.path.exists(tasks) else ():
        with contextlib.suppress(OSError), open(f"{tasks}/{thread}/stat") as file:
            name, state = file.read(64).partition(" (")[2].rpartition(") ")[::2]
            if name == "pt_gloo_runloop":
                yield state[0]


def _tensors(values: Iterable) -> Iterator[Tensor]:
    """Those that an operator takes or gives: by themselves, and in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
