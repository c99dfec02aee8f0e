"""The sentences that people read when something goes wrong on a rank."""

import json
import linecache
import os
import re
import signal
import sys
from collections import Counter

from lecture_lib.launch import wire

LONGEST_TRACEBACK = 8  # of the person's own lines
FRESH = "The ranks were replaced by fresh ones. Variables of earlier %%ranks cells are gone: run those cells again."

_KILLED = {
    signal.SIGKILL: "was killed (SIGKILL): by hand, or by the operating system because memory ran out",
    signal.SIGABRT: "was aborted (SIGABRT)",
    signal.SIGSEGV: "crashed (SIGSEGV)",
}


class RankError(RuntimeError):
    """A rank raised, ended or died. The message has the person's own lines of the rank at fault and one line for each
    other rank. ``rank``: the rank at fault; ``exception``: what it raised, None if it died."""

    def __init__(self, message: str, rank: int | None = None, exception: BaseException | None = None):
        super().__init__(message)
        self.rank = rank
        self.exception = exception

    def _render_traceback_(self):
        # IPython asks for this: the lines of World.run and below would only hide what happened.
        return [f"{type(self).__name__}: {self}"]


class RankTimeout(RankError):
    """Ranks wait for something that cannot come, or nothing happened for ``World.timeout`` seconds."""


def ipython():
    """The running IPython shell, or None. Does not import IPython."""
    module = sys.modules.get("IPython")
    return module.get_ipython() if module else None


# ---- places ----------------------------------------------------------------------------------------------------------


def place(frame: tuple[str, int, str]) -> str:
    """ "Cell In[3], line 2, in step": where a line of the person's code is."""
    file, line, function = frame
    shell = ipython()
    cell = shell.compile.format_code_name(file) if shell else None
    where = " ".join(cell) if cell else os.path.relpath(file) if os.path.isabs(file) else file
    return f"{where}, line {line}" + ("" if function.startswith("<module") else f", in {function}")


def _source(frame) -> str:
    return linecache.getline(frame[0], frame[1]).strip()


def _at(frames) -> str:
    """ " at Cell In[3], line 2: dist.barrier()", or nothing where there is no line of the person's."""
    if not frames:
        return ""
    source = _source(frames[-1])
    return f" at {place(frames[-1])}" + (f": {source}" if source else "")


def _traceback(frames) -> str:
    if len(frames) > LONGEST_TRACEBACK:
        half = LONGEST_TRACEBACK // 2
        frames = [*frames[:half], None, *frames[-half:]]
    return "".join(f"\n  {place(f)}\n    {_source(f)}" if f else "\n  ..." for f in frames)


# ---- one rank --------------------------------------------------------------------------------------------------------


def state(process) -> str:
    """One line: what a rank that is not at fault was doing."""
    report = process.report or {"operation": None, "frames": [], "done": 0}
    if process.status is not None:
        return f"rank {process.rank} {_how_it_ended(process)}"
    if process.error and not process.error["lost"]:
        return f"rank {process.rank} {_what_it_raised(process.error)}{_at(process.error['frames'])}"
    if process.error:  # it lost its connection to a rank that is gone: what matters is where it waited
        report = process.error
    elif process.outcome:
        return f"rank {process.rank} returned"
    if report["operation"]:
        done = report["done"]
        finished = f"after {done} finished operation{'s' * (done != 1)}"
        return f"rank {process.rank} waited in {report['operation']}, {finished},{_at(report['frames'])}"
    return f"rank {process.rank} was running{_at(report['frames'])}"


def _what_it_raised(error: dict) -> str:
    if error["unsendable"]:
        return error["message"]
    if error["type"] == "SystemExit":
        return f"called sys.exit({'' if error['exit'] is None else repr(error['exit'])})"
    return f"raised {error['type']}: {error['message']}"


def _how_it_ended(process) -> str:
    call = next((words["call"] for words in _last_reports(process) if "call" in words), None)
    if process.out_of_memory:
        return "was killed by the operating system because memory ran out"
    if call:
        return f"ended itself with {call}"
    if process.status < 0:
        number = signal.Signals(-process.status)
        return _KILLED.get(number, f"was ended by {number.name}")
    return f"ended with exit code {process.status}"


def _last_reports(process) -> list[dict]:
    return [json.loads(line) for line in process.words.decode(errors="replace").splitlines() if line[:1] == "{"]


def _last_frames(process) -> list:
    """The person's lines where a rank died: its own report, else a crash's dump, else where it was last seen."""
    from lecture_lib.launch.watch import is_persons

    for words in _last_reports(process):
        return words["frames"]
    dump = re.findall(r'File "(.+)", line (\d+) in (.+)', process.words.decode(errors="replace"))
    frames = [(file, int(line), function) for file, line, function in reversed(dump) if is_persons(file)]
    return frames or (process.report or {}).get("frames", [])


# ---- all ranks -------------------------------------------------------------------------------------------------------


def rank_error(processes: list, replaced: bool) -> RankError:
    """The error for a run in which at least one rank raised or died."""
    died = [p for p in processes if p.status is not None]
    raised = [p for p in processes if p.error and not p.error["lost"]]
    # A rank that died takes others with it: they lose their connection, and some libraries raise for that. Ranks that
    # raised at about the same time are all at fault: the lowest is shown in full, so that the message is the same
    # again.
    culprit = (died or raised or [p for p in processes if p.error])[0]
    if culprit in died:
        message = f"rank {culprit.rank} {_how_it_ended(culprit)}"
        words = next(iter(_last_reports(culprit)), None)
        if words and words["operation"] and culprit.status == -signal.SIGABRT:
            message += f" in {words['operation']}"
            message += _mismatch(processes) or ". gloo does this when ranks bring tensors of different sizes"
        message += _traceback(_last_frames(culprit))
        exception = None
    else:
        message = f"rank {culprit.rank} {_what_it_raised(culprit.error)}{_traceback(culprit.error['frames'])}"
        exception = _unpacked(culprit.error["exception"])
    others = [
        f"rank {p.rank} raised the same" if _same(p.error, culprit.error) else state(p)
        for p in processes
        if p is not culprit
    ]
    return RankError("\n".join([message, *others, *([FRESH] if replaced else [])]), culprit.rank, exception)


def _same(error: dict | None, other: dict | None) -> bool:
    keys = ("type", "message", "frames", "exit")
    return bool(error and other) and all(error[key] == other[key] for key in keys)


def _unpacked(packed) -> BaseException | None:
    try:
        return packed and wire.unpack(packed)
    except Exception:  # an exception whose class cannot be called with its own args
        return None


def _operation(process) -> str | None:
    """What a rank waits in, or waited in when it died or lost its connection."""
    words = next(iter(_last_reports(process)), None)
    return (words or process.error or process.report or {}).get("operation")


def _mismatch(processes: list) -> str:
    operations = {p.rank: _operation(p) for p in processes}
    common = Counter(filter(None, operations.values())).most_common(1)
    odd = [rank for rank, operation in operations.items() if operation and common and operation != common[0][0]]
    if not odd:
        return ""
    return f": rank {odd[0]} brought {operations[odd[0]]}, others {common[0][0]}; every rank must bring the same size"


def rank_timeout(processes: list, stuck: bool, timeout: float) -> RankTimeout:
    """The error for a run that is stuck (nothing can move any more) or silent for ``timeout`` seconds."""
    if stuck:
        message = "no rank can move: every rank that has not returned waits for something that cannot come."
    else:
        message = f"nothing happened for {timeout:g} seconds, which is this World's timeout."
    culprits, advice = _diagnosis(processes)
    lines = [message, *(state(p) for p in processes), *([advice] if advice else []), FRESH]
    return RankTimeout("\n".join(lines), culprits[0] if culprits else None)


def _diagnosis(processes: list) -> tuple[list[int], str]:
    """Which ranks are at odds with the rest, and a sentence that says how."""
    waits = {p.rank: p.report["operation"] for p in processes if not p.outcome and p.report and p.report["operation"]}
    names = {rank: operation.split()[0] for rank, operation in waits.items()}
    returned = [p.rank for p in processes if p.outcome]
    running = [p.rank for p in processes if not p.outcome and p.rank not in waits]
    if running:
        return running, f"{_ranks(running)} neither returned nor joined the others: look for a loop or a sleep there."
    waiting = [p for p in processes if p.rank in waits]
    if returned and {p.started for p in processes if p.outcome} == {p.report["done"] + 1 for p in waiting}:
        return list(waits), (
            "All ranks called the same number of operations, and the last one ended on "
            f"{_ranks(returned).lower()} only: the ranks brought tensors of different sizes, "
            "or called different operations."
        )
    if returned:
        return returned, (
            f"{_ranks(returned)} returned without the operation that the others wait in: all ranks of a group must "
            "call the same operations in the same order."
        )
    kinds = set(names.values())
    if kinds <= {"send", "isend"}:
        return [], "Every rank sends and none receives: let some receive first, or use dist.batch_isend_irecv."
    if kinds <= {"recv", "irecv"}:
        return [], "Every rank receives and none sends: somebody must send first."
    usual = Counter(waits.values()).most_common(1)[0]
    odd = [rank for rank, operation in waits.items() if operation != usual[0]]
    if not odd or usual[1] == 1:
        return [], ""
    return (
        odd,
        f"{_ranks(odd)} called another operation than the rest: all ranks must call the same, in the same order.",
    )


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    return f"Ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
