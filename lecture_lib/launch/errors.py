"""The sentences that people read when something goes wrong on a rank."""

import json
import linecache
import os
import re
import signal
import sys
import traceback
from collections import Counter

from lecture_lib.launch import wire

LONGEST_TRACEBACK = 8  # of the person's own lines
MOST_LINES = 8  # in a larger world, ranks of which the same can be said share a line
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


def brief(error: BaseException) -> BaseException:
    """The error, of which a notebook shows its message and not our frames."""
    error._render_traceback_ = lambda: traceback.format_exception_only(error)
    return error


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
    """What a rank that is not at fault was doing: "waited in barrier, after 2 finished operations, at Cell ..."."""
    report = process.report or {"operation": None, "frames": [], "done": 0}
    if process.status is not None:
        return _how_it_ended(process)
    if process.error and not process.error["lost"]:
        return f"{_what_it_raised(process.error)}{_at(process.error['frames'])}"
    if process.error:  # it lost its connection to a rank that is gone: what matters is where it waited
        report = process.error
    elif process.outcome:
        return "returned"
    if report["operation"]:
        done = report["done"]
        finished = f"after {done} finished operation{'s' * (done != 1)}"
        return f"waited in {report['operation']}, {finished},{_at(report['frames'])}"
    return f"was running{_at(report['frames'])}"


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
    others = {
        p.rank: "raised the same" if _same(p.error, culprit.error) else state(p) for p in processes if p is not culprit
    }
    return RankError("\n".join([message, *_lines(others), *([FRESH] if replaced else [])]), culprit.rank, exception)


def _lines(states: dict[int, str]) -> list[str]:
    """ "rank 1 returned", a line each; of many ranks, "ranks 0 to 6 and 8 returned"."""
    if len(states) <= MOST_LINES:
        return [f"rank {rank} {text}" for rank, text in states.items()]
    same: dict[str, list[int]] = {}
    for rank, text in states.items():
        same.setdefault(text, []).append(rank)
    return [f"{_ranks(ranks).lower()} {text}" for text, ranks in same.items()]


def unsendable(place: str, culprit, reason: Exception) -> dict:
    """What to say of a result that cannot be pickled; ``culprit`` is the part at fault, ``place`` where it is."""
    what = f"returned {place} of type {type(culprit).__name__}, which cannot be sent to the notebook"
    return _about_result(f"{what}: {reason}", reason)


def unreadable(what: str, reason: Exception) -> dict:
    """What to say of a result that can be pickled and not unpickled."""
    return _about_result(
        f"returned an object of type {what}, which the notebook cannot rebuild ({type(reason).__name__}: {reason})",
        reason,
    )


def _about_result(message: str, reason: Exception) -> dict:
    return {
        "operation": None,
        "needs": None,
        "frames": [],
        "done": 0,
        "type": type(reason).__name__,
        "message": message,
        "exit": None,
        "lost": False,
        "exception": None,
        "unsendable": True,
    }


def left_behind(processes: list, started_before: int, in_cell: bool) -> RankError | None:
    """The error for a run in which all ranks returned, but one began an operation that others did not: it would meet
    an operation of the next run. ``started_before``: operations that all ranks together had begun before this run."""
    odd = next((p for p in processes if p.left["unfinished"]), None)
    started = sum(p.started for p in processes)
    even_world = len(processes) % 2 == 0
    if odd:
        message = (
            f"rank {odd.rank} returned, and has begun an operation that cannot end, because another rank of its group "
            f"has not begun it: {odd.left['unfinished']}. All ranks must call the same, and wait() for what they "
            "called with async_op=True."
        )
    elif (
        # A collective counts once on each of an even number of ranks, a send once, and once where it is received.
        (even_world and started % 2 and (started - started_before) % 2)
        # ... unless a thread is about to send, or the next cell.
        and not (in_cell or any(p.left["threads"] for p in processes))
    ):
        message = (
            "a send or a receive that the ranks have begun has no counterpart. wait() for what dist.isend and "
            "dist.irecv return, and the rank that waits in vain is named."
        )
    else:
        return None
    return RankError(f"{message}\n{FRESH}", odd and odd.rank)


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
    states = {p.rank: state(p) for p in processes}
    lines = [message, *_lines(states), *([advice] if advice else []), FRESH]
    return RankTimeout("\n".join(lines), culprits[0] if culprits else None)


def _diagnosis(processes: list) -> tuple[list[int], str]:
    """Which ranks are at odds with the rest, and a sentence that says how."""
    waiting = [p for p in processes if not p.outcome and p.report and p.report["operation"]]
    waits = {p.rank: p.report["operation"] for p in waiting}
    everyone = [p.rank for p in processes]
    needed = {rank for p in waiting for rank in (p.report["needs"] or everyone) if rank not in waits}
    returned = [p.rank for p in processes if p.outcome and p.rank in needed]
    running = [p.rank for p in processes if not p.outcome and p.rank not in waits]
    if running and (needed & set(running) or not returned):
        return running, f"{_ranks(running)} neither returned nor joined the others: look for a loop or a sleep there."
    names = {operation.split()[0] for operation in waits.values()}
    if not needed and names <= {"send"}:
        return [], "Every rank sends and none receives: let some receive first, or use dist.batch_isend_irecv."
    if not needed and names <= {"recv"}:
        return [], "Every rank receives and none sends: somebody must send first."
    if returned and names <= {"send", "recv"}:
        missing = "receive" if names == {"send"} else "send" if names == {"recv"} else "send or receive"
        return (
            returned,
            f"{_ranks(returned)} returned without the {missing} that {_ranks(list(waits)).lower()} waited for.",
        )
    in_all = all(p.report["needs"] is None and names.isdisjoint({"new_group", "send", "recv"}) for p in waiting)
    if returned and in_all and {p.started for p in processes if p.outcome} == {p.report["done"] + 1 for p in waiting}:
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
    usual = Counter(waits.values()).most_common(1)[0]
    odd = [rank for rank, operation in waits.items() if operation != usual[0]]
    if not odd or usual[1] == 1:
        return [], ""
    return (
        odd,
        f"{_ranks(odd)} called another operation than the rest: all ranks must call the same, in the same order.",
    )


def _ranks(ranks: list[int]) -> str:
    """ "Rank 3", "Ranks 0, 2 and 3", "Ranks 0 to 7 and 9"."""
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    words = []
    for span in spans:
        words += [f"{span[0]} to {span[-1]}"] if len(span) > 3 else map(str, span)
    return f"Ranks {', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else f"Ranks {words[0]}"
