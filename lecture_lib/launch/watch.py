"""What a rank is doing right now.

While the main thread waits inside a collective it has let go of the GIL, so a second thread can read its stack. The
innermost frames tell the operation; the first frame that belongs to the person tells the line.
"""

import dis
import os
import sys
import sysconfig
import threading
import time
import traceback
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")) + (
    "<frozen",
    "<string>",
)
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
    """What the main thread does: ``operation`` it waits in (or None), ``frames`` of the person's code, innermost last,
    ``done``: operations of the default group that it has finished, ``cpu``: seconds of processor time so far,
    ``threads``: whether another thread is in the person's code, and so may yet do what the main thread waits for."""
    stacks = {ident: list(traceback.walk_stack(frame)) for ident, frame in sys._current_frames().items()}
    main = describe(stacks.pop(threading.main_thread().ident))
    others = [describe(stack) for stack in stacks.values()]
    return main | {
        "cpu": time.process_time() - time.thread_time(),
        "threads": any(other["frames"] and not other["operation"] for other in others),
    }


def describe(stack: list) -> dict:
    """The same of any stack, given as (frame, line) pairs, innermost first: a live one, or that of an exception."""
    operation = waiting_in([frame for frame, _ in stack])
    started = operations_started()
    persons = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in stack if is_persons(f.f_code.co_filename)]
    return {
        "operation": operation,
        "frames": persons[::-1],
        "done": started - (operation is not None and started > 0),
    }


def operations_started() -> int:
    """How many collectives, sends and receives of the default group this rank has begun."""
    import torch.distributed as dist

    return dist.group.WORLD._get_sequence_number_for_group() if dist.is_initialized() else 0


def waiting_in(frames: list) -> str | None:
    """The distributed operation that a stack sits in: "all_reduce of float32[4]". None if it sits in none.

    Only the frames between the innermost one and the person's code count: a person's forward() that sleeps, called by
    a wrapper of torch.distributed, is not waiting for other ranks.
    """
    name = None
    for depth, frame in enumerate(frames):
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if depth == 0 and _calls_wait(frame):
            name = "wait() for an asynchronous operation"
        if is_persons(file):
            break
        if file.endswith(_C10D):
            # The outermost frame of c10d is what was called: all_gather_object, not the all_gather inside it.
            name = _describe(frame)
        elif file.endswith(_ALSO_WAITS):
            name = name or ("backward" if "backward" in function else function)
    return name


def _calls_wait(frame) -> bool:
    """Whether a frame stands at a call of something.wait() in C, without arguments, as that of torch's Work is."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return False
    before = None
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset == frame.f_lasti:
            return before is not None and before.argval == "wait" and before.opname in ("LOAD_METHOD", "LOAD_ATTR")
        if instruction.opname not in ("PRECALL", "CACHE", "EXTENDED_ARG"):
            before = instruction
    return False


def _describe(frame) -> str:
    """An operation with what it was given: "recv of float32[4] from rank 2"."""
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
    group = values.get("group")
    if isinstance(group, dist.ProcessGroup) and group is not dist.group.WORLD:
        text += f" in group {dist.get_process_group_ranks(group)}"
    return text
