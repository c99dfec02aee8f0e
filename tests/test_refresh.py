"""tools/refresh.py, and the forms (tests/nbval_sanitize.cfg) in which notebooks print what depends on the machine."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from tools import refresh


@pytest.mark.parametrize(
    ("one_machine", "another"),
    [
        ("copy    9.8 ms |", "copy 1,234.5 ms |"),
        ("12.3 us", "12.3 \u00b5s"),
        ("12.3 \u03bcs", "1.23 s"),
        ("read  9.8 GB/s", "read 101.8 MB/s"),
        ("matmul 0.1 TFLOP/s", "matmul 48.9 GFLOP/s"),
        ("9.1 tokens/s", "10,400.0 tokens/s"),
        ("this is 9.8x", "this is  101.2x"),
        ("rank 0  pid  123  cpu", "rank 0  pid 12345  cuda:0"),
        ("<object at 0x7f3a5c0de010>", "<object at 0x1045b3d90>"),
        ("World(4), gloo, 1 CPU thread per rank", "World(4), nccl, 8 CPU threads per rank"),
        ("Cell In[12], line 2", "Cell In[1], line 2"),
        ("this machine: 2 cores, no GPU\nnext", "this machine: 16 cores, 8 x NVIDIA H200\nnext"),
        ("this machine: a\n  L1 1\n  L2 2\nnext", "this machine: b\n  L1 3\nnext"),
    ],
)
def test_machines_may_differ_in(one_machine, another):
    assert refresh.sanitised(one_machine) == refresh.sanitised(another)


@pytest.mark.parametrize(
    "exact",
    [
        "no progress for 60 s",  # a setting: no decimal point
        "3 GB/s, 4,800 GB/s",  # from a datasheet
        "1.5 times as many",  # computed
        "2.5 seconds",
        "seconds 12.34",
        "[6.0, 10.0, 14.0, 18.0]",
        "loss 2.303",
        "0xff",
        "5x, 1.5x2",
        "2.13.0 steps",
        "rank 0 sent 24 bytes",
        "cpus",
    ],
)
def test_exact_values_are_compared(exact):
    assert refresh.sanitised(exact) == exact


def test_a_second_refresh_changes_no_byte(tmp_path):
    path = tmp_path / "n.ipynb"
    cells = [
        "import os, sys, time, ipywidgets\nprint(f'took {time.time() / 1e8:.6f} s, pid {os.getpid()}')",
        "print('error', file=sys.stderr)\nprint('out')\n40 + 2",
        "ipywidgets.IntSlider(3, description='pid 7')",
        "1 / 0",
        "time.time()",
    ]
    notebook = new_notebook(cells=[new_code_cell(source) for source in cells])
    notebook.cells[3].metadata.tags = ["raises-exception"]
    notebook.cells[4].metadata.tags = ["nbval-ignore-output"]
    notebook.cells[4].metadata.scrolled = True
    path.write_text(refresh.as_text(notebook))

    assert refresh.main([path])
    first = path.read_text()
    refresh.main([path])
    assert path.read_text() == first

    once = nbformat.reads(first, as_version=4)
    assert [cell.execution_count for cell in once.cells] == [1, 2, 3, 4, 5]
    assert "scrolled" not in first
    assert once.cells[1].outputs[-1].data["text/plain"] == "42"
    assert once.cells[3].outputs[0].ename == "ZeroDivisionError"

    # Only what changed is stored anew, and what comes after a new cell.
    once.cells[1].source = once.cells[1].source.replace("2", "3")
    once.cells.insert(3, new_code_cell("'new'"))
    path.write_text(refresh.as_text(once))
    assert refresh.main([path])
    twice = nbformat.read(path, as_version=4)
    assert twice.cells[0].outputs == once.cells[0].outputs
    assert twice.cells[1].outputs[-1].data["text/plain"] == "43"
    assert "In[5]" in "".join(twice.cells[4].outputs[0].traceback)
    assert twice.cells[5].outputs[0].data != once.cells[5].outputs[0].data


def test_a_notebook_that_fails_is_left_as_it_was(tmp_path, capsys):
    good, bad = tmp_path / "good.ipynb", tmp_path / "bad.ipynb"
    for path, source in ((bad, "raise ValueError('here')"), (good, "1")):
        path.write_text(refresh.as_text(new_notebook(cells=[new_code_cell(source)])))
    before = bad.read_text()
    assert not refresh.main([bad, good])
    assert bad.read_text() == before
    assert "here" in capsys.readouterr().err
    assert nbformat.read(good, as_version=4).cells[0].execution_count == 1
