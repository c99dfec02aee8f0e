"""Worlds: start-up, devices, threads, code that sets up its own process group, what listens."""

import os
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist

import lecture_lib.collectives.shared
import lecture_lib.planner
import lecture_lib.train  # noqa: F401
from lecture_lib import World
from lecture_lib.launch import fork_server
from lecture_lib.launch.devices import choose


def test_importing_loads_nothing_heavy():
    """What takes time is torch, and that is the fork server's business. `make bench` has the seconds."""
    code = "import sys; from lecture_lib import World; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "IPython", "matplotlib", "jax", "zmq"} & set(done.stdout.split())


def test_what_is_imported_of_the_course_here_is_on_the_ranks_before_they_ask(world):
    assert world.run(lambda: {"lecture_lib.train.loop", "lecture_lib.planner.search"} <= set(sys.modules)) == [True] * 4
    assert psutil.Process(fork_server.running().process.pid).num_threads() == 1, "forking it is safe"
    assert world.run(lambda: [m for m in sys.modules if m.startswith(fork_server.NOT_HERE[:-1])]) == [[]] * 4


def test_threads_are_shared_out():
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    for size in (1, 4):
        with World(size) as world:
            assert world.run(torch.get_num_threads) == [max(1, cores // size)] * size
    with World(1, threads=3) as world:
        assert world.run(torch.get_num_threads) == [3]


def test_a_kernel_with_running_openmp_threads_is_no_problem(world):
    torch.ones(2000, 2000) @ torch.ones(2000, 2000)
    world.restart()
    assert world.run(lambda: (torch.ones(500, 500) @ torch.ones(500, 500))[0, 0].item()) == [500.0] * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_a_kernel_that_has_used_cuda_is_no_problem():
    torch.ones(3, device="cuda").sum()
    with World(2, device="cuda:0") as world:
        assert world.run(lambda: torch.ones(3, device="cuda:0").sum().item()) == [3.0, 3.0]


def test_code_that_initializes_its_own_process_group_runs_as_it_is_twice():
    def program():
        dist.init_process_group("gloo")
        x = torch.ones(4)
        dist.all_reduce(x)
        return x.tolist(), dist.get_rank(), os.environ["LOCAL_RANK"], os.environ["MASTER_ADDR"]

    with World(3, backend=None) as world:
        for _ in range(2):
            assert world.run(program) == [([3.0] * 4, rank, str(rank), "127.0.0.1") for rank in range(3)]

        def tidy_program():
            out = program()
            dist.destroy_process_group()
            return out

        assert world.run(tidy_program)[2][0] == [3.0] * 4
        assert world.run(program)[0][0] == [3.0] * 4


def test_nothing_listens_beyond_loopback():
    def own_group():
        dist.init_process_group("gloo")
        dist.new_group([0, 1])
        dist.barrier()  # else a rank that is done ends its groups while the other still connects

    with World(2) as world, World(2, backend=None) as other:
        world.run(lambda: dist.new_group([0, 1]) and dist.barrier())
        other.run(own_group)
        for pid in [*world.pids, *other.pids, *[p.pid for p in psutil.Process().children()]]:
            for connection in psutil.Process(pid).net_connections():
                if connection.status == psutil.CONN_LISTEN:
                    assert connection.laddr.ip in ("127.0.0.1", "::1", "::ffff:127.0.0.1")


def test_repr_is_a_table_of_ranks(world):
    text, html = repr(world), world._repr_html_()
    assert "World(4), gloo" in text
    for rank, pid in enumerate(world.pids):
        assert f"rank {rank}  pid {pid}  cpu" in text and f"pid {pid}" in html


def test_all_reduce_avg_and_reduce_scatter_avg_are_right(world):
    def averages():
        x = torch.arange(8.0) + dist.get_rank()
        out = torch.empty(2)
        dist.reduce_scatter_single(out, x, op=dist.ReduceOp.AVG)
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        return x.tolist(), out.tolist()

    mean = [i + 1.5 for i in range(8)]
    assert world.run(averages) == [(mean, mean[2 * rank : 2 * rank + 2]) for rank in range(4)]


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_any_size(size):
    with World(size) as world:
        assert world.run(dist.get_world_size) == [size] * size


def test_sixty_four_ranks_are_small():
    with World(64) as world:
        world.run(lambda: dist.all_reduce(torch.ones(4)))
        private = [psutil.Process(pid).memory_full_info().uss / 2**20 for pid in world.pids]
    if sys.platform == "linux":
        assert sorted(private)[32] < 12


@pytest.mark.parametrize(
    "size, backend, device, gpus, expected",
    [
        (4, "auto", "auto", 0, ("gloo", "cpu")),
        (4, "auto", "auto", 3, ("gloo", "cpu")),
        (4, "auto", "auto", 4, ("nccl", "cuda:2")),
        (4, "auto", "auto", 8, ("nccl", "cuda:2")),
        (4, "auto", "cuda:0", 1, ("gloo", "cuda:0")),
        (4, "auto", "cuda:0", 8, ("gloo", "cuda:0")),
        (3, "auto", "cuda:2", 8, ("gloo", "cuda:2")),
        (4, "gloo", "auto", 8, ("gloo", "cpu")),
        (4, "gloo", "cuda", 8, ("gloo", "cuda:2")),
        (4, "auto", "cuda", 8, ("nccl", "cuda:2")),
        (4, "nccl", "auto", 4, ("nccl", "cuda:2")),
        (4, None, "auto", 0, (None, "cpu")),
        (4, None, "auto", 4, (None, "cuda:2")),
        (4, "auto", "cpu", 8, ("gloo", "cpu")),
    ],
)
def test_backend_and_device_for_rank_2(size, backend, device, gpus, expected):
    chosen_backend, chosen_device = choose(size, backend, device, 2, gpus)
    assert (chosen_backend, str(chosen_device)) == expected


@pytest.mark.parametrize("backend, device, gpus", [("nccl", "auto", 2), ("auto", "cuda:0", 0), ("auto", "cuda", 3)])
def test_too_few_gpus_is_one_sentence(backend, device, gpus):
    with pytest.raises(ValueError, match=f"and this machine has {gpus}"):
        for rank in range(4):
            choose(4, backend, device, rank, gpus)


def test_the_same_function_runs_under_torchrun(tmp_path):
    script = tmp_path / "same.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "from lecture_lib import World\n"
        "def total():\n"
        "    x = torch.arange(4.) + dist.get_rank()\n"
        "    dist.all_reduce(x)\n"
        "    return x.tolist()\n"
        "if __name__ == '__main__':\n"
        "    dist.init_process_group('gloo')\n"
        "    print(total())\n"
        "    dist.destroy_process_group()\n"
    )
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path), "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("[1.0, 3.0, 5.0, 7.0]") == 2
    assert time.monotonic() - start < 120
