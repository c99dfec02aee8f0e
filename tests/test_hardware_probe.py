"""Probes: what is visited, moved and reported. Times are only compared where nothing but a broken probe could lose."""

import dataclasses
import importlib
import re
import shutil
import subprocess
import sys

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lecture_lib.hardware import detect, probe
from lecture_lib.hardware.detect import Cache, Machine
from lecture_lib.hardware.probe import (
    STEPS,
    Chain,
    Level,
    Point,
    Report,
    Transfer,
    between_ranks,
    chain,
    copy_bandwidth,
    curve,
    duration,
    follow,
    latency,
    plateau_sizes,
    rate,
    read_bandwidth,
    working_sets,
)
from tests.bench.hardware import mbw_copy

XEON = Machine("Xeon", 8, 2**36, (Cache(1, 48 * 2**10, 2), Cache(2, 2**21, 2), Cache(3, 105 * 2**20, 64)))
APPLE = Machine("Apple", 8, 2**34, (Cache(1, 2**17, 1), Cache(2, 2**24, 4)))
UNKNOWN = Machine("unknown", 1, 2**32, ())


@settings(deadline=None)
@given(st.integers(2, 500), st.sampled_from([64, 128]))
def test_a_chain_visits_every_line_once(lines, line):
    table, start = chain(lines * line, line)
    places, place = [], start
    for _ in range(lines):
        places.append(place)
        place = int(table[place])
    assert place == start
    assert sorted(places) == [i * line // 8 for i in range(lines)]
    assert table.nbytes == lines * line


@pytest.mark.parametrize("nbytes", [128, 4096, 2**20])
def test_each_load_waits_for_the_one_before(nbytes):
    # Each step must be read after it was written: the steps of one call are the chain, in order.
    walk = Chain(nbytes)
    table, start = chain(nbytes)
    walk.steps[0] = start
    walk._walk(STEPS)
    assert [follow(table, start, n) for n in range(20)] == walk.steps[:20].tolist()
    assert walk.steps[-1] == follow(table, start, STEPS)


def test_a_chain_of_one_line_is_refused():
    with pytest.raises(ValueError, match="at least two lines of 64 bytes, and 64 bytes are fewer"):
        latency(64)


@pytest.mark.parametrize("machine", [XEON, APPLE, UNKNOWN, detect()], ids=lambda machine: machine.cpu)
def test_working_sets_span_all_levels(machine):
    sizes = working_sets(machine)
    assert sizes[0] == 4096 and all(b == 2 * a for a, b in zip(sizes, sizes[1:]))
    last = max((cache.nbytes for cache in machine.caches), default=0)
    assert sizes[-1] >= min(4 * last, 512 * 2**20)
    plateaus = plateau_sizes(machine)
    for cache in machine.caches:
        smaller = [other.nbytes for other in machine.caches if other.level < cache.level]
        assert max(smaller, default=0) < plateaus[f"L{cache.level}"] < cache.nbytes
    assert plateaus["memory"] == sizes[-1]


def test_far_away_is_slower_than_the_first_cache():
    sizes = plateau_sizes(detect())
    # 32 MiB: out of the first cache on every processor, and soon set up.
    first, memory = curve([next(iter(sizes.values())), min(sizes["memory"], 2**25)], rounds=1)
    assert first.bandwidth > memory.bandwidth
    assert 0 < first.latency < memory.latency


def test_reading_leaves_torch_as_it_was():
    import torch

    before = torch.get_num_threads()
    assert read_bandwidth(4096, seconds=0.01) > 0
    assert torch.get_num_threads() == before


def test_between_ranks():
    before = {child.pid for child in psutil.Process().children()}
    files = psutil.Process().num_fds()
    copy, shared, loopback = between_ranks(2**20, seconds=0.02)
    assert [t.name for t in (copy, shared, loopback)] == [
        "copy, one process",
        "shared memory, two processes",
        "loopback socket",
    ]
    assert all(t.nbytes == 2**20 and t.bandwidth > 0 for t in (copy, shared, loopback))
    assert copy.latency is None and shared.latency > 0 and loopback.latency > 0
    assert {child.pid for child in psutil.Process().children()} == before
    assert psutil.Process().num_fds() <= files + 1  # the random number generator of the system may be open now


def test_what_travels_between_ranks_arrives():
    import mmap
    import socket
    import tempfile

    from lecture_lib.hardware import echo
    from lecture_lib.hardware.probe import _ways

    with tempfile.TemporaryFile() as file, socket.create_server(("127.0.0.1", 0)) as server:
        file.truncate(1000)
        shared = np.frombuffer(mmap.mmap(file.fileno(), 1000), np.uint8)
        arguments = map(str, (server.getsockname()[1], file.fileno(), 1000))
        other = subprocess.Popen([sys.executable, echo.__file__, *arguments], pass_fds=[file.fileno()])
        server.settimeout(20)
        with server.accept()[0] as connection:
            for way in _ways(connection, shared, 1000).values():
                for n in (1, 999, 1000):
                    way(n)
            assert shared.tolist() == [1] * 1000
            connection.sendall(echo.STOP)
        assert other.wait(10) == 0


def test_probe_reports_every_level():
    # A small machine, so that it takes a moment: two caches that every processor has.
    small = dataclasses.replace(detect(), caches=(Cache(1, 2**15, 1), Cache(2, 2**18, 1)))
    report = probe(small, device="cpu")
    assert [level.name for level in report.levels] == ["L1", "L2", "memory"]
    assert [point.nbytes for point in report.curve] == [2**power for power in range(12, 21)]
    assert len(report.transfers) == 3
    assert len(report.table().splitlines()) == 1 + 3 + 3
    assert len(report.curve_table().splitlines()) == 1 + 9


REPORT = Report(
    "a CPU",
    (Point(4096, 100e9, 1.5e-9), Point(2**20, 10e9)),
    (Level("L1", 4096, 100e9, 1.5e-9), Level("memory", 2**20, 10e9, 90e-9)),
    (Transfer("copy", 2**24, 5e9), Transfer("loopback socket", 2**24, 2.5e9, 25e-6)),
)


def test_table():
    assert [line.split() for line in str(REPORT).splitlines()] == [
        ["where", "bandwidth", "latency", "slower"],
        ["L1", "(4", "KiB)", "100.0", "GB/s", "1.5", "ns", "1.0x"],
        ["memory", "(1", "MiB)", "10.0", "GB/s", "90.0", "ns", "10.0x"],
        ["copy", "(16", "MiB)", "5.0", "GB/s", "20.0x"],
        ["loopback", "socket", "(16", "MiB)", "2.5", "GB/s", "25.0", "µs", "40.0x"],
    ]
    assert [line.split() for line in REPORT.curve_table().splitlines()][2] == ["1", "MiB", "10.0", "GB/s"]


def test_numbers_have_the_forms_that_notebooks_compare():
    assert [rate(r) for r in (3.35e12, 12.34e9, 40e6)] == ["3350.0 GB/s", "12.3 GB/s", "0.0 GB/s"]
    assert [duration(s) for s in (1.23e-9, 999.96e-9, 25e-6, 0.0123, 2.0, None)] == [
        "1.2 ns",
        "1.0 µs",
        "25.0 µs",
        "12.3 ms",
        "2.0 s",
        "",
    ]
    assert all(re.fullmatch(r"\d+\.\d (ns|µs|ms|s)", duration(10.0**-n)) for n in range(10))


def test_devices():
    with pytest.raises(ValueError, match="device must be 'auto', 'cpu' or 'cuda', and is 'gpu'"):
        probe(UNKNOWN, device="gpu")
    with pytest.raises(ValueError, match="needs a GPU, and this machine has none"):
        probe(UNKNOWN, device="cuda")


def test_the_chase_for_gpus_follows_the_chain(monkeypatch):
    pytest.importorskip("triton", reason="Triton is for Linux only")
    import torch

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, "lecture_lib.hardware.chase", raising=False)
    chase = importlib.import_module("lecture_lib.hardware.chase").chase
    table, start = chain(8192, 128)
    out = torch.tensor([start])
    chase[(1,)](torch.from_numpy(table), out, 37, num_warps=1)
    assert out.item() == follow(table, start, 37)


def test_copies_like_mbw():
    """python -m tests.bench.hardware compares more, with ratios; here only what no busy neighbour can explain."""
    if not shutil.which("mbw"):
        pytest.skip("mbw is not installed (apt-get install mbw)")
    ratios = [copy_bandwidth(2**26) / mbw_copy(2**26) for _ in range(3)]
    assert 0.4 < sorted(ratios)[1] < 2.5
