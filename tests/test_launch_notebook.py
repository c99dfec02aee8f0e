"""%%ranks and World as a person in a notebook meets them: a real kernel, driven as JupyterLab drives it."""

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from notebook_kernel import Kernel

from lecture_lib.launch.magic import NamesUsed, parse
from lecture_lib.launch.transcript import KEEP

REPO = Path(__file__).parents[1]
START = "%load_ext lecture_lib\nfrom lecture_lib import World, RankError\nworld = World(4, timeout=20)"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    os.environ.pop("PYTEST_CURRENT_TEST", None)  # the kernel must not take itself for one that nbval runs
    kernel = Kernel(tmp_path_factory.mktemp("notebook"))
    assert not kernel.run("%load_ext lecture_lib").error
    yield kernel
    kernel.close()


@pytest.fixture
def as_it_is(kernel):
    """The kernel with whatever world it has by now, for cells that use no name of another test."""
    cell = kernel.run("from lecture_lib import World\nif 'world' not in globals() or world.closed: world = World(4)")
    assert not cell.error
    return kernel


@pytest.fixture
def ranks(kernel):
    kernel.run("if 'world' in globals(): world.close()")
    assert not kernel.run(START).error
    return kernel


def by_rank(*texts):
    return "".join(f"rank {rank} | {text}\n" for rank, text in enumerate(texts))


def test_ranks_before_a_world_is_one_sentence(kernel):
    kernel.run("if 'world' in globals(): world.close()")
    cell = kernel.run("%%ranks\nx = 1")
    assert cell.ename == "RuntimeError" and "run  world = World(4)  first" in cell.evalue


def test_the_example_of_the_course(ranks):
    code = "%%ranks\nx = torch.arange(4.) + rank\ndist.all_reduce(x); x"
    total = "tensor([ 6., 10., 14., 18.])"
    assert ranks.run(code).text == by_rank(*[total] * 4)
    assert ranks.run("%%ranks\nx.sum().item() + world_size").text == by_rank(*["52.0"] * 4)
    assert ranks.run("%%ranks\nx;").text == ""
    assert ranks.run("%%ranks\nprint(device)").text == by_rank(*["cpu"] * 4)


def test_names_are_borrowed_by_value_and_again_when_bound_anew(ranks):
    ranks.run("scale = 3\nlog = []\ndef double(v): return 2 * v * scale")
    assert ranks.run("%%ranks\nlog.append(rank)\nprint(double(rank), log)").text == by_rank(
        "0 [0]", "6 [1]", "12 [2]", "18 [3]"
    )
    assert ranks.run("print(log)").text == "[]\n", "by value: the notebook's list is its own"
    assert ranks.run("%%ranks\nlog.append(9); log").text == by_rank("[0, 9]", "[1, 9]", "[2, 9]", "[3, 9]")
    ranks.run("scale = 4")
    assert ranks.run("%%ranks\nscale").text == by_rank(*"4444")
    ranks.run("%%ranks\nscale = 10 + rank")
    ranks.run("scale = 5")
    assert ranks.run("%%ranks\nscale").text == by_rank("10", "11", "12", "13"), "assigned by a cell: the ranks' own"
    assert ranks.run("%%ranks\nprint([scale for _ in range(1)])").text == by_rank("[10]", "[11]", "[12]", "[13]")


def test_a_name_that_only_some_ranks_lack_comes_from_the_notebook_there(ranks):
    ranks.run("y = 'notebook'")
    ranks.run("%%ranks\nif rank == 1: y = 'mine'")
    assert ranks.run("%%ranks\ny").text == by_rank("'notebook'", "'mine'", "'notebook'", "'notebook'")


def test_names_of_the_notebook_shell_stay_there(ranks):
    cell = ranks.run("%%ranks\nif rank == 1: exit(3)")
    assert cell.evalue.startswith("rank 1 called sys.exit(3)") or "NameError" in cell.evalue


def test_a_name_that_cannot_travel_is_named(ranks):
    ranks.run("import threading\nlock = threading.Lock()")
    cell = ranks.run("%%ranks\nwith lock: pass")
    assert "this cell uses 'lock', a lock, from the notebook" in cell.evalue


def test_classes_of_cells_and_isinstance(ranks):
    ranks.run(
        "import dataclasses, enum\n"
        "class Colour(enum.Enum):\n    RED = 1\n"
        "@dataclasses.dataclass\nclass P:\n    x: int\n    c: Colour = Colour.RED\n"
        "def make():\n    return P(1)\n"
        "outs = world.run(make)"
    )
    assert ranks.run("print(all(isinstance(o, P) and o.c is Colour.RED for o in outs), outs[0])").text == (
        "True P(x=1, c=<Colour.RED: 1>)\n"
    )
    ranks.run("@dataclasses.dataclass\nclass P:\n    x: int\n    y: int = 8\nouts = world.run(make)")
    assert ranks.run("print(isinstance(outs[0], P), outs[0])").text == "True P(x=1, y=8)\n"


def test_an_error_shows_the_cells_own_lines(ranks):
    ranks.run("def check(v):\n    assert v < 2, f'{v} is too big'")
    count = ranks.run("1").messages[1][1]["execution_count"]
    cell = ranks.run("%%ranks\ny = 1\n\ncheck(rank)\ndist.barrier()")
    lines = cell.evalue.splitlines()
    assert cell.ename == "RankError" and lines[0] == "rank 2 raised AssertionError: 2 is too big"
    assert lines[1:5] == [
        f"  Cell In[{count + 1}], line 4",
        "    check(rank)",
        f"  Cell In[{count - 1}], line 2, in check",
        "    assert v < 2, f'{v} is too big'",
    ]
    assert lines[5].endswith(f"at Cell In[{count + 1}], line 5: dist.barrier()")
    assert "world.py" not in cell.error, "none of the library's own lines"
    assert ranks.run("%%ranks\nrank").text == by_rank(*"0123")


def test_figures_of_a_cell_that_fails_do_not_appear_in_the_next(ranks):
    ranks.run("%%ranks\nimport matplotlib.pyplot as plt\nplt.plot([1])\n1 / 0")
    assert ranks.run("%%ranks\nprint(1)").text == by_rank(*"1111")


def test_displays_and_figures_appear_under_their_rank(as_it_is):
    cell = as_it_is.run(
        "%%ranks\nimport matplotlib.pyplot as plt\nfrom IPython.display import HTML\nprint('a')\n"
        "if rank == 1:\n    display(HTML('<b>bold</b>'))\n    plt.plot([1, 2]); plt.show()\nprint('b')"
    )
    shown = [content["data"] for kind, content in cell.messages if kind == "display_data"]
    assert [next(iter(data)) if len(data) == 1 else sorted(data)[0] for data in shown] == [
        "text/plain",
        "text/html",
        "text/plain",
        "image/png",
        "text/plain",
    ]
    assert cell.text.startswith("rank 0 | a\nrank 0 | b\nrank 1 | a\nrank 1 | <IPython.core.display.HTML object>\n")
    assert shown[2]["text/plain"].startswith("rank 1 | <Figure size")
    assert shown[4]["text/plain"].splitlines()[0] == "rank 1 | b"


def test_display_of_the_notebook_works_in_a_function_that_ranks_run(as_it_is):
    as_it_is.run("from IPython.display import display, Markdown\ndef show(): display(Markdown('*hi*'))")
    kinds = [list(c["data"]) for k, c in as_it_is.run("world.run(show)").messages if k == "display_data"]
    assert sum("text/markdown" in kind for kind in kinds) == 4


def test_lines_arrive_live_and_end_in_rank_order(as_it_is):
    seen = []
    code = "%%ranks\nimport time\nprint('first')\ntime.sleep(1.2 - 0.3 * rank)\nprint('last')"
    cell = as_it_is.run(code, on_message=lambda cell: seen.append(cell.text))
    assert cell.text == "".join(f"rank {r} | first\nrank {r} | last\n" for r in range(4))
    assert "".join(f"rank {r} | first\n" for r in range(4)) in seen, "shown before anybody had finished"
    outputs = [kind for kind, _ in cell.messages if kind == "display_data"]
    assert len(outputs) == 1, "one output, redrawn: the same stored bytes for a fast run and a slow one"


@pytest.mark.parametrize("flood", ["for i in range(100_000): print('line', i)", "print('x' * 50_000_000)"])
def test_a_flood_is_cut_in_the_middle_and_says_how_much(ranks, flood):
    before = psutil.Process(ranks.pid).memory_info().rss
    cell = ranks.run(f"%%ranks\nif rank == 2:\n    {flood}\nprint('last')")
    assert psutil.Process(ranks.pid).memory_info().rss - before < 30e6
    sent = sum(len(content["data"]["text/plain"]) for kind, content in cell.messages if "display_data" in kind)
    redraws = sum("display_data" in kind for kind, _ in cell.messages)
    assert sent < 8 * KEEP * redraws and redraws < 100
    of_two = [line.removeprefix("rank 2 | ") for line in cell.text.splitlines() if line.startswith("rank 2")]
    (note,) = [line for line in of_two if "not shown" in line]
    lines, size = (int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", note))
    assert of_two[-1] == "last"
    if "line" in flood:
        assert of_two[0] == "line 0" and lines + len(of_two) - 1 == 100_001
    else:
        assert size + len("".join(of_two)) - len(note) + len("\n") * (lines == 0) + len("\n") == 50_000_006


def test_interrupt_gives_the_prompt_back_and_fresh_ranks(ranks):
    for code in (
        "%%ranks\nif rank: dist.barrier()\nwhile True: pass",
        "world.run(lambda: __import__('time').sleep(60))",
    ):
        before = eval(ranks.run("print(world.pids)").text)
        request = ranks.start(code)
        time.sleep(0.7)
        start = time.monotonic()
        os.killpg(os.getpgid(ranks.pid), signal.SIGINT)
        cell = ranks.finish(request, timeout=10)
        assert time.monotonic() - start < 5
        assert cell.ename == "KeyboardInterrupt"
        assert not any(alive(pid) for pid in before)
        assert ranks.run("%%ranks\nrank").text == by_rank(*"0123")


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def ours_of(kernel_pid):
    return [process.pid for process in psutil.Process(kernel_pid).children(recursive=True)]


def leftovers(temporary):
    """What lies in a kernel's own temporary folder and in shared memory."""
    ours = [name for name in os.listdir(temporary) if name.startswith("lecture_lib-")]
    return set(ours) | set(os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else [])


@pytest.mark.parametrize(
    "end, state",
    [
        ("SIGKILL", "at work"),
        ("shutdown", "at work"),
        ("restart", "idle"),
        ("SIGKILL", "the server still imports"),
    ],
)
def test_a_kernel_that_ends_leaves_nothing(tmp_path, end, state):
    before = leftovers(tmp_path)
    kernel = Kernel(tmp_path, TMPDIR=str(tmp_path))
    try:
        if state == "the server still imports":
            kernel.run("import lecture_lib")
        else:
            assert not kernel.run(START).error
            if state == "at work":  # two in a collective, one in Python, and one in C that keeps the GIL to itself
                kernel.start(
                    "%%ranks\nimport ctypes, time\nif rank > 1: dist.barrier()\nif rank: time.sleep(100)\n"
                    "ctypes.PyDLL(None).sleep(100)"
                )
            time.sleep(0.5)
        pids = ours_of(kernel.pid)
        assert pids
        if end == "SIGKILL":
            os.kill(kernel.pid, signal.SIGKILL)
        elif end == "restart":
            kernel.manager.restart_kernel(now=False)
        else:
            kernel.manager.shutdown_kernel(now=False)
        deadline = time.monotonic() + 20
        while any(map(alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not [psutil.Process(pid).cmdline() for pid in pids if alive(pid)]
        while leftovers(tmp_path) - before and time.monotonic() < deadline:
            time.sleep(0.02)
        assert leftovers(tmp_path) <= before
    finally:
        kernel.close()


def test_ranks_die_with_a_killed_fork_server_and_the_next_world_has_a_new_one(ranks):
    pids = eval(ranks.run("print(world.pids)").text)
    ranks.run("import os, signal; from lecture_lib.launch import fork_server")
    cell = ranks.run(
        "os.kill(fork_server.running().process.pid, signal.SIGKILL)\nimport time; time.sleep(0.3)\nworld.run(lambda: 1)"
    )
    assert cell.ename == "RankError"
    assert not any(map(alive, pids))
    folder = ranks.run("print(fork_server.running().folder)").text.strip()
    assert os.path.isdir(folder)
    assert ranks.run("print(world.run(lambda: 1))").text == "[1, 1, 1, 1]\n"


def used(code):
    names = NamesUsed(parse(code, "<cell>"))
    return " ".join(sorted(names.now)) + " | " + " ".join(sorted(names.later))


@pytest.mark.parametrize(
    "code, now_and_later",
    [
        ("x = y + 1\nx", "y | "),
        ("x = x + 1", "x | "),
        ("x += 1", "x | "),
        ("x;", "x | "),
        ("for i in range(n): i", "n range | "),
        ("for i in []: t = i\nt", "t | "),
        ("if rank == 0: s = 10\nprint(s)", "print rank s | "),
        ("if rank == 0: s = 10\nelse: s = 11\nprint(s)", "print rank | "),
        ("if rank == 0: s = 10\nelse: print(s)", "print rank s | "),
        ("while rank: t = 1\nt", "rank t | "),
        ("with a as b: c = b\nc", "a | "),
        ("try: t = 1\nexcept E as e: print(e)\nt", "E print t | "),
        ("try: t = 1\nexcept E: t = 2\nt", "E | "),
        ("match v:\n  case [h, *r]: h, r\n  case {'k': m, **o} if q: m, o\n  case X() as z: z", "X q v | "),
        ("b = 1\ndel b\nb", "b | "),
        ("def f(a):\n    b = a\n    return b + c + len(d)\nc = 1", " | d len"),
        ("class A(Base):\n    z = q\n    def m(self): return self.r + s", "Base | q s"),
        ("[k * m for k in ks]", "ks m | "),
        ("import numpy as np\nnp.zeros(3)", " | "),
        ("lambda: later", " | later"),
        ("if (n := 3) > 2: n", " | "),
        ("x[i].a = 3", "i x | "),
    ],
)
def test_which_names_a_cell_takes_from_outside(code, now_and_later):
    assert used(code) == now_and_later


def test_borrowed_names_are_as_new_as_the_notebook_s(ranks):
    """A function, what it calls and what a list holds may change without a name being bound again."""
    ranks.run("%%ranks\nif rank == 0: s = 10")
    ranks.run("s = 20")
    assert [line.split("| ")[1] for line in ranks.run("%%ranks\ns").text.splitlines()] == ["10", "20", "20", "20"]
    ranks.run("def g(): return 1\ndef f(): return g()\nitems = [1]")
    assert "rank 1 | (1, [1])" in ranks.run("%%ranks\nf(), items").text
    ranks.run("def g(): return 2\nitems.append(2)")
    assert "rank 1 | (2, [1, 2])" in ranks.run("%%ranks\nf(), items").text
    assert not ranks.run("%%ranks\ndef step(): return rate").error
    ranks.run("rate = 3")
    assert "rank 3 | 3" in ranks.run("%%ranks\nstep()").text
    ranks.run("rate = 4")
    assert "rank 3 | 4" in ranks.run("%%ranks\nstep()").text
    # What ranks did to a borrowed object stays, as long as the notebook's own is what it was.
    ranks.run("import torch\nz = torch.zeros(1)")
    ranks.run("%%ranks\nz.add_(5)")
    assert "rank 2 | tensor([5.])" in ranks.run("%%ranks\nz").text
    ranks.run("z = torch.zeros(1)")
    assert "rank 2 | tensor([0.])" in ranks.run("%%ranks\nz").text


@pytest.mark.parametrize(
    "code, says",
    [
        ("%time x = 1", "%time is a command of the notebook, and ranks run Python only"),
        ("!ls", "!ls is a command of the notebook"),
        ("await f()", "a rank cannot await at the top level of a cell"),
        ("x = = 1", "invalid syntax"),
        ("x = (1", "'(' was never closed\n  Cell In["),
        ("import threading\nlock = threading.Lock()\nlock", ""),
    ],
)
def test_a_cell_that_cannot_run_is_told_in_a_few_lines(as_it_is, code, says):
    cell = as_it_is.run("%%ranks\n" + code)
    if not says:
        assert not cell.error
        return
    assert says in cell.error and "lecture_lib" not in cell.error and len(cell.error.splitlines()) < 8


def test_a_name_that_cannot_travel_and_a_busy_world_show_no_frames_of_ours(ranks):
    ranks.run("import threading; lock = threading.Lock()")
    for code in ("%%ranks\nlock", "world.run(lambda: lock)", "world.run(3)", "%%ranks 3\n1"):
        cell = ranks.run(code)
        assert cell.error and "lecture_lib" not in cell.error, cell.error


@pytest.mark.parametrize("code", ["rank; # quiet", "rank;\n# quiet", "rank ;"])
def test_a_semicolon_silences_the_last_value_as_in_ipython(as_it_is, code):
    assert as_it_is.run("%%ranks\n" + code).text == ""
    assert "rank 1 | 1" in as_it_is.run("%%ranks\nrank # ;").text


def test_interrupts_in_quick_succession_leave_a_world_that_works(ranks):
    for pause in (0.0, 0.02, 0.05, 0.1, 0.2):
        interrupts = [pause] * 3

        def interrupt_once_all_have_begun(cell, interrupts=interrupts):
            while interrupts and cell.text.count("begun") == 4:
                ranks.manager.interrupt_kernel()
                time.sleep(interrupts.pop())

        code = "%%ranks\nimport time; print('begun'); time.sleep(100)"
        cell = ranks.run(code, on_message=interrupt_once_all_have_begun)
        # An interrupt that meets IPython while it formats the traceback of the first leaves one line of it.
        assert "KeyboardInterrupt" in (cell.error or cell.text) and "lecture_lib" not in cell.error
        time.sleep(0.3)  # an interrupt that came late must not hit the next cell
        assert ranks.run("print(world.run(lambda: 1))").text == "[1, 1, 1, 1]\n"
    request = ranks.start("for _ in range(20): world.restart()")
    for _ in range(5):
        time.sleep(0.1)
        ranks.manager.interrupt_kernel()
    ranks.finish(request)
    time.sleep(0.3)
    assert ranks.run("print(world.run(lambda: 1))").text == "[1, 1, 1, 1]\n"
