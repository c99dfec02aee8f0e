"""One rank, seen from the notebook: four descriptors and what came through them."""

import contextlib
import os
import signal
import socket
from dataclasses import dataclass

from lecture_lib.launch import errors, wire
from lecture_lib.launch.transcript import Transcript


@dataclass(eq=False)
class Process:
    rank: int
    transcript: Transcript
    tasks: socket.socket
    control: socket.socket
    output: int
    last_words: int

    ready: dict | None = None  # pid, device, ...; once it has set itself up
    failed: tuple[str, str] | None = None  # type and message of what prevented that
    outcome: tuple | None = None  # ("value", x) or ("error", {...}), once the run is over for this rank
    started: int | None = 0  # operations of the default group it had begun by then; None: it has ended the group
    started_before: int = 0  # and when the run began
    left: dict | None = None  # what goes on in it after a run: see watch.left_behind
    report: dict | None = None  # its last answer to "what are you doing?"
    rested: bool = False  # the two last answers were the same
    words: bytes = b""  # what came through last_words
    status: int | None = None  # exit code, negative for a signal, once the process is gone
    out_of_memory: bool = False
    _asked: bool = False

    @property
    def pid(self) -> int | None:
        return self.ready and self.ready["pid"]

    @property
    def error(self) -> dict | None:
        return self.outcome[1] if self.outcome and self.outcome[0] == "error" else None

    @property
    def finished(self) -> bool:
        """The result is here, and so is everything that the rank had printed before."""
        return self.outcome is not None and self.transcript.ended

    def send(self, parts: list) -> None:
        with contextlib.suppress(OSError):  # it is dead, which ``status`` is about to tell
            wire.write(self.tasks, parts)

    def begin(self, parts: list) -> None:
        """Give it a run's task."""
        self.outcome, self.report, self.rested = None, None, False
        self.started_before = self.started
        self.transcript.start()
        self.send(parts)

    def ask(self) -> None:
        """Ask what it does. The answer arrives as ``report``."""
        if not self._asked and self.status is None:
            with contextlib.suppress(OSError):
                wire.write(self.control, [b""])
                self._asked = True

    # ---- what arrives, by descriptor; each raises EOFError or OSError when nothing more will -------------------------

    def on_tasks(self) -> None:
        parts = wire.read(self.tasks)
        kind, *rest = wire.unpack(parts[:1])
        if kind == "ready":
            self.ready = rest[0]
        elif kind == "failed":
            self.failed = tuple(rest)
        elif kind == "display":
            self.transcript.displays.append(tuple(rest))
        else:
            what, self.started, self.left, self.ready["environ"] = rest
            try:
                self.outcome = kind, wire.unpack(parts[1:])
            except Exception as error:  # it can be pickled, and then not be unpickled
                self.outcome = "error", errors.unreadable(what, error)

    def on_control(self) -> None:
        report = wire.unpack(wire.read(self.control))
        known = self.report or {}
        self.rested = all(report[key] == known.get(key) for key in ("operation", "frames", "done"))
        self.report, self._asked = report, False

    def on_output(self) -> None:
        data = os.read(self.output, 1 << 16)
        if not data:
            raise EOFError
        self.transcript.feed(data)

    def on_last_words(self) -> None:
        data = os.read(self.last_words, 1 << 16)
        if not data:
            # The server writes "status N" when it has buried the rank. Without it the server itself was killed.
            status = self.words.rpartition(b"status ")[2].strip()
            self.status = int(status) if status.lstrip(b"-").isdigit() else -signal.SIGKILL
            raise EOFError
        self.words += data

    def drain(self) -> None:
        """Read what it has printed and nobody has read yet."""
        os.set_blocking(self.output, False)
        with contextlib.suppress(BlockingIOError, EOFError, OSError):
            while True:
                self.on_output()

    def kill(self) -> None:
        if self.pid and self.status is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)  # its DataLoader workers too
        self.control.close()  # whatever could not be killed ends when it sees this

    def close(self) -> None:
        self.tasks.close()
        os.close(self.output)
        os.close(self.last_words)


def spawn(server, rank: int, size: int) -> Process:
    """Have the server fork a rank."""
    tasks, their_tasks = socket.socketpair()
    control, their_control = socket.socketpair()
    output, their_output = os.pipe()
    last_words, their_last_words = os.pipe()
    theirs = [their_tasks.detach(), their_control.detach(), their_output, their_last_words]
    try:
        server.fork(theirs)
    finally:
        for fd in theirs:
            os.close(fd)
    return Process(rank, Transcript(rank, size), tasks, control, output, last_words)


def memory_kills() -> int:
    """How many processes the operating system has killed so far because memory ran out (Linux; 0 elsewhere)."""
    with contextlib.suppress(OSError), open("/proc/vmstat") as lines:
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    return 0
