"""What a rank is doing right now.

While the main thread waits inside a collective it has let go of the GIL, so a second thread can read its stack. The
innermost frames tell the operation; the first frame that belongs to the person tells the line.

Frames of a thread that goes on at the same time are no stack, and reading them crashes Python 3.11. And who holds a
frame keeps alive the tensors in it, which the rank may be counting. So a look keeps the GIL from before it reads the
frames until it has let go of them. (faulthandler can write all stacks without touching frames, but crashes over the
threads of gloo, which enter Python for the first time at any moment.)
"""

import contextlib
import dis
import functools
import gc
import json
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")) + (
    "<frozen",
    "<string>",
)
HOLD_SECONDS = 0.5  # of the GIL; a look takes a millisecond, unless its thread loses the core
UNFINISHED_SECONDS = 1.0  # what a rank that has returned gives its asynchronous operations to finish
_C10D = os.path.join("torch", "distributed", "distributed_c10d.py")
# Where else torch waits for other ranks. Not all of torch.distributed: writing a checkpoint is slow, but no deadlock.
_ALSO_WAITS = tuple(
    os.path.join("torch", *path)
    for path in (
        ("distributed", "_functional_collectives.py"),
        ("distributed", "rendezvous.py"),
        ("distributed", "utils.py"),  # DistributedDataParallel's constructor
        ("autograd", "graph.py"),  # backward(), in which C++ waits for the gradients
    )
)


def is_persons(filename: str) -> bool:
    """Whether a frame of this file is the person's own code, and not Python's, a library's or ours."""
    return not filename.startswith((*_LIBRARIES, _PACKAGE))


def report() -> dict:
    """What the main thread does: ``operation`` it waits in (or None), ``needs``: ranks that must take part in it (None:
    all), ``frames`` of the person's code, innermost last, ``done``: operations of the default group that it has
    finished, ``cpu``: seconds of processor time so far, ``queued``: of waiting for it, ``threads``: whether another
    thread is in the person's code, and so may yet do what the main thread waits for."""
    started = operations_started()
    with _keeping_the_gil():
        stacks = _stacks()
        does = describe(stacks.pop(threading.main_thread().ident), started)
        threads = _in_threads(stacks, started)
        del stacks
    return does | {
        "cpu": time.process_time() - time.thread_time(),
        "queued": _queued(),
        "threads": threads,
    }


@contextlib.contextmanager
def _keeping_the_gil() -> Iterator[None]:
    """No other thread gets the GIL in the block, unless this one calls what lets go of it, or waits for a core."""
    before, collects = sys.getswitchinterval(), gc.isenabled()
    gc.disable()  # what it collects may let go of the GIL
    sys.setswitchinterval(HOLD_SECONDS)
    time.sleep(0)  # a thread that began to wait for it before, gets it now
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        if collects:
            gc.enable()


def _queued() -> float:
    """Seconds that the other threads were ready to run while all cores were busy; 0 where the system does not tell.

    On an overloaded machine a rank may wait longer for a core than for its peers; that is not a deadlock."""
    tasks, seconds = "/proc/self/task", 0.0
    others = set(os.listdir(tasks)) - {str(threading.get_native_id())} if os.path.exists(tasks) else ()
    for thread in others:
        with contextlib.suppress(OSError), open(f"{tasks}/{thread}/schedstat", "rb") as file:  # it has just ended
            seconds += int(file.read().split()[1]) / 1e9
    return seconds


def _stacks() -> dict[int, list]:
    return {ident: list(traceback.walk_stack(frame)) for ident, frame in sys._current_frames().items()}


def _in_threads(stacks: dict[int, list], started: int) -> bool:
    """Whether one of these threads is in the person's code, and not in an operation."""
    others = [describe(stack, started) for stack in stacks.values()]
    return any(other["frames"] and not other["operation"] for other in others)


def describe(stack: list, started: int) -> dict:
    """The same of any stack, given as (frame, line) pairs, innermost first: a live one, or that of an exception.
    ``started``: by ``operations_started()``, which lets go of the GIL."""
    operation, needs = waiting_in([frame for frame, _ in stack])
    persons = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in stack if is_persons(f.f_code.co_filename)]
    # new_group and an operation of another group are not counted by the default group's sequence number.
    counted = operation is not None and not operation.startswith("new_group") and " in group " not in operation
    return {
        "operation": operation,
        "needs": needs,
        "frames": persons[::-1],
        "done": started - (counted and started > 0),
    }


def operations_started() -> int:
    """How many collectives, sends and receives of the default group this rank has begun."""
    import torch.distributed as dist

    return dist.group.WORLD._get_sequence_number_for_group() if dist.is_initialized() else 0


def left_behind() -> dict:
    """What goes on after the person's code has returned."""
    threads = False
    if len(sys._current_frames()) > 2:  # this one, and the one that answers the notebook
        started = operations_started()
        with _keeping_the_gil():
            stacks = _stacks()
            del stacks[threading.main_thread().ident]
            threads = _in_threads(stacks, started)
            del stacks
    return {"unfinished": _unfinished(), "threads": threads}


def _unfinished() -> str | None:
    """The oldest collective, of any group, that this rank has begun and that has not ended: "all_reduce of [4]". Waits
    up to UNFINISHED_SECONDS for what is on its way. None also where torch keeps no record of collectives."""
    import torch
    import torch.distributed as dist

    record = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)  # torch's flight recorder
    if record is None or not dist.is_initialized():
        return None
    deadline = time.monotonic() + UNFINISHED_SECONDS
    while True:
        groups = json.loads(record(includeCollectives=False)).get("pg_status", {})
        if all(g["last_enqueued_collective"] == g["last_completed_collective"] for g in groups.values()):
            return None
        if time.monotonic() > deadline:
            break
        time.sleep(0.0002)
    entries = json.loads(record(includeCollectives=True, onlyActive=False))["entries"]
    open_ = next((entry for entry in entries if not entry["retired"]), None)
    return open_ and f"{open_['profiling_name'].split(':')[-1]} of {open_['input_sizes'][0]}"


def waiting_in(frames: list) -> tuple[str | None, list[int] | None]:
    """The distributed operation that a stack sits in, "all_reduce of float32[4]", and the ranks that it needs (None:
    all). (None, None) if it sits in none.

    Only the frames between the innermost one and the person's code count: a person's forward() that sleeps, called by
    a wrapper of torch.distributed, is not waiting for other ranks.
    """
    name = needs = None
    for depth, frame in enumerate(frames):
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if depth == 0 and _calls_wait(frame):
            name = "wait() for an asynchronous operation"
        if is_persons(file):
            break
        if file.endswith(_C10D):
            # The outermost frame of c10d is what was called: all_gather_object, not the all_gather inside it.
            name, needs = _describe(frame)
        elif file.endswith(_ALSO_WAITS):
            name = name or ("backward" if "backward" in function else function)
    return name, needs


def _calls_wait(frame) -> bool:
    """Whether a frame stands at a call of something.wait() in C, without arguments, as that of torch's Work is."""
    import torch.distributed as dist

    return dist.is_initialized() and frame.f_lasti in _waits(frame.f_code)


@functools.lru_cache(1000)  # a look should take no more than a millisecond
def _waits(code) -> set[int]:
    """Where in a function something.wait() is called."""
    calls, before = set(), None
    for instruction in dis.get_instructions(code):
        if before is not None and before.argval == "wait" and before.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            calls.add(instruction.offset)
        if instruction.opname not in ("PRECALL", "CACHE", "EXTENDED_ARG"):
            before = instruction
    return calls


def _describe(frame) -> tuple[str, list[int] | None]:
    """An operation with what it was given, "recv of float32[4] from rank 2", and the ranks it needs (None: all)."""
    import torch
    import torch.distributed as dist

    text = frame.f_code.co_name
    arguments = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    values = {name: frame.f_locals.get(name) for name in arguments}
    for value in values.values():
        tensors = value if isinstance(value, list) else [value]
        if tensors and all(isinstance(t, torch.Tensor) for t in tensors):
            shape = ", ".join(map(str, tensors[0].shape))
            count = f"{len(tensors)} x " if isinstance(value, list) else ""
            text += f" of {count}{str(tensors[0].dtype).removeprefix('torch.')}[{shape}]"
            break
    if isinstance(values.get("src"), int):
        text += f" from rank {values['src']}"
    if isinstance(values.get("dst"), int):
        text += f" to rank {values['dst']}"
    needs, group = None, values.get("group")
    if isinstance(group, dist.ProcessGroup) and group is not dist.group.WORLD:
        with contextlib.suppress(KeyError):  # it has just been destroyed
            needs = dist.get_process_group_ranks(group)
            text += f" in group {needs}"
    if frame.f_code.co_name in ("send", "recv") and isinstance(peer := values.get("dst", values.get("src")), int):
        needs = [peer]
    return text, needs
