"""Every way a run can go wrong, done for real: the culprit is named, with the line, and the next run works at once."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lecture_lib import RankError, RankTimeout, World
from lecture_lib.launch import watch
from lecture_lib.launch import world as launch_world
from lecture_lib.trace import memory

HERE = "test_launch_faults.py, line "


def ready(world):
    """The next run works, and soon. (Generous: on a crowded machine everything takes many times as long. What these
    clocks catch is a wait for a timeout, which is 60 seconds.)"""
    start = time.monotonic()
    assert world.run(lambda: dist.get_rank()) == list(range(world.size))
    assert time.monotonic() - start < 10


def raises():
    if dist.get_rank() == 2:
        raise ValueError("too big")
    dist.all_reduce(torch.ones(4))


def calls_exit():
    if dist.get_rank() == 2:
        sys.exit(3)
    dist.barrier()


def ends_itself():
    if dist.get_rank() == 2:
        os._exit(0)
    dist.barrier()


def is_killed():
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4))


def crashes():
    if dist.get_rank() == 2:
        ctypes.string_at(0)
    dist.barrier()


@pytest.mark.parametrize(
    "fault, culprit, its_line, others",
    [
        (raises, "rank 2 raised ValueError: too big", 'raise ValueError("too big")', "all_reduce of float32[4]"),
        (calls_exit, "rank 2 called sys.exit(3)", "sys.exit(3)", "barrier"),
        (ends_itself, "rank 2 ended itself with os._exit(0)", "os._exit(0)", "barrier"),
        (is_killed, "rank 2 was killed (SIGKILL)", "", "all_reduce of float32[4]"),
        (crashes, "rank 2 crashed (SIGSEGV)", "ctypes.string_at(0)", "barrier"),
    ],
)
def test_one_rank_fails_while_the_others_wait(world, fault, culprit, its_line, others):
    messages = set()
    for _ in range(3):
        before = world.pids
        start = time.monotonic()
        with pytest.raises(RankError) as error:
            world.run(fault)
        assert time.monotonic() - start < 20
        assert type(error.value) is RankError and error.value.rank == 2
        assert not set(before) & set(world.pids)
        assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in before)
        ready(world)
        messages.add(str(error.value))
    (message,) = messages  # the same bytes every time, so that notebooks can store it
    lines = message.splitlines()
    assert lines[0].startswith(culprit)
    if its_line:
        assert lines[1].startswith(f"  tests/{HERE}") or HERE in lines[1]
        assert its_line in lines[2]
    for rank in (0, 1, 3):
        (line,) = [line for line in lines if line.startswith(f"rank {rank} ")]
        assert f"waited in {others}, after 0 finished operations" in line and HERE in line
    assert "Variables of earlier %%ranks cells are gone" in lines[-1]


def returns_early():
    dist.barrier()
    if dist.get_rank() != 2:
        dist.all_reduce(torch.ones(4))


def calls_another():
    if dist.get_rank() == 2:
        dist.broadcast(torch.ones(4), src=0)
    else:
        dist.all_reduce(torch.ones(4))


def waits_for_work():
    if dist.get_rank() != 2:
        dist.all_reduce(torch.ones(4), async_op=True).wait()


def all_send():
    dist.send(torch.ones(4), (dist.get_rank() + 1) % 4)


def waits_in_backward():
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    if dist.get_rank() != 2:
        module(torch.ones(2)).sum().backward()


def receives_in_a_group():
    pair = dist.new_group([1, 3])
    if dist.get_rank() == 1:
        dist.recv(torch.ones(4), src=3, group=pair)


def makes_a_group_alone():
    if dist.get_rank() != 0:
        dist.new_group([0, 1, 2, 3])


def one_peer_is_gone():
    if dist.get_rank() == 1:
        dist.recv(torch.ones(4), src=2)


@pytest.mark.parametrize(
    "fault, says, waited",
    [
        (returns_early, "Rank 2 returned without", "all_reduce of float32[4], after 1 finished operation,"),
        (calls_another, "Rank 2 called another operation", "all_reduce of float32[4], after 0 finished"),
        (waits_for_work, "Rank 2 returned without", "wait() for an asynchronous operation"),
        (all_send, "Every rank sends and none receives", "send of float32[4] to rank 2"),
        (waits_in_backward, "Rank 2 returned without", "backward"),
        (makes_a_group_alone, "Rank 0 returned without the operation", "new_group, after 0 finished operations,"),
        (one_peer_is_gone, "Rank 2 returned without the send that rank 1 waited for", "recv of float32[4] from rank 2"),
        (
            receives_in_a_group,
            "Rank 3 returned without the send that rank 1 waited for",
            "recv of float32[4] from rank 3 in group [1, 3]",
        ),
    ],
)
def test_a_deadlock_does_not_wait_for_the_timeout(world, fault, says, waited):
    start = time.monotonic()
    with pytest.raises(RankTimeout) as error:
        world.run(fault)
    assert time.monotonic() - start < 30
    message = str(error.value)
    assert message.startswith("no rank can move") and says in message
    (line,) = [line for line in message.splitlines() if line.startswith("rank 1 ")]
    assert waited in line and HERE in line
    ready(world)


@pytest.mark.parametrize("elements", [8, 10_000_000])
def test_shapes_that_differ_end_the_run_with_an_explanation(world, elements):
    def different_shapes():
        dist.all_reduce(torch.ones(elements if dist.get_rank() == 1 else 4))

    start = time.monotonic()
    with pytest.raises(RankError) as error:
        world.run(different_shapes)
    assert time.monotonic() - start < 30
    assert "size" in str(error.value) and f"float32[{elements}]" in str(error.value) and HERE in str(error.value)
    ready(world)


def test_an_aborted_rank_says_where_it_was_though_nobody_had_asked_it_before(world):
    def aborted_while_it_waits():
        if dist.get_rank() == 1:
            threading.Timer(0.01, os.abort).start()
        if dist.get_rank() > 0:
            dist.barrier()

    with pytest.raises(RankError, match=r"rank 1 was aborted \(SIGABRT\) in barrier") as error:
        world.run(aborted_while_it_waits)
    assert "dist.barrier()" in str(error.value) and HERE in str(error.value)


def begins_alone():
    if dist.get_rank() == 2:
        dist.all_reduce(torch.ones(4), async_op=True)


def begins_in_a_group():
    pair = dist.new_group([1, 3])
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(4), async_op=True, group=pair)


def sends_to_nobody():
    if dist.get_rank() == 0:
        dist.isend(torch.ones(4), 1)


@pytest.mark.parametrize(
    "fault, says",
    [
        (
            begins_alone,
            "rank 2 returned, and has begun an operation that cannot end, because another rank of its group",
        ),
        (begins_in_a_group, "has not begun it: all_reduce of [4]"),
        (sends_to_nobody, "a send or a receive that the ranks have begun has no counterpart"),
    ],
)
def test_what_a_run_begins_and_leaves_does_not_meet_the_next_run(world, fault, says):
    with pytest.raises(RankError, match=re.escape(says)):
        world.run(fault)
    assert world.run(sum_of_ranks) == [6.0] * 4


def sum_of_ranks():
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return x.item()


def test_messages_and_unwaited_operations_of_all_ranks_are_no_fault(world):
    def talks():
        if dist.get_rank() < 2:
            peer = 1 - dist.get_rank()
            works = [dist.isend(torch.ones(1), peer), dist.irecv(torch.ones(1), peer)]
            [work.wait() for work in works]
        dist.monitored_barrier()
        everything = [None] * 4
        dist.all_gather_object(everything, dist.get_rank())
        dist.all_reduce(torch.ones(1 << 22), async_op=True)

    pids = world.pids
    for _ in range(3):
        world.run(talks)
    assert world.run(sum_of_ranks) == [6.0] * 4 and world.pids == pids


def test_a_large_world_says_the_same_of_many_ranks_once():
    with World(12) as large:
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        with pytest.raises(RankError) as error:
            large.run(raises)
        lines = str(error.value).splitlines()
        assert len(lines) == 5 and lines[3].startswith("ranks 0, 1 and 3 to 11 waited in all_reduce")


def test_a_rank_that_never_returns_meets_the_timeout():
    def spins():
        if dist.get_rank() == 1:
            while True:
                pass
        dist.barrier()

    with World(2, timeout=1) as world:
        with pytest.raises(RankTimeout) as error:
            world.run(spins)
        message = str(error.value)
        assert "nothing happened for 1 seconds" in message and error.value.rank == 1
        assert "rank 1 was running at" in message and "rank 0 waited in barrier" in message
        assert "Rank 1 neither returned nor joined the others" in message
        ready(world)


@pytest.fixture
def hasty(monkeypatch):
    """A deadlock is told after 0.8 seconds; work that takes twice as long must not be taken for one."""
    monkeypatch.setattr(launch_world, "DEADLOCK_SECONDS", 0.8)
    monkeypatch.setattr(launch_world, "LEFT_ALONE_SECONDS", 0.8)


def test_a_rank_that_sleeps_or_computes_keeps_the_others_waiting(world, hasty):
    def late():
        if dist.get_rank() == 1:
            time.sleep(1.6)
        if dist.get_rank() == 2:
            end = time.monotonic() + 1.6
            while time.monotonic() < end:
                torch.ones(100, 100) @ torch.ones(100, 100)
        dist.barrier()
        return "done"

    assert world.run(late) == ["done"] * 4


def test_a_sleep_after_a_wait_and_a_thread_that_will_send_are_no_deadlocks(world, hasty):
    sleep = time.sleep

    def sleeps_after_wait():
        if dist.get_rank() == 0:
            dist.isend(torch.ones(1), 1).wait()
            sleep(1.6)  # the last name with a dot before it was wait
        if dist.get_rank() == 1:
            dist.recv(torch.ones(1), 0)
        dist.barrier()
        return "done"

    assert world.run(sleeps_after_wait) == ["done"] * 4

    def a_thread_sends(returns):
        def later():
            time.sleep(1.6)
            dist.send(torch.ones(1), 1)

        if dist.get_rank() == 0:
            threading.Thread(target=later).start()
        if dist.get_rank() == 1:
            dist.recv(torch.ones(1), 0)
        if not returns:
            dist.barrier()
        return "done"

    assert world.run(a_thread_sends, returns=False) == ["done"] * 4
    assert world.run(a_thread_sends, returns=True) == ["done"] * 4


def test_code_that_ends_the_process_group_leaves_a_world_that_works(world):
    world.run(dist.destroy_process_group)
    ready(world)
    with pytest.raises(RankError):
        world.run(lambda: dist.destroy_process_group() or 1 / 0)
    ready(world)


def test_a_process_that_the_code_forks_does_not_become_a_second_rank(world):
    def forks():
        pid = os.fork()
        return "parent" if pid else "child"

    assert world.run(forks) == ["parent"] * 4
    for i in range(4):
        assert world.run(lambda i: i, i) == [i] * 4


def test_output_that_cannot_be_shown_costs_the_ranks_but_mixes_no_results(world, monkeypatch):
    def refuse(*_, **__):
        raise UnicodeEncodeError("ascii", "x", 0, 1, "for the test")

    with monkeypatch.context() as patched:
        patched.setattr("builtins.print", refuse)
        with pytest.raises(UnicodeEncodeError):
            world.run(lambda: os.write(1, b"x") and time.sleep(1) or "old")
    assert world.run(lambda: "new") == ["new"] * 4


def test_an_exception_that_cannot_be_shown_is_an_error_like_any_other(world):
    class Odd(Exception):
        def __str__(self):
            raise SystemExit

    def fail():
        raise Odd

    with pytest.raises(RankError, match="Odd: .its message cannot be shown: SystemExit"):
        world.run(fail)


def test_slow_work_inside_torch_distributed_is_no_deadlock(world, hasty, tmp_path):
    def save():
        import torch.distributed.checkpoint as checkpoint

        disk = {"sleep": time.sleep}
        exec("def slow_disk(descriptor): sleep(1.6)", disk)  # exec: no frame of the person's between c10d and the sleep
        os.fsync = disk["slow_disk"]
        checkpoint.save({"x": torch.ones(4)}, checkpoint_id=tmp_path / "saved")
        return "saved"

    assert world.run(save) == ["saved"] * 4


def test_output_and_finished_operations_are_progress():
    def slow():
        for i in range(8):
            time.sleep(0.5)
            print(i) if i < 4 else dist.barrier()  # 2 seconds of either
        return "done"

    with World(2, timeout=1.5) as world:
        assert world.run(slow) == ["done"] * 2


def test_two_ranks_raise_and_each_is_told(world):
    def both():
        if dist.get_rank() in (1, 3):
            raise KeyError(f"rank {dist.get_rank()}")
        dist.barrier()

    with pytest.raises(RankError) as error:
        world.run(both)
    message = str(error.value)
    assert error.value.rank == 1 and "rank 1 raised KeyError" in message and "rank 3 raised KeyError" in message


def test_a_typo_on_all_ranks_costs_no_variables(world):
    pids = world.pids
    with pytest.raises(RankError) as error:
        world.run(lambda: undefined_name)  # noqa: F821
    assert "rank 3 raised the same" in str(error.value)
    assert world.pids == pids


def test_a_typo_costs_no_variables_after_a_run_in_which_the_ranks_sent_unequally_many_messages(world):
    def to_the_next():
        rank = dist.get_rank()
        if rank > 0:
            dist.recv(torch.empty(1), rank - 1)
        if rank < 3:
            dist.send(torch.ones(1), rank + 1)

    world.run(to_the_next)
    pids = world.pids
    with pytest.raises(RankError, match="rank 3 raised the same"):
        world.run(lambda: undefined_name)  # noqa: F821
    assert world.pids == pids


def test_a_rank_killed_from_outside_and_one_killed_between_runs(world):
    victim = world.pids[3]
    threading.Timer(0.7, os.kill, (victim, signal.SIGKILL)).start()
    with pytest.raises(RankError, match="rank 3 was killed") as error:
        world.run(lambda: time.sleep(30))
    assert "time.sleep(30)" in str(error.value), "the line where it was last seen"
    os.kill(world.pids[0], signal.SIGKILL)
    time.sleep(0.2)
    with pytest.raises(RankError, match="rank 0 was killed"):
        world.run(lambda: 1)
    ready(world)


@pytest.fixture
def memory_limit():
    """A function that holds a process to 150 MiB, with a memory control group (Linux, as root)."""
    root = Path("/sys/fs/cgroup/memory" if Path("/sys/fs/cgroup/memory").exists() else "/sys/fs/cgroup")
    limit = "memory.limit_in_bytes" if root.name == "memory" else "memory.max"
    group = root / f"lecture_lib_test_{os.getpid()}"
    if not (root / "cgroup.procs").exists() or not os.access(root, os.W_OK):
        pytest.skip("this machine does not let the test set a memory limit (it needs Linux control groups and root)")
    group.mkdir()
    if not (group / limit).exists():
        group.rmdir()
        pytest.skip("this machine has no control group for memory")
    (group / limit).write_text(str(150 * 2**20))
    yield lambda pid: (group / "cgroup.procs").write_text(str(pid))
    while (group / "cgroup.procs").read_text():
        time.sleep(0.01)
    group.rmdir()


def test_out_of_memory_is_told_as_such(world, memory_limit):
    memory_limit(world.pids[1])

    def greedy():
        if dist.get_rank() == 1:
            torch.ones(400 * 2**20)
        dist.barrier()

    with pytest.raises(RankError, match="rank 1 was killed by the operating system because memory ran out"):
        world.run(greedy)
    ready(world)


@pytest.mark.parametrize("call", ["input('name? ')", "breakpoint()", "import pdb; pdb.set_trace(); x = 1"])
def test_no_keyboard(world, call):
    start = time.monotonic()
    with pytest.raises(RankError, match="A rank has no keyboard"):
        world.run(exec, call)
    assert time.monotonic() - start < 20
    ready(world)


def test_children_of_a_rank_work_and_end_with_it(world):
    def loads():
        from torch.utils.data import DataLoader

        return sum(batch.sum().item() for batch in DataLoader(torch.arange(8.0), batch_size=2, num_workers=2))

    assert world.run(loads) == [28.0] * 4

    def leaves_a_child():
        return subprocess.Popen(["sleep", "1000"]).pid

    children = world.run(leaves_a_child)
    world.restart()
    deadline = time.monotonic() + 20
    while any(map(psutil.pid_exists, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, children))


def test_a_world_in_a_rank_is_refused(world):
    with pytest.raises(RankError, match="this code runs on rank 0 already"):
        world.run(lambda: World(2))


def test_recursion_is_shown_short(world):
    def deep(n):
        return deep(n + 1)

    with pytest.raises(RankError) as error:
        world.run(deep, 0)
    assert len(str(error.value).splitlines()) < 30 and "RecursionError" in str(error.value)


def test_no_descriptors_or_threads_leak(world):
    me = psutil.Process()
    world.restart()
    before = me.num_fds(), me.num_threads()
    for _ in range(4):
        world.restart()
    assert (me.num_fds(), me.num_threads()) == before


@pytest.mark.parametrize(
    "arguments, error, sentence",
    [
        (dict(size=0), ValueError, "needs at least 1 rank and got 0"),
        (dict(size="4"), TypeError, "needs a whole number of ranks, such as World(4), and got '4'"),
        (dict(size=True), TypeError, "needs a whole number"),
        (dict(backend="mpi"), ValueError, "backend must be 'auto', 'gloo', 'nccl' or None, and is 'mpi'"),
        (dict(device="tpu"), ValueError, "device must be"),
        (dict(device="cuda:x"), ValueError, "device must be"),
        (dict(timeout=0), ValueError, "timeout must be"),
        (dict(threads=0), ValueError, "threads must be"),
        (dict(size=64, backend="nccl"), ValueError, "need 64 GPUs, and this machine has"),
        (dict(size=1, device="cuda:63"), ValueError, "need 64 GPUs, and this machine has"),
    ],
)
def test_bad_arguments_get_one_sentence(arguments, error, sentence):
    with pytest.raises(error, match=re.escape(sentence)) as raised:
        World(**arguments)
    assert "\n" not in str(raised.value)


def test_native_windows_is_pointed_to_wsl(monkeypatch):
    from lecture_lib.launch import world as module

    monkeypatch.setattr(module.os, "name", "nt")
    with pytest.raises(RuntimeError, match="WSL2"):
        World(2)


def test_a_closed_world_says_so_and_opens_again():
    world = World(2)
    pids = world.pids
    world.close()
    assert world.closed and not any(psutil.pid_exists(p) and psutil.Process(p).status() != "zombie" for p in pids)
    with pytest.raises(RuntimeError, match="closed"):
        world.run(lambda: 1)
    world.restart()
    ready(world)
    world.close()


def test_a_world_nobody_holds_ends():
    pids = World(2).pids
    deadline = time.monotonic() + 20
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, pids))


def test_a_busy_world_refuses_a_second_run_and_another_world_takes_it(world):
    thread = threading.Thread(target=world.run, args=(lambda: time.sleep(1),))
    thread.start()
    time.sleep(0.3)
    with pytest.raises(RuntimeError, match="runs something already"):
        world.run(lambda: 1)
    with World(2) as other:
        assert other.run(dist.get_world_size) == [2, 2]
    thread.join()
    ready(world)


def test_a_rank_survives_looks_at_any_moment(world):
    """While its stack grows and shrinks, and threads of C++ enter Python and leave it, as those of gloo do."""

    def looked_at():
        libc, done, looks = ctypes.CDLL(None), threading.Event(), []
        enter = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)

        def look():
            while not done.is_set():
                looks.append(watch.report()["operation"])
                time.sleep(0)

        def deep(n):
            return n and deep(n - 1)

        looking = threading.Thread(target=look)
        looking.start()
        end, entered = time.monotonic() + 2, 0
        while time.monotonic() < end:
            thread = ctypes.c_ulong()
            assert libc.pthread_create(ctypes.byref(thread), None, enter, None) == 0
            deep(entered % 90)
            libc.pthread_join(thread, None)
            entered += 1
        done.set()
        looking.join()
        return len(looks), entered, set(looks)

    for looks, entered, operations in world.run(looked_at):
        assert looks > 20 and entered > 20 and operations == {None}


def test_a_look_keeps_nothing_alive_that_the_rank_lets_go_of(world):
    """Even if the looking thread is slow, as on an overloaded machine: what notebooks count must not depend on it."""

    def inner(x):
        y = x * 2
        return y.sum()

    def most_bytes():
        with memory(nn.Module()) as held:
            for _ in range(300):
                inner(torch.ones(250))
        return held.total

    def looked_at():
        if dist.get_rank() > 0:
            return {2 * 250 * 4 + 4}
        report, describe, done = watch.report, watch.describe, threading.Event()
        told = report()
        watch.report = lambda: told  # to the notebook; the looks are those below

        def slow(*stack):
            end = time.perf_counter() + 0.01
            while time.perf_counter() < end:
                pass
            return describe(*stack)

        def look():
            while not done.is_set():
                report()
                time.sleep(0.001)

        quiet = most_bytes()
        watch.describe = slow
        thread = threading.Thread(target=look)
        thread.start()
        try:
            return {quiet, *(most_bytes() for _ in range(3))}
        finally:
            done.set()
            thread.join()
            watch.report, watch.describe = report, describe

    assert world.run(looked_at) == [{2 * 250 * 4 + 4}] * 4
