"""The cost model against counted messages, the benchmark's table, and collectives over shared memory."""

import math
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lecture_lib import collectives as c
from lecture_lib.collectives import bench, cost, shared
from lecture_lib.kernels import SymmetricBuffer
from lecture_lib.trace import ledger

MACHINE = cost.Fit(alpha=1e-3, beta=1e-9, residual=0.0)


@given(n=st.integers(1, 64), name=st.sampled_from(c.__all__))
def test_every_algorithm_has_a_cost(n, name):
    steps, share, messages, total = cost.cost(name, n)
    if n == 1:
        assert steps == share == messages == total == 0
    else:
        assert steps >= 1 and share > 0 and messages >= n - 1 and total >= share / 2
        alone = cost.cost(name, n).on(1)
        assert alone.steps >= messages and alone.share >= total


@given(n=st.integers(2, 64))
def test_no_algorithm_does_with_less_than_the_lower_bound(n):
    """(n-1)/n S leave and enter a rank of an all-gather or reduce-scatter, twice that for an all-reduce, counting both
    directions of a link as one where both are used; and log2(n) steps reach n ranks."""
    for name in c.__all__:
        steps, share, *_ = cost.cost(name, n)
        bound = (
            (n - 1) / n * (2 if name.endswith("all_reduce") else 1) * (0.5 if "bidirectional" in name and n > 2 else 1)
        )
        if not name.endswith("all_to_all") and name not in ("naive_gather", "naive_scatter", "naive_broadcast"):
            assert steps >= math.log2(n) - 1e-9 or name == "naive_all_gather"
        if name not in ("ring_broadcast", "ring_reduce"):
            assert share >= bound - 1e-9
    assert cost.cost("ring_all_reduce", n).share == pytest.approx(2 * (n - 1) / n)


@pytest.mark.parametrize("name", [name for name in c.__all__ if name.endswith(("all_reduce", "all_gather"))])
def test_the_model_s_bytes_are_those_that_the_busiest_rank_sends(world, name):
    count = 4 * 16

    def step():
        x = torch.ones(count)
        arguments = (x,) if name.endswith("all_reduce") else (x, torch.ones(count // 4))
        with ledger() as led:
            getattr(c, name)(*arguments)
        return led.bytes_sent

    busiest = max(world.run(step))
    share = cost.cost(name, 4).share * (2 if "bidirectional" in name else 1)
    if name == "naive_all_reduce":
        share /= 2  # in one direction at a time: first all to rank 0, then all from it
    if name == "tree_all_reduce":
        share /= 2
    if name == "naive_all_gather":
        share -= 3 / 4  # what rank 0 receives first
    assert busiest == share * 4 * count


@pytest.mark.parametrize("cores", [None, 1, 2, 8])
def test_a_fit_finds_the_machine_that_made_the_times(cores):
    MACHINE = cost.Fit(alpha=1e-3, beta=1e-9, cores=cores)
    rows = [
        bench.Row("all_reduce", name, n, nbytes, MACHINE.seconds(name, n, nbytes))
        for name in ("ring_all_reduce", "tree_all_reduce")
        for n in (2, 4)
        for nbytes in (4, 1 << 12, 1 << 20, 1 << 24)
    ]
    found = cost.fit(rows, cores)
    assert found.alpha == pytest.approx(1e-3) and found.beta == pytest.approx(1e-9) and found.residual < 1e-9
    with pytest.raises(ValueError, match="at least 2 measurements and got 1"):
        cost.fit(rows[:1])


def test_on_too_few_cores_the_tree_always_wins():
    """Both move the same bytes in all, and the tree does it in fewer messages."""
    assert cost.crossover("tree_all_reduce", "ring_all_reduce", 4, MACHINE._replace(cores=1)) == math.inf


@given(n=st.integers(3, 64))
def test_both_take_the_same_time_at_the_crossover(n):
    size = cost.crossover("tree_all_reduce", "ring_all_reduce", n, MACHINE)
    tree, ring = (MACHINE.seconds(name, n, size) for name in ("tree_all_reduce", "ring_all_reduce"))
    assert size == 0 or tree == pytest.approx(ring)
    if size:
        assert MACHINE.seconds("tree_all_reduce", n, size / 2) < MACHINE.seconds("ring_all_reduce", n, size / 2)


def test_a_name_that_does_not_exist_is_told():
    with pytest.raises(ValueError, match="there is no algorithm 'star'"):
        cost.cost("star", 4)
    with pytest.raises(ValueError, match="6 ranks cannot be 4 to a node"):
        cost.cost("hierarchical_all_reduce", 6, 4)
    with pytest.raises(ValueError, match="there is no collective 'all'"):
        bench.measure("all")
    with pytest.raises(ValueError, match="there is no 'star' for all_reduce; choose from torch, shared, "):
        bench.measure("all_reduce", ["star"])


@pytest.mark.parametrize(
    "collective, n, busbw",
    [("all_reduce", 4, 1.5), ("all_gather", 4, 0.75), ("reduce_scatter", 8, 0.875), ("broadcast", 4, 1.0)],
)
def test_bandwidths_are_those_of_nccl_tests(collective, n, busbw):
    row = bench.Row(collective, "torch", n, 1 << 30, 1.0)
    assert row.algbw == 2**30 and row.busbw == busbw * 2**30


@pytest.mark.parametrize("collective", bench.COLLECTIVES)
def test_every_collective_and_algorithm_is_measured(world, collective):
    rows = world.run(bench.measure, collective, None, (64,))
    assert all(other == rows[0] for other in rows), "the slowest rank's time, on every rank"
    assert [row.algorithm for row in rows[0]] == bench.algorithms_of(collective)
    assert all(row.seconds > 0 and row.nbytes == 64 and row.ranks == 4 for row in rows[0])
    assert len(bench.table(rows[0]).splitlines()) == 2 + len(rows[0])


def lines_of(*command):
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "lecture_lib.collectives.bench", "--ranks", "2"],
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "lecture_lib.collectives.bench"],
    ],
)
def test_the_benchmark_is_a_program(command):
    title, head, *rows = lines_of(
        sys.executable,
        *command,
        "--collective",
        "all_gather",
        "--algorithm",
        "torch",
        "ring_all_gather",
        "--max-bytes",
        "16",
    )
    assert title == "all_gather, 2 ranks, float32" and head.split() == ["size", "algorithm", "time", "algbw", "busbw"]
    assert len(rows) == 4
    assert all(
        re.fullmatch(r" *\d+ B  (torch|ring_all_gather) +[\d.]+ µs +[\d.]+ GB/s +[\d.]+ GB/s", row) for row in rows
    )


def test_sizes_in_words():
    assert [bench.size(4**k) for k in (1, 5, 8, 13, 15)] == ["4 B", "1 KiB", "64 KiB", "64 MiB", "1 GiB"]


# ---- shared memory ---------------------------------------------------------------------------------------------------


def over_shared_memory(count, dtype, op):
    """What differs from torch.distributed, on this rank."""
    n, rank = dist.get_world_size(), dist.get_rank()
    start = ((torch.arange(count) * 5 // 3 + rank) % 2 + 1).to(dtype)
    theirs, wrong = start.clone(), []
    dist.all_reduce(theirs, op)

    def same(what, ours, expected):
        if not torch.equal(ours, expected):
            wrong.append((what, ours.tolist()[:8], expected.tolist()[:8]))

    buffer = SymmetricBuffer(count, dtype)
    buffer.local.copy_(start)
    shared.all_reduce(buffer, op)
    same("all_reduce", buffer.local, theirs)
    buffer.barrier()
    buffer.local.copy_(start)
    shared.broadcast(buffer, n - 1)
    expected = start.clone()
    dist.broadcast(expected, n - 1)
    same("broadcast", buffer.local, expected)
    if count % n == 0:
        buffer.barrier()
        buffer.local.copy_(start)
        mine = start.new_empty(count // n)
        shared.reduce_scatter(mine, buffer, op)
        same("reduce_scatter", mine, theirs.view(n, -1)[rank])
        same("reduce_scatter, its input", buffer.local, start)
        expected = torch.empty_like(start)
        dist.all_to_all_single(expected, start)
        ours = torch.empty_like(start)
        shared.all_to_all(ours, buffer)
        same("all_to_all", ours, expected)
        dist.all_gather_single(expected, start.view(n, -1)[rank].contiguous())
        shared.all_gather(buffer)
        same("all_gather", buffer.local, expected)
    buffer.close()
    return wrong


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_shared_memory_gives_what_messages_give(worlds, n):
    for count, dtype, op in [
        (1, torch.float32, dist.ReduceOp.SUM),
        (12, torch.int64, dist.ReduceOp.MAX),
        (13, torch.float64, dist.ReduceOp.AVG),
        (12 * 100_003, torch.float32, dist.ReduceOp.SUM),  # several pieces, the last one short
        (24, torch.bfloat16, dist.ReduceOp.PRODUCT),
    ]:
        for wrong in worlds[n].run(over_shared_memory, count, dtype, op):
            assert not wrong, wrong


def test_again_and_again_over_the_same_buffer(world):
    """A rank that is ahead must not write what another has not read yet."""

    def step():
        buffer, mine = SymmetricBuffer(4096, torch.int64), torch.empty(4096, dtype=torch.int64)
        for i in range(50):
            buffer.local.fill_(i + dist.get_rank())
            shared.all_reduce(buffer)
            assert buffer.local.unique().tolist() == [4 * i + 6], i
            shared.all_to_all(mine, buffer)
            assert mine.unique().tolist() == [4 * i + 6], i
        buffer.close()
        return "done"

    assert world.run(step) == ["done"] * 4


def test_mistakes_over_shared_memory_are_told(world):
    def step(mistake):
        buffer = SymmetricBuffer(6)
        try:
            mistake(buffer)
        except ValueError as error:
            return str(error)
        finally:
            buffer.close()

    for mistake, says in [
        (lambda b: shared.all_gather(b), "a buffer of 6 elements cannot be shared equally by 4 ranks"),
        (lambda b: shared.all_reduce(b, dist.ReduceOp.BAND), "SUM, AVG, MIN, MAX and PRODUCT exist here"),
        (lambda b: shared.all_to_all(torch.ones(2), b), "a buffer of 6 elements cannot be shared equally by 4 ranks"),
        (lambda b: shared.broadcast(b, 4), "src is 4, and the buffer belongs to ranks [0, 1, 2, 3]"),
    ]:
        assert all(says in message for message in world.run(step, mistake))


def test_outputs_and_averages_that_cannot_be_are_told(world):
    def step(mistake):
        buffer = SymmetricBuffer(8, torch.int64)
        try:
            mistake(buffer)
        except ValueError as error:
            return str(error)
        finally:
            buffer.close()

    for mistake, says in [
        (lambda b: shared.reduce_scatter(torch.ones(3), b), "an output of 3 elements, torch.float32, does not fit"),
        (lambda b: shared.reduce_scatter(torch.ones(2), b), "it needs 2 elements of that dtype"),
        (lambda b: shared.all_to_all(torch.ones(2), b), "it needs 8 elements of that dtype"),
        (lambda b: shared.all_reduce(b, dist.ReduceOp.AVG), "AVG was asked for, of torch.int64"),
    ]:
        assert all(says in message for message in world.run(step, mistake))
