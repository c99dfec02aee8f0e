"""What a rank does: set up, then run what it is sent until the notebook is gone.

The main thread runs the person's code. A second thread answers "what are you doing?" and ends the whole process group
when the notebook is gone. Errors of the person's code become reports, never the end of the rank.
"""

import builtins
import contextlib
import ctypes
import faulthandler
import io
import json
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
import types

import torch
import torch.distributed as dist

from lecture_lib.launch import errors, transcript, watch, wire
from lecture_lib.launch.devices import choose

NO_KEYBOARD = (
    "A rank has no keyboard, so input(), breakpoint() and pdb cannot work here. Print what you want to see, or return "
    "it from the function; to step through the code, call the function in the notebook itself, without World."
)
# What gloo and NCCL say when a rank at the other end is gone: a consequence of another rank's fault, not a fault.
_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "remote process exited",
)
_PR_SET_PDEATHSIG = 1

rank_id: int | None = None  # set in a rank, None elsewhere
_tasks: socket.socket
_tasks_lock = threading.Lock()  # a thread of the person's may display() while the main thread sends a result
_displayed = 0


def main(tasks: int, control: int, output: int, last_words: int, folder: str) -> None:
    """The life of a rank. Does not return."""
    exit_now = os._exit
    try:
        _live(tasks, control, output, last_words, folder)
    except EOFError:
        pass  # the notebook is gone
    except BaseException:
        traceback.print_exc()
    finally:
        exit_now(1)


def _live(tasks: int, control: int, output: int, last_words: int, folder: str) -> None:
    global _tasks
    _detach_from_server()
    _tasks = socket.socket(fileno=tasks)
    threading.Thread(target=_answer, args=(socket.socket(fileno=control),), daemon=True).start()
    libc = _redirect_output(output)
    _prepare_last_words(last_words, libc)

    try:
        _send("ready", _set_up(wire.unpack(wire.read(_tasks)), folder))
    except Exception as error:
        _send("failed", type(error).__name__, str(error))
        return
    namespace, me = _namespace(), os.getpid()
    while True:
        parts = wire.read(_tasks)
        outcome = _run(parts, namespace)
        if os.getpid() != me:
            os._exit(0)  # a child that the person's code forked; the sockets are the rank's, not its
        _open_streams()
        sys.stdout.flush()
        sys.stderr.flush()
        libc.fflush(None)
        os.write(1, transcript.END)
        _send_outcome(outcome)
        del outcome, parts  # a result of 3 GB must not live until the next run


def _send(*message, parts: list = ()) -> None:
    """A message, and the parts of an object that the notebook unpacks after it has read the message."""
    with _tasks_lock:
        wire.write(_tasks, [pickle.dumps(message), *parts])


# ---- set-up ----------------------------------------------------------------------------------------------------------


def _detach_from_server() -> None:
    """A process group of its own, default signals, and an end with the server's end."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the notebook decides what an interrupt means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _redirect_output(output: int):
    """File descriptors 1 and 2, for Python and for C alike, lead to the notebook. Returns libc."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdout = sys.stderr = None
    _open_streams()
    sys.stdin = _NoKeyboard()
    sys.breakpointhook = sys.stdin.readline
    libc = ctypes.CDLL(None)
    c_stdout = ctypes.c_void_p.in_dll(libc, "__stdoutp" if sys.platform == "darwin" else "stdout")
    libc.setvbuf(c_stdout, None, 1, 0)  # 1: by line, so that C and Python keep their order
    return libc


def _open_streams() -> None:
    """Standard output and error, again where the person's code has closed one or set it to None."""
    for fd, name in ((1, "stdout"), (2, "stderr")):
        if getattr(getattr(sys, name), "closed", True):
            stream = open(fd, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
            setattr(sys, name, stream)


class _NoKeyboard(io.TextIOBase):
    def readline(self, *_, **__):
        raise RuntimeError(NO_KEYBOARD)

    read = fileno = readline


def _prepare_last_words(fd: int, libc) -> None:
    """Tell where the person's code was when the process ends at once: abort(), a crash, os._exit()."""
    me, exit_now = os.getpid(), os._exit

    def say(**more):
        os.write(fd, json.dumps(watch.report() | more).encode() + b"\n")

    def exit_after_a_word(code):
        if os.getpid() == me:  # not a DataLoader worker, which ends this way every time
            say(call=f"os._exit({code})")
        exit_now(code)

    os._exit = exit_after_a_word
    faulthandler.enable(fd, all_threads=True)  # crashes: SIGSEGV, SIGBUS, SIGFPE, SIGILL
    # gloo aborts the process from a thread of its own when ranks bring tensors of different sizes. The main thread is
    # in the collective then and has let go of the GIL, so Python can still say which one, and with what.
    global _on_abort
    _on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: say())
    libc.signal(signal.SIGABRT, _on_abort)


def _set_up(setup: dict, folder: str) -> dict:
    """Become rank ``setup["rank"]`` of ``setup["size"]``. Returns what the notebook shows about this rank."""
    global rank_id
    rank, size, backend = setup["rank"], setup["size"], setup["backend"]
    rank_id = rank
    os.environ.clear()
    os.environ.update(setup["environ"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ["MPLBACKEND"] = "module://lecture_lib.launch.plots"
    loopback = "lo0" if sys.platform == "darwin" else "lo"  # without it gloo and NCCL listen where others can connect
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    os.chdir(setup["cwd"])
    sys.path[:] = setup["path"]
    sys.argv = [""]
    builtins.display = display
    multiprocessing.set_start_method("fork", force=True)  # a rank's children need not import everything again

    os.environ["OMP_NUM_THREADS"] = str(setup["threads"])
    torch.set_num_threads(setup["threads"])
    backend, device = choose(size, backend, setup["device"], rank, torch.cuda.device_count())
    if device.type == "cuda" and backend is not None:  # code that sets up its own group chooses its own device
        torch.cuda.set_device(device)
        torch.set_default_device(device)  # so that the same cell, torch.arange(4.), runs here and on CPU
    ready = {"pid": os.getpid(), "device": str(device), "backend": backend, "store": None}
    if backend is not None:
        ready["store"] = os.path.join(folder, setup["name"])
        dist.set_debug_level_from_env()  # torch read it when the server imported it
        store = dist.FileStore(ready["store"], size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    _state.update(device=device, backend=backend)
    return ready | {"environ": _next_environ()}


_state: dict = {}


def _next_environ() -> dict[str, str]:
    """What rank 0 adds to every rank's environment in the next run: where code that calls init_process_group() itself
    finds its store.

    Left alone, rank 0 would open a TCP store on every network interface. This one listens on loopback only, and
    TORCHELASTIC_USE_AGENT_STORE makes all ranks its clients, as they are of torchrun's. A new one for each run, since a
    store remembers the process groups that were made with it.
    """
    if _state["backend"] is not None or rank_id != 0:
        return {}
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    _state["tcp_store"] = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def _namespace() -> dict:
    """What a %%ranks cell finds: the ranks' own ``__main__``."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    main.__dict__.update(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        device=_state["device"],
        torch=torch,
        dist=dist,
    )
    return main.__dict__


# ---- running ---------------------------------------------------------------------------------------------------------


def _run(parts: list, namespace: dict) -> tuple:
    """Run one task. Returns ("value", x) or ("error", {...}); nothing the person's code does escapes."""
    global _displayed
    _displayed = 0
    try:
        os.environ.update(wire.unpack(parts[:1]))
        function, args, kwargs = wire.unpack(parts[1:])
        if function is None:  # a cell
            value = run_cell(namespace, *args)
        else:
            value = function(*args, **kwargs)
        _show_open_figures()
        return "value", value
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: the rank goes on
        explanation = _explain(error)
        with contextlib.suppress(Exception):
            _show_open_figures()  # not in the next run
        return "error", explanation
    finally:
        if _state["backend"] is None and dist.is_initialized():
            # Unchanged code may leave its process group behind, and would be refused a second one.
            with contextlib.suppress(Exception):
                dist.destroy_process_group()


def run_cell(namespace: dict, source: tuple, borrowed: dict) -> dict:
    """Run a %%ranks cell. Returns the names that this rank has assigned itself.

    ``borrowed``: names from the notebook. They stand in the namespace until a cell assigns them.
    """
    lent = _state.setdefault("lent", {})
    for name, value in borrowed.items():
        if name not in namespace or name in lent:
            namespace[name] = lent[name] = value
    body, last = source
    try:
        exec(body, namespace)
        if last is not None:
            value = eval(last, namespace)
            if value is not None:
                namespace["_"] = value
                show = display if _is_rich(value) else print
                show(value if show is display else repr(value))
    finally:
        for name in [name for name in lent if namespace.get(name) is not lent[name]]:
            del lent[name]  # the cell assigned it: from now on it is the ranks' own
    return {"own": [name for name in namespace if name not in lent]}


def _explain(error: BaseException) -> dict:
    stack = list(traceback.walk_tb(error.__traceback__))[::-1]
    explanation = watch.describe(stack, watch.operations_started()) | {
        "type": type(error).__name__,
        "message": _message(error),
        "exit": error.code if isinstance(error, SystemExit) else None,
        "lost": isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _LOST),
        "exception": None,
        "unsendable": False,
    }
    with contextlib.suppress(Exception):  # not every exception can be pickled, and not every pickle can be loaded
        explanation["exception"] = wire.pack(error.with_traceback(None))
    return explanation


def _message(error: BaseException) -> str:
    try:
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    except BaseException as broken:
        return f"(its message cannot be shown: {type(broken).__name__})"


def _send_outcome(outcome: tuple) -> None:
    kind, value = outcome
    group_ended = _state["backend"] is not None and not dist.is_initialized()
    started = None if group_ended else watch.operations_started()
    left = watch.left_behind() if kind == "value" else None
    try:
        parts = wire.pack(value)
    except Exception as error:
        place, culprit = _unsendable_part(value)
        explanation = _explain(error) | errors.unsendable(place, culprit, error)
        kind, parts = "error", wire.pack(explanation)
    _send(kind, type(value).__name__, started, left, _next_environ(), parts=parts)


def _unsendable_part(value) -> tuple[str, object]:
    """Which part of a container does not travel."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, part in items:
        try:
            wire.pack(part)
        except Exception:
            return f"a {type(value).__name__} whose item [{key!r}] is", part
    return "an object", value


# ---- what a rank shows -----------------------------------------------------------------------------------------------


def display(*objects, display_id=None, **_) -> None:
    """IPython's display(), from a rank: each object appears in the notebook under the rank's label."""
    global _displayed
    if display_id is not None:
        update_display()
    for obj in objects:
        data, metadata = _mimebundle(obj)
        sys.stdout.flush()
        _send("display", data, metadata)
        os.write(1, transcript.DISPLAY.format(_displayed).encode() + b"\n")
        _displayed += 1


def update_display(*_, **__) -> None:
    """What a rank has shown stays. (clear_output, which some libraries call, is the same.)"""
    raise RuntimeError(
        "what a rank has shown cannot be changed or cleared: display() it again, or print(..., end='\\r') to rewrite a "
        "line."
    )


clear_output = update_display


def _mimebundle(obj) -> tuple[dict, dict]:
    if hasattr(obj, "savefig"):  # a matplotlib figure
        image = io.BytesIO()
        obj.savefig(image, format="png", bbox_inches="tight")
        return {"image/png": image.getvalue(), "text/plain": repr(obj)}, {}
    from IPython.core.formatters import DisplayFormatter

    return DisplayFormatter().format(obj)


def _is_rich(value) -> bool:
    return hasattr(value, "savefig") or any(
        hasattr(type(value), f"_repr_{kind}_") for kind in ("mimebundle", "html", "svg", "png", "markdown", "latex")
    )


def _show_open_figures() -> None:
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].show()


# ---- the second thread -----------------------------------------------------------------------------------------------


def _answer(control: socket.socket) -> None:
    try:
        while True:
            wire.read(control)
            wire.write(control, wire.pack(watch.report()))
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)  # the notebook is gone; nothing of this rank stays
