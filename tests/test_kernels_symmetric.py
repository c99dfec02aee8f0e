"""SymmetricBuffer: every rank sees every buffer, nobody waits for the dead, and nothing is left."""

import gc
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lecture_lib import RankError, World
from lecture_lib.kernels import SymmetricBuffer

pytestmark = pytest.mark.skipif(torch.cuda.device_count() >= 4, reason="here the ranks have a GPU each: see the bench")
has_proc = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")


def left_behind() -> set[Path]:
    """Files of buffers in the folders where shared memory has its names. The launcher's folders are none."""
    folders = Path("/dev/shm"), Path(tempfile.gettempdir())
    return {path for folder in folders for path in folder.glob("*lecture_lib*") if not path.is_dir()}


def mapped() -> int:
    """How many pieces of shared memory of buffers this process has mapped."""
    return sum("memfd:lecture_lib" in line for line in Path("/proc/self/maps").read_text().splitlines())


# ---- what it is for --------------------------------------------------------------------------------------------------


def test_every_rank_reads_and_writes_the_buffers_of_all(world):
    def share():
        rank, ranks = dist.get_rank(), dist.get_world_size()
        buffer = SymmetricBuffer((2, 3), torch.int64)
        assert not buffer.local.any() and buffer.local.shape == (2, 3)
        assert buffer.peers[rank].data_ptr() == buffer.local.data_ptr() == buffer.addresses[rank]
        assert [peer.data_ptr() for peer in buffer.peers] == buffer.addresses.tolist()
        assert buffer.flags.shape == (2, 64, ranks) and buffer.flag_addresses.shape == (2, ranks)
        buffer.local.fill_(rank)
        buffer.barrier()
        seen = [peer[1, 2].item() for peer in buffer.peers]
        buffer.barrier()
        buffer.peers[(rank + 1) % ranks].fill_(100 + rank)
        buffer.barrier()
        return seen, buffer.local[0, 0].item(), repr(buffer)

    outs = world.run(share)
    assert [seen for seen, _, _ in outs] == [[0, 1, 2, 3]] * 4
    assert [written for _, written, _ in outs] == [103, 100, 101, 102]
    assert outs[0][2] == "SymmetricBuffer: int64[2, 3] on cpu of each of 4 ranks"


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_any_number_of_ranks(worlds, size):
    def total():
        buffer = SymmetricBuffer(5)
        buffer.local.fill_(dist.get_rank() + 1)
        buffer.barrier()
        return sum(buffer.peers).tolist(), buffer.dtype

    assert worlds[size].run(total) == [([size * (size + 1) / 2] * 5, torch.float32)] * size


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float64, torch.complex128, torch.float8_e4m3fn]
)
def test_any_dtype(world, dtype):
    def fill():
        buffer = SymmetricBuffer((3,), dtype)
        buffer.local.copy_(torch.ones(3).to(dtype))
        buffer.barrier()
        return all(bool((peer.to(torch.float32) == 1).all()) for peer in buffer.peers)

    assert world.run(fill) == [True] * 4


def test_groups_have_buffers_of_their_own(world):
    def halves():
        low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
        mine = low if dist.get_rank() < 2 else high
        buffer = SymmetricBuffer(1, torch.int32, group=mine)
        buffer.local.fill_(dist.get_rank())
        buffer.barrier()
        return buffer.rank, buffer.ranks, torch.cat(buffer.peers).tolist()

    assert world.run(halves) == [(0, 2, [0, 1]), (1, 2, [0, 1]), (0, 2, [2, 3]), (1, 2, [2, 3])]


def test_no_one_passes_the_barrier_early_or_late(world):
    def march():
        buffer = SymmetricBuffer(1, torch.int64)
        for step in range(1, 301):
            buffer.local.fill_(step)
            buffer.barrier()
            assert torch.cat(buffer.peers).tolist() == [step] * 4
            if step % 50 == 17 * dist.get_rank() % 50:
                time.sleep(0.002)
            buffer.barrier()
        return True

    assert world.run(march) == [True] * 4


def test_two_buffers_do_not_mix(world):
    def both():
        a, b = SymmetricBuffer(4), SymmetricBuffer(4)
        a.local.fill_(1)
        b.local.fill_(2)
        a.barrier()
        b.barrier()
        return sum(a.peers)[0].item(), sum(b.peers)[0].item()

    assert world.run(both) == [(4, 8)] * 4


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, dtype, error, message",
    [
        ((2, 0), torch.float32, ValueError, r"shape \(2, 0\) has no elements"),
        (-1, torch.float32, ValueError, r"shape \(-1,\) has no elements"),
        (2.5, torch.float32, TypeError, "must be ints, and is 2.5"),
        ((2, "3"), torch.float32, TypeError, "must be ints"),
        (2, "float32", TypeError, "must be a torch.dtype such as torch.float32, and is 'float32'"),
        (10**13, torch.float32, MemoryError, "needs 4e.04 GB on each of 4 ranks, 1.6e.05 GB in all, and this machine"),
    ],
)
def test_what_cannot_be_is_one_error_on_every_rank(world, shape, dtype, error, message):
    with pytest.raises(RankError, match=message) as raised:
        world.run(lambda: SymmetricBuffer(shape, dtype))
    assert isinstance(raised.value.exception, error)
    assert str(raised.value).count("raised the same") == 3


@pytest.mark.parametrize(
    "odd, message",
    [
        (
            (4, torch.float32),
            r"rank 0 asks for float32\[3\] on cpu and rank 2 for float32\[4\] on cpu: every rank must",
        ),
        ((3, torch.int8), r"rank 0 asks for float32\[3\] on cpu and rank 2 for int8\[3\] on cpu"),
        (((), torch.float32), r"rank 2 for float32\[\] on cpu"),
        ((0, torch.float32), "has no elements"),
        (("a", torch.float32), "must be ints, and is 'a'"),
    ],
)
def test_ranks_that_ask_for_different_buffers_all_hear_of_it(world, odd, message):
    def ask():
        SymmetricBuffer(*(odd if dist.get_rank() == 2 else (3, torch.float32)))

    with pytest.raises(RankError, match=message) as raised:
        world.run(ask)
    assert str(raised.value).count("raised the same") == 3


def test_a_rank_outside_the_group_is_told(world):
    def outside():
        group = dist.new_group([0, 1])
        try:
            SymmetricBuffer(3, group=group)
        except RuntimeError as error:
            return str(error)

    assert world.run(outside)[2:] == [
        f"rank {rank} is not in the group that makes this SymmetricBuffer." for rank in (2, 3)
    ]


def test_without_a_process_group_it_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"needs a process group: make it inside a rank, as in World\(4\)"):
        SymmetricBuffer(3)


# ---- ranks that do not come ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaver", [0, 2])
def test_a_closed_buffer_is_noticed_and_named(world, leaver):
    def leave():
        buffer = SymmetricBuffer(3)
        if dist.get_rank() == leaver:
            buffer.close()
        try:
            buffer.barrier()
        except RuntimeError as error:
            return str(error)

    outs = world.run(leave)
    assert outs.pop(leaver) == "this barrier is closed: make a new SymmetricBuffer, on all ranks."
    assert {out.split(":")[0] for out in outs} == {f"rank {leaver} is gone (Broken pipe)"}


@pytest.mark.parametrize("victim", [0, 3])
def test_a_killed_rank_is_noticed_at_once(world, tmp_path, victim):
    before = left_behind()

    def die():
        buffer = SymmetricBuffer(1_000_000)
        if dist.get_rank() == victim:
            (tmp_path / "died").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            buffer.barrier()
        except RuntimeError as error:
            (tmp_path / f"{dist.get_rank()}").write_text(f"{time.time()} {error}")
            raise

    with pytest.raises(RankError, match=f"^rank {victim} was killed"):
        world.run(die)
    died = float((tmp_path / "died").read_text())
    for rank in {0, 1, 2, 3} - {victim}:
        noticed, said = (tmp_path / str(rank)).read_text().split(" ", 1)
        assert float(noticed) - died < 1.0
        assert said.startswith(f"rank {victim} is gone (Broken pipe): its process has ended")
    assert left_behind() <= before
    assert world.run(lambda: SymmetricBuffer(3).ranks) == [4] * 4


def test_a_child_of_a_rank_does_not_keep_it_alive(world, tmp_path):
    def die():
        buffer = SymmetricBuffer(3)
        if dist.get_rank() == 1:
            if os.fork() == 0:  # as a DataLoader forks its workers
                time.sleep(5)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            buffer.barrier()
        except RuntimeError:
            (tmp_path / f"{dist.get_rank()}").touch()
            raise

    with pytest.raises(RankError, match="rank 1 was killed"):
        world.run(die)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "2", "3"]


# ---- nothing is left -------------------------------------------------------------------------------------------------


@has_proc
def test_memory_is_given_back_on_close_and_by_the_garbage_collector(world):
    def come_and_go():
        files = len(os.listdir("/proc/self/fd"))
        buffer = SymmetricBuffer(1000)
        counts = [mapped()]
        buffer.barrier()
        buffer.close()
        buffer.close()
        counts.append(mapped())
        buffer = SymmetricBuffer(1000)
        dist.barrier()
        del buffer
        counts.append(mapped())
        buffer = SymmetricBuffer(1000)
        view = buffer.local[10:20]
        dist.barrier()
        buffer.close()
        view.fill_(7)  # what somebody holds stays theirs
        counts.append(mapped())
        del view
        gc.collect()
        counts.append(mapped())
        return counts, len(os.listdir("/proc/self/fd")) - files

    assert world.run(come_and_go) == [([4, 0, 0, 1, 0], 0)] * 4


@has_proc
def test_no_name_is_left_anywhere(world):
    before = left_behind()

    def keep():
        global kept
        kept = SymmetricBuffer(1000)
        return [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line]

    assert world.run(keep) == [[]] * 4
    assert left_behind() <= before, "not even while it is in use"
    for pid in world.pids:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(RankError):
        world.run(lambda: 1)
    assert left_behind() <= before


def test_where_proc_is_missing_names_are_used_and_removed(tmp_path):
    """macOS, as far as Linux can act it."""

    def without_proc():
        from types import SimpleNamespace

        from lecture_lib.kernels import agree, barrier, symmetric

        tempfile.tempdir = str(tmp_path)
        for module in (agree, barrier, symmetric):
            module.sys = SimpleNamespace(platform="darwin")
        buffer = SymmetricBuffer(1000)
        buffer.local.fill_(dist.get_rank())
        buffer.barrier()
        return sum(buffer.peers)[0].item(), os.listdir(tmp_path)

    with World(3) as world:
        assert world.run(without_proc) == [(3, [])] * 3
