"""When each operation and each named region of a run began and ended, on one clock for all ranks.

    with timeline() as line:
        with region("forward"):
            loss = model(x)
        dist.all_reduce(loss)
    return line                       # the notebook draws all ranks' lines: lecture_lib.figures.gantt(lines)

An operation begins when it is called. It ends when its data is there: when its future is done, or, where the backend
gives none (gloo's send, recv and reduce-scatter), when somebody has waited for it.
"""

import contextlib
import contextvars
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from lecture_lib.trace.calls import Call, Recorder, unrecorded

READINGS = 8  # of another rank's clock; the one with the shortest round trip counts
_lines: contextvars.ContextVar[tuple["Timeline", ...]] = contextvars.ContextVar("lines", default=())


@dataclass
class Event:
    """Something that took from ``begin`` to ``end``, in seconds on rank 0's clock since the block began there.

    ``call`` is None for a region. ``end`` is None for an operation that nobody waited for.
    """

    name: str
    begin: float
    end: float | None
    call: Call | None = None


@dataclass
class Timeline:
    """What ``timeline()`` recorded on one rank. Can be returned from it."""

    rank: int
    events: list[Event] = field(default_factory=list)


@contextlib.contextmanager
def timeline(clock=time.perf_counter) -> Iterator[Timeline]:
    """Record begin and end of every operation and region in the block.

    A collective call where there is a process group: every rank must enter the block, since the ranks compare their
    clocks there (8 messages to and from rank 0 each, which the record leaves out). Within one machine that agrees to
    some 50 microseconds, between machines to half a round trip.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    zero = _zero_of_rank_0(clock) if dist.is_initialized() and dist.get_world_size() > 1 else clock()
    line = Timeline(rank)

    def now() -> float:
        return clock() - zero

    def on_call(call: Call, work: Work | None) -> Work | None:
        _TimedWork.forget_finished()
        event = Event(call.name, now(), None, call)
        line.events.append(event)
        if work is None:  # a functional collective: wait_tensor ends it
            return None
        return _TimedWork(work, event, now)

    results: dict[int, Event] = {}  # of functional collectives, by where their result lies

    def on_result(tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            results[tensor.untyped_storage()._cdata] = line.events[-1]

    def on_waited(tensor: torch.Tensor) -> None:
        if event := results.pop(tensor.untyped_storage()._cdata, None):
            event.end = now()

    token = _lines.set((*_lines.get(), _Open(line, now)))
    try:
        with Recorder(on_call, on_result, on_waited):
            yield line
    finally:
        _lines.reset(token)
        _TimedWork.forget_finished()


@dataclass
class _Open:
    line: Timeline
    now: object


@contextlib.contextmanager
def region(name: str) -> Iterator[None]:
    """Name what happens in the block, in every timeline that is open around it. Without one, nothing happens."""
    events = []
    for open_ in _lines.get():
        event = Event(name, open_.now(), None)
        open_.line.events.append(event)
        events.append((event, open_.now))
    try:
        yield
    finally:
        for event, now in events:
            event.end = now()


class _TimedWork(Work):
    """Stands for an operation's Work, and notes when it is over. torch's C++ code, such as DistributedDataParallel's
    reducer, calls these methods as well."""

    # On its way from the operator to the caller it is held by C++ alone, which does not keep its Python half alive; a
    # wait() would then never end. So each is kept until it is over and another operation begins.
    _kept: list["_TimedWork"] = []

    @classmethod
    def forget_finished(cls) -> None:
        cls._kept[:] = [work for work in cls._kept if work._event.end is None]

    def __init__(self, work: Work, event: Event, now):
        super().__init__()
        self._kept.append(self)
        self._work, self._event, self._now = work, event, now
        with contextlib.suppress(RuntimeError):  # "not implemented"
            work.get_future().add_done_callback(lambda _: self._over())

    def _over(self) -> None:
        if self._event.end is None:
            self._event.end = self._now()

    def wait(self, *timeout):
        try:
            return self._work.wait(*timeout)
        finally:
            self._over()

    def is_completed(self):
        completed = self._work.is_completed()
        if completed:
            self._over()
        return completed

    def _source_rank(self):
        return self._work._source_rank()

    def is_success(self):
        return self._work.is_success()

    def exception(self):
        return self._work.exception()

    def get_future(self):
        return self._work.get_future()

    def result(self):
        return self._work.result()


def _zero_of_rank_0(clock) -> float:
    """This rank's clock at the moment when rank 0's was at its zero.

    Cristian's algorithm (Probabilistic clock synchronization, 1989): rank 0 reads its clock between my two readings;
    half of the shortest round trip is the most that I can be wrong.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    reading = torch.zeros(1, dtype=torch.float64, device=device)
    with unrecorded():
        if rank == 0:
            for other in range(1, size):
                for _ in range(READINGS):
                    dist.recv(reading, other)
                    reading.fill_(clock())
                    dist.send(reading, other)
            dist.broadcast(reading.fill_(clock()), 0)  # rank 0's zero
            return reading.item()
        trips = []
        for _ in range(READINGS):
            asked = clock()
            dist.send(reading, 0)
            dist.recv(reading, 0)
            answered = clock()
            trips.append((answered - asked, (asked + answered) / 2 - reading.item()))
        offset = min(trips)[1]  # my clock minus rank 0's
        dist.broadcast(reading, 0)
        return reading.item() + offset


# ---- for ui.perfetto.dev ---------------------------------------------------------------------------------------------


def chrome_trace(lines: list[Timeline]) -> dict:
    """The ranks' timelines in the Trace Event Format that chrome://tracing and ui.perfetto.dev open: a process for each
    rank, with a track of regions and a track of operations. Times in microseconds."""
    events = []
    for line in lines:
        events.append({"ph": "M", "name": "process_name", "pid": line.rank, "args": {"name": f"rank {line.rank}"}})
        for track, name in enumerate(("regions", "operations")):
            events.append({"ph": "M", "name": "thread_name", "pid": line.rank, "tid": track, "args": {"name": name}})
        for event in line.events:
            call, end = event.call, event.begin if event.end is None else event.end
            described = {} if call is None else {"group": list(call.group), "bytes sent": float(call.bytes_sent)}
            events.append(
                {
                    "ph": "X",
                    "name": event.name,
                    "pid": line.rank,
                    "tid": int(call is not None),
                    "ts": round(event.begin * 1e6, 3),
                    "dur": round((end - event.begin) * 1e6, 3),
                    "args": described | ({} if call is None else {"elements": call.elements, "dtype": call.dtype}),
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(lines: list[Timeline], path: str | os.PathLike) -> None:
    """Write ``chrome_trace(lines)`` as JSON; open the file at https://ui.perfetto.dev."""
    with open(path, "w") as file:
        json.dump(chrome_trace(lines), file)
