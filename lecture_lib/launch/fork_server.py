"""A process that has imported torch, and forks a rank from itself in milliseconds.

    notebook kernel  --(1 byte + 4 file descriptors)-->  fork server  --fork-->  rank

The four descriptors are the rank's whole connection to the world:

    tasks       functions in, results out
    control     "what are you doing?" in, the answer out; end of file here ends the rank
    output      everything that the rank or its children write to file descriptors 1 and 2
    last_words  how the rank ended: its own report if there was time for one, then the server's line "status 9"

The server is single-threaded and never touches a GPU, so forking it is safe. It lives in a process group of its own, so
the interrupt that Jupyter sends to the kernel's group does not reach it. When the kernel is gone, however it went, the
server kills every rank, removes its folder and ends.
"""

import atexit
import contextlib
import gc
import importlib
import multiprocessing
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from lecture_lib.launch import wire

# torch._dynamo: DistributedDataParallel and optimizers import it at first use, a second each time unless it is here.
PRELOAD = ("torch", "torch._dynamo", "torch.distributed.tensor", "lecture_lib.launch.rank")

# Parts of the course that a notebook has imported are imported here too, once and not on each rank; not these, which no
# rank needs (figures), which set up Triton for the devices that they find, or which are here already (launch).
OWN = "lecture_lib."
NOT_HERE = tuple(f"{OWN}{part}" for part in ("figures", "kernels", "collectives.shared", "hardware.chase", "launch"))

_server = None


# ---- in the notebook's kernel ----------------------------------------------------------------------------------------


def start_in_background() -> None:
    """Start the server unless this process is itself a rank, the server, a child of somebody else or on Windows."""
    child = multiprocessing.parent_process() is not None
    if os.name == "posix" and not child and "RANK" not in os.environ and "LECTURE_LIB_FORK_SERVER" not in os.environ:
        running()


def running() -> "ForkServer":
    """The server of this process; a new one if there is none, or if it has died."""
    global _server
    if _server is not None and _server.owner == os.getpid() and _server.process.poll() is not None:
        _server.clean_up()
        _server = None
    if _server is None or _server.owner != os.getpid():
        _server = ForkServer()
    return _server


class ForkServer:
    def __init__(self):
        self.owner = os.getpid()
        self.imported: set[str] = set()
        self.socket, theirs = socket.socketpair()
        self.log = tempfile.TemporaryFile()  # has no name, so nothing is left of it
        self.folder = tempfile.mkdtemp(prefix="lecture_lib-")  # for rendezvous; the server removes it when it ends
        package = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        with theirs:
            self.process = subprocess.Popen(
                # -P: a file torch.py beside the notebook must not be taken for torch.
                [
                    sys.executable,
                    "-P",
                    "-c",
                    f"from {__name__} import main; main({theirs.fileno()}, {self.owner}, {self.folder!r})",
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                process_group=0,
                # One thread for numpy's BLAS: its pool would start at import, and a forked pool is dead.
                env={
                    **os.environ,
                    "PYTHONPATH": path,
                    "LECTURE_LIB_FORK_SERVER": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                    "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES",  # else macOS ends forked users of its frameworks
                },
            )
        atexit.register(self.clean_up)

    def import_as_here(self) -> None:
        """Have the server import what this process has imported of the course, for the ranks that it forks next."""
        names = {name for name in list(sys.modules) if name.startswith(OWN) and not name.startswith(NOT_HERE)}
        if names - self.imported:
            self.socket.sendall(b"i")
            wire.write(self.socket, [" ".join(sorted(names - self.imported)).encode()])
            self.imported |= names

    def fork(self, fds: list[int]) -> None:
        """Ask for a rank that owns these four descriptors. What becomes of it is told through ``last_words``."""
        socket.send_fds(self.socket, [b"f"], fds)

    def clean_up(self) -> None:
        """End the server, and do its last duty if it was killed and could not."""
        if self.owner == os.getpid():
            atexit.unregister(self.clean_up)
            self.socket.close()
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
            shutil.rmtree(self.folder, ignore_errors=True)
            self.log.close()

    def why_it_ended(self) -> str:
        """The last lines that the server wrote, for an error message."""
        self.log.seek(0)
        return self.log.read().decode(errors="replace").strip()[-2000:]


# ---- in the server ---------------------------------------------------------------------------------------------------


def main(fd: int, parent: int, folder: str) -> None:
    kernel = socket.socket(fileno=fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    children: dict[int, int] = {}  # pid -> its last_words
    try:
        with _end_with(parent):
            for module in PRELOAD:
                importlib.import_module(module)
        _freeze()
        _serve(kernel, parent, folder, children)
    finally:
        for pid in children:
            _kill_group(pid)
        shutil.rmtree(folder, ignore_errors=True)
        if sys.exc_info()[0] in (None, SystemExit):
            os._exit(0)  # taking the interpreter apart would take longer than all of the above


def _freeze() -> None:
    """The collector would write to every object's header, and so copy every page into every rank."""
    gc.collect()
    gc.freeze()


def _import(names: list[str]) -> None:
    for name in names:
        with contextlib.suppress(Exception):  # the rank that needs it will say what is wrong
            importlib.import_module(name)
    _freeze()


@contextlib.contextmanager
def _end_with(parent: int):
    """While torch is being imported nobody reads the socket, so look now and then whether the kernel still lives."""

    def check(*_):
        if os.getppid() != parent:
            sys.exit(0)

    signal.signal(signal.SIGALRM, check)
    signal.setitimer(signal.ITIMER_REAL, 0.25, 0.25)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _serve(kernel: socket.socket, parent: int, folder: str, children: dict[int, int]) -> None:
    wake, wake_write = os.pipe()  # a child's end interrupts select() through this pipe
    os.set_blocking(wake, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while os.getppid() == parent:
        readable, _, _ = select.select([kernel, wake], [], [], 0.5)
        if wake in readable:
            os.read(wake, 4096)
        _reap(children)
        if kernel in readable:
            request, fds, _, _ = socket.recv_fds(kernel, 1, 4)
            if not request:
                return  # end of file: the kernel is gone
            if request == b"i":
                _import(wire.read(kernel)[0].decode().split())
                continue
            _fork_rank(fds, [kernel.fileno(), wake, wake_write], folder, children)


def _fork_rank(fds: list[int], ours: list[int], folder: str, children: dict[int, int]) -> None:
    tasks, control, output, last_words = fds
    try:
        pid = os.fork()
    except OSError as error:
        os.write(last_words, f"the operating system refused to start another process: {error}\n".encode())
        os.close(last_words)
    else:
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for fd in [*ours, *children.values()]:
                os.close(fd)
            from lecture_lib.launch import rank

            rank.main(tasks, control, output, last_words, folder)  # does not return
        with contextlib.suppress(OSError):  # the rank does the same; whoever is first
            os.setpgid(pid, pid)
        children[pid] = last_words
    for fd in (tasks, control, output):
        os.close(fd)


def _reap(children: dict[int, int]) -> None:
    for pid in list(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            _kill_group(pid)  # its DataLoader workers and the like
            last_words = children.pop(pid)
            with contextlib.suppress(OSError):  # the kernel may have stopped listening
                os.write(last_words, f"status {os.waitstatus_to_exitcode(status)}\n".encode())
            os.close(last_words)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
