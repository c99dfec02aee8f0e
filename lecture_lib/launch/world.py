"""World: rank processes that a notebook or a script keeps, and runs functions on."""

import contextlib
import inspect
import itertools
import os
import re
import select
import selectors
import signal
import sys
import threading
import time
import warnings
import weakref

from lecture_lib.launch import errors, fork_server, wire
from lecture_lib.launch.devices import BACKENDS
from lecture_lib.launch.process import Process, memory_kills, spawn
from lecture_lib.launch.transcript import Screen

LARGE_CLOSURE = 64 * 2**20  # bytes; a function that carries more says so
START_SECONDS = 120.0  # the fork server imports torch within this, even from a slow disk
DEADLOCK_SECONDS = 2.0  # every rank waits and none uses the processor for this long: nothing can move any more
LEFT_ALONE_SECONDS = 1.0  # the same when some rank has returned already, and so cannot come
SETTLE_SECONDS = 0.5  # after a fault, what the other ranks get to come to rest wherever they will
QUEUED = 0.5  # threads: more than this, of all ranks together, would work if they got a core
STILL = 0.1  # of one core: less than this, of all ranks together, is no work (gloo's threads look around now and then)

_open_worlds: list[weakref.ref] = []
_numbers = itertools.count()


def current_world() -> "World | None":
    """The newest World that is open: where %%ranks runs."""
    worlds = [world for ref in _open_worlds if (world := ref()) and not world.closed]
    return worlds[-1] if worlds else None


class World:
    """``size`` rank processes that stay, and run what they are given.

        world = World(4)
        outs = world.run(fn, *args, **kwargs)      # what fn returned on rank 0, 1, 2, 3

    Args:
        size: number of ranks.
        backend: "auto" (nccl where there is a GPU for each rank, else gloo on CPU), "gloo", "nccl", or None for no
            process group: then RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, so code that calls
            init_process_group() itself runs as it is.
        device: "auto", "cpu", "cuda" (one GPU per rank) or "cuda:0" (all ranks share that GPU, on gloo). On a GPU it is
            torch's default device in the rank, so that tensors are made there unless you say otherwise.
        timeout: seconds without progress (a line of output, a finished operation, a rank that returns) before a run is
            stopped and explained. A deadlock does not wait for it: see ``run``.
        threads: CPU threads per rank; "auto" is cores // size, at least 1.

    Raises ValueError or TypeError for arguments that cannot work here, RuntimeError inside a rank and on Windows.
    """

    def __init__(
        self,
        size: int = 4,
        *,
        backend: str | None = "auto",
        device: str = "auto",
        timeout: float = 60.0,
        threads: int | str = "auto",
    ):
        _check(size, backend, device, timeout, threads)
        self.size, self.backend, self.timeout = size, backend, float(timeout)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self.threads = max(1, cores // size) if threads == "auto" else threads
        self._wanted = {"backend": backend, "device": str(device)}
        self._look_every = max(0.1, 0.005 * size)  # seconds between two looks at what the ranks do
        self._busy = threading.Lock()
        self._processes: list[Process] = []
        self._selector = selectors.DefaultSelector()
        weakref.finalize(self, _end, self._processes)
        self._fork()
        self._await_ready()
        _open_worlds[:] = [ref for ref in _open_worlds if ref()] + [weakref.ref(self)]

    def run(self, fn, /, *args, **kwargs) -> list:
        """Run ``fn(*args, **kwargs)`` on every rank; returns what the ranks returned, by rank.

        The function, what it refers to and its arguments travel by value. So do results: tensors come back on CPU and
        detached from their graph, each in memory of its own; a DTensor comes back as the rank's local shard.

        What ranks print appears while they run, and in rank order in the end.

        Raises:
            RankError: a rank raised, exited, died or returned what cannot be sent.
            RankTimeout: nothing happened for ``timeout`` seconds; or, after 2 seconds already, every rank waits in a
                collective, send or receive and none uses the processor, so nothing can move any more.
            TypeError: the function or an argument cannot be sent.
            KeyboardInterrupt: the ranks are replaced by fresh ones first.

        After any of these the world is ready for the next run.
        """
        if not callable(fn):
            raise errors.brief(TypeError(f"World.run needs a function and got {fn!r} of type {type(fn).__name__}."))
        return self._drive(_pack_call(fn, args, kwargs))

    def run_cell(self, source: tuple, borrowed: dict) -> list[dict]:
        """Run a cell's code in the ranks' own namespace, with names ``borrowed`` from the notebook: see magic.py."""
        return self._drive(wire.pack((None, (source, borrowed), {}), to_rank=True), in_cell=True)

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        self._await_ready()
        return [process.pid for process in self._processes]

    @property
    def closed(self) -> bool:
        return not self._processes

    def restart(self) -> None:
        """Replace all ranks by fresh ones, which know no variables and have imported none of your modules. Opens a
        closed world again."""
        self._renew()
        self._await_ready()

    def close(self) -> None:
        """End all ranks."""
        _end(self._processes)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __repr__(self):
        if self.closed:
            return f"World({self.size}), closed"
        self._await_ready()
        threads = f"{self.threads} CPU thread{'s' * (self.threads > 1)} per rank"
        lines = [f"World({self.size}), {self.backend or 'no process group'}, {threads}"]
        return "\n".join(lines + [f"rank {p.rank}  pid {p.pid}  {p.ready['device']}" for p in self._processes])

    def _repr_html_(self):
        if self.closed:
            return f"World({self.size}), closed"
        self._await_ready()
        rows = "".join(
            f"<tr><td>{p.rank}</td><td>pid {p.pid}</td><td>{p.ready['device']}</td><td>{self.backend}</td></tr>"
            for p in self._processes
        )
        return f"<table><tr><th>rank</th><th>process</th><th>device</th><th>backend</th></tr>{rows}</table>"

    # ---- ranks come --------------------------------------------------------------------------------------------------

    def _fork(self) -> None:
        """Have all ranks started. They set themselves up while the notebook goes on."""
        self.cell_memory: dict = {}  # what %%ranks knows of these ranks: see magic.py
        self._selector.close()
        self._selector = selectors.DefaultSelector()
        self._started = 0  # operations that the ranks, all together, have begun so far
        setup = self._wanted | {
            "size": self.size,
            "name": f"world-{next(_numbers)}",
            "environ": dict(os.environ),
            "cwd": _current_folder(),
            "path": list(sys.path),
            "threads": self.threads,
        }
        self._kills_before = memory_kills()
        self._deadline = time.monotonic() + START_SECONDS
        self._server = fork_server.running()
        try:
            self._server.import_as_here()
            for rank in range(self.size):
                process = spawn(self._server, rank, self.size)
                self._processes.append(process)
                for channel in ("tasks", "control", "output", "last_words"):
                    handler = getattr(process, f"on_{channel}")
                    self._selector.register(getattr(process, channel), selectors.EVENT_READ, handler)
                process.send(wire.pack(setup | {"rank": rank}, to_rank=True))
        except OSError as error:
            _end(self._processes)
            raise errors.brief(RuntimeError(self._why_not_started(error))) from None

    def _why_not_started(self, error: OSError) -> str:
        if isinstance(error, BrokenPipeError):
            return f"the process that starts ranks has ended: {self._server.why_it_ended()}"
        return (
            f"{self.size} ranks could not be started: {error.strerror}. Each rank takes 4 of the files that this "
            "process may open; make fewer ranks, or raise the limit (ulimit -n)."
        )

    def _await_ready(self) -> None:
        """Wait until every rank has set itself up."""
        try:
            while not all(process.ready for process in self._processes):
                self._read(0.5)
                for process in self._processes:
                    _raise_if_not_started(process, self._server, self._deadline)
        except Exception:  # an interrupt only ends the waiting
            _end(self._processes)
            raise
        if self._processes:
            self.backend = self._processes[0].ready["backend"]

    def _renew(self) -> None:
        """Fresh ranks. An interrupt waits: it must not leave half a world."""
        with _uninterrupted():
            _end(self._processes)
            self._fork()

    # ---- one run -----------------------------------------------------------------------------------------------------

    def _drive(self, task: list, in_cell: bool = False) -> list:
        """Give every rank the task, wait for all, show what they print."""
        if self.closed:
            raise errors.brief(RuntimeError("this World is closed; world.restart() opens it again."))
        if not self._busy.acquire(blocking=False):
            raise errors.brief(
                RuntimeError("this World runs something already; make a second World to run two things at a time.")
            )
        try:
            with _interrupted_once():
                return self._run_task(task, in_cell)
        finally:
            for process in self._processes:
                process.outcome = None  # a result of 3 GB belongs to the caller alone
            self._busy.release()

    def _run_task(self, task: list, in_cell: bool) -> list:
        self._await_ready()
        screen = Screen([process.transcript for process in self._processes])
        try:
            message = wire.pack(self._processes[0].ready["environ"]) + task
            for process in self._processes:
                process.begin(message)
            self._wait(screen)
            screen.finish()
            values = [process.outcome[1] for process in self._processes]
            if any(process.started is None for process in self._processes):
                self._renew()  # the code has ended the process group, as a script does; the next run needs one
            elif error := errors.left_behind(self._processes, self._started, in_cell):
                self._renew()
                raise error
            else:
                self._started = sum(process.started for process in self._processes)
            return values
        except errors.RankError:
            raise
        except BaseException as error:  # an interrupt, above all: the ranks may be anywhere, so go on with fresh ones
            try:
                screen.finish()
            finally:
                self._renew()
            if isinstance(error, KeyboardInterrupt):
                errors.brief(error)
            raise

    def _wait(self, screen: Screen) -> None:
        """Until every rank has finished. Raises RankError or RankTimeout, with fresh ranks where they are needed."""
        progress = time.monotonic()
        next_look = progress + self._look_every
        stillness = Stillness()
        while not all(process.finished for process in self._processes):
            moved = self._read(next_look - time.monotonic())
            if any(process.error or process.status is not None for process in self._processes):
                self._fail(screen)
            now = time.monotonic()
            progress = now if moved else progress
            if now < next_look:
                continue
            next_look = now + self._look_every
            screen.update()
            if stillness.look(self._processes):
                progress = now
            returned = any(process.outcome for process in self._processes)
            stuck = stillness.seconds >= (LEFT_ALONE_SECONDS if returned else DEADLOCK_SECONDS)
            if stuck or now - progress > self.timeout:
                self._replace(screen, errors.rank_timeout(self._processes, stuck, self.timeout))
            for process in self._processes:
                process.ask()

    def _read(self, seconds: float) -> bool:
        """Take in what the ranks sent. Returns whether a rank printed or returned."""
        moved = False
        for key, _ in self._selector.select(max(0.0, seconds)):
            try:
                key.data()
                moved |= key.data.__name__ in ("on_tasks", "on_output")
            except (EOFError, OSError):
                self._selector.unregister(key.fileobj)
        return moved

    def _fail(self, screen: Screen) -> None:
        self._settle()
        for process in self._processes:
            process.out_of_memory = process.status == -9 and memory_kills() > self._kills_before
        ended = all(process.finished for process in self._processes)
        # Operations begun in this run: after a pipeline the ranks have not begun equally many in all.
        started = {None if p.started is None else p.started - p.started_before for p in self._processes}
        in_step = len(started) == 1 and None not in started
        unsendable = all(process.error["unsendable"] for process in self._processes if process.error)
        if ended and (in_step or unsendable):  # no rank waits for another: a typo need not cost the ranks' variables
            screen.finish()
            raise errors.rank_error(self._processes, replaced=False)
        self._replace(screen, errors.rank_error(self._processes, replaced=True))

    def _settle(self) -> None:
        """Wait until every rank has finished, died or come to rest in an operation, so that the same fault gives the
        same message every time; and until the fault behind a lost connection is known."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            look = time.monotonic() + 0.02
            for process in self._processes:
                process.ask()
            while (now := time.monotonic()) < look:
                self._read(look - now)
            restless = [
                process
                for process in self._processes
                if not process.finished
                and process.status is None
                and not (process.rested and process.report["operation"])
            ]
            faults = [p for p in self._processes if p.status is not None or p.error and not p.error["lost"]]
            if faults and not restless:
                return

    def _replace(self, screen: Screen, error: errors.RankError) -> None:
        for process in self._processes:
            process.drain()
        try:
            screen.finish()
        finally:
            self._renew()
        raise error


class Stillness:
    """For how long all ranks have been waiting in operations, at the same place, without using the processor."""

    def __init__(self):
        self.seconds = 0.0
        self._time, self._places, self._cpu, self._queued = time.monotonic(), None, 0.0, 0.0

    def look(self, processes: list[Process]) -> bool:
        """Take in the ranks' last reports. Returns whether some rank has finished an operation since the last look."""
        waiting = [process for process in processes if not process.outcome]
        reports = [process.report for process in waiting]
        if None in reports or any(process.report and process.report["threads"] for process in processes):
            self.seconds = 0.0
            return False
        now, cpu = time.monotonic(), sum(report["cpu"] for report in reports)
        queued = sum(report["queued"] for report in reports)
        places = [(p.rank, p.report["operation"], p.report["frames"], p.report["done"]) for p in waiting]
        elapsed = min(now - self._time, 0.5)  # a laptop that slept was not still, it was not there
        still = (
            places == self._places
            and all(report["operation"] for report in reports)
            and cpu - self._cpu < STILL * elapsed
            and queued - self._queued < QUEUED * elapsed
        )
        self.seconds = self.seconds + elapsed if still else 0.0
        moved = self._places is not None and [p[3] for p in places] != [p[3] for p in self._places]
        self._time, self._places, self._cpu, self._queued = now, places, cpu, queued
        return moved


@contextlib.contextmanager
def _interrupted_once():
    """The first interrupt in this block is a KeyboardInterrupt. Those that follow, while the ranks are being replaced
    because of it, are not."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupted = False

    def interrupt(*_):
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def _uninterrupted():
    """An interrupt that comes in this block is forgotten: the person has the prompt back in a moment anyway."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is ever interrupted
        return
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.default_int_handler)


def _current_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise errors.brief(
            RuntimeError("the folder in which this notebook runs is gone: os.chdir() to another one, then try again.")
        ) from None


def _end(processes: list[Process]) -> None:
    """Kill the ranks and forget them."""
    for process in processes:
        process.kill()
        if process.ready and process.rank == 0 and process.ready["store"]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(process.ready["store"])
    deadline = time.monotonic() + 1.0
    for process in processes:  # until the server has buried it
        while process.status is None and (left := deadline - time.monotonic()) > 0:
            if select.select([process.last_words], [], [], left)[0]:
                with contextlib.suppress(EOFError, OSError):
                    process.on_last_words()
        process.close()
    processes.clear()


def _raise_if_not_started(process: Process, server, deadline: float) -> None:
    if process.failed:
        kind, message = process.failed
        raise (ValueError if kind == "ValueError" else RuntimeError)(message)
    if process.status is not None or server.process.poll() is not None:
        reason = process.words.decode(errors="replace").partition("status")[0].strip() or server.why_it_ended()
        raise RuntimeError(f"rank {process.rank} did not start: {reason or 'it left no message'}")
    if time.monotonic() > deadline:
        raise RuntimeError(f"the ranks did not start within {START_SECONDS:g} seconds.")


def _check(size, backend, device, timeout, threads) -> None:
    """One sentence for each argument that cannot work on any machine."""
    if os.name == "nt":
        raise RuntimeError("ranks need Linux or macOS; on Windows, run the course inside WSL2 (wsl --install).")
    rank = sys.modules.get("lecture_lib.launch.rank")
    if rank is not None and rank.rank_id is not None:
        raise RuntimeError(
            f"this code runs on rank {rank.rank_id} already; make the World in the notebook, not in a rank."
        )
    if not isinstance(size, int) or isinstance(size, bool):
        raise TypeError(f"World(size) needs a whole number of ranks, such as World(4), and got {size!r}.")
    if size < 1:
        raise ValueError(f"World(size) needs at least 1 rank and got {size}.")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be 'auto', 'gloo', 'nccl' or None, and is {backend!r}.")
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(device)):
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or one GPU such as 'cuda:0', and is {device!r}.")
    if not isinstance(timeout, (int, float)) or timeout <= 0:
        raise ValueError(f"timeout must be a number of seconds above 0, and is {timeout!r}.")
    if threads != "auto" and (not isinstance(threads, int) or threads < 1):
        raise ValueError(f"threads must be 'auto' or a whole number of at least 1, and is {threads!r}.")


# ---- what a call carries ---------------------------------------------------------------------------------------------


def _pack_call(fn, args: tuple, kwargs: dict) -> list:
    """The message that carries a call. Raises TypeError that names what cannot travel; warns of a heavy closure."""
    try:
        packed = wire.pack((fn, args, kwargs), to_rank=True)
    except Exception as error:
        carried = _carried(fn) | {f"argument {i}": arg for i, arg in enumerate(args)} | kwargs
        name, reason = _first_that_cannot_travel(carried) or (_name(fn), error)
        raise errors.brief(TypeError(f"cannot send {_name(fn)} to the ranks because of {name} ({reason}).")) from None
    if wire.size(packed) > LARGE_CLOSURE:
        sizes = {name: wire.size(wire.pack(value, to_rank=True)) for name, value in _carried(fn).items()}
        if sum(sizes.values()) > LARGE_CLOSURE:
            name = max(sizes, key=sizes.get)
            warnings.warn(
                f"{_name(fn)} carries {sum(sizes.values()) / 2**20:.0f} MiB to every rank, most of it in {name!r} "
                f"({sizes[name] / 2**20:.0f} MiB). Make it inside the function instead.",
                stacklevel=3,
            )
    return packed


def _name(fn) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _carried(fn) -> dict:
    """What a function refers to outside itself and so takes along, by name."""
    try:
        variables = inspect.getclosurevars(inspect.unwrap(fn))
    except TypeError:  # not a Python function
        return {}
    defaults = getattr(fn, "__kwdefaults__", None) or {}
    return {**variables.globals, **variables.nonlocals, **defaults}


def _first_that_cannot_travel(named: dict) -> tuple[str, Exception] | None:
    for name, value in named.items():
        try:
            wire.pack(value, to_rank=True)
        except Exception as error:
            return f"{name!r}, a {type(value).__name__}", error
    return None
