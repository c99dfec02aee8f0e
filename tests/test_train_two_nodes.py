"""The trainer on two nodes: two network namespaces of this machine, each with an address, a name and a torchrun."""

import os
import re
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from lecture_lib import World
from lecture_lib.train import options, train

ROOT = Path(__file__).parents[1]
NODES = ("a", "b")
TRAIN = "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn-hidden 48 --seq 16 --batch 4 --steps 6"


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True)


@pytest.fixture
def two_nodes(tmp_path):
    """{node: (namespace, address)}, joined by a cable. Skips, and says why, where this cannot be made."""
    if missing := [name for name in ("ip", "unshare", "mount") if not shutil.which(name)]:
        pytest.skip(f"two nodes need network namespaces, and this machine has no program {missing[0]!r}")
    run = uuid.uuid4().hex[:6]
    names = {node: f"lecture-{run}-{node}" for node in NODES}
    try:
        for name in names.values():
            ip("netns", "add", name)
        ip("link", "add", f"l{run}a", "netns", names["a"], "type", "veth", "peer", f"l{run}b", "netns", names["b"])
        for i, node in enumerate(NODES):
            ip("-n", names[node], "addr", "add", f"10.77.0.{i + 1}/24", "dev", f"l{run}{node}")
            for link in ("lo", f"l{run}{node}"):
                ip("-n", names[node], "link", "set", link, "up")
        probe = ["ip", "netns", "exec", names["a"], "unshare", "-u", "-m", "true"]
        subprocess.run(probe, capture_output=True, text=True, check=True)
        hosts = [f"10.77.0.{i + 1} host-{node}" for i, node in enumerate(NODES)]
        (tmp_path / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts]) + "\n")
        yield names
    except subprocess.CalledProcessError as error:
        pytest.skip(f"two nodes need network namespaces: {' '.join(error.cmd)}: {error.stderr.strip()}")
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def start(names, node, folder, words):
    """torchrun on one node, with two ranks."""
    torchrun = (
        f"{sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 2 --rdzv-id two --rdzv-backend c10d "
        f"--rdzv-endpoint host-a:29500 -m lecture_lib.train {TRAIN} {words}"
    )
    shell = f"hostname host-{node}; mount --bind {folder / 'hosts'} /etc/hosts; exec {torchrun}"
    return subprocess.Popen(
        ["ip", "netns", "exec", names[node], "unshare", "-u", "-m", "sh", "-c", shell],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def losses_of(names, folder, words):
    """(first, last) loss that the first rank prints."""
    torchruns = [start(names, node, folder, words) for node in NODES]
    try:
        said = [torchrun.communicate(timeout=200)[0] for torchrun in torchruns]
    finally:
        for torchrun in torchruns:
            if torchrun.poll() is None:
                os.killpg(torchrun.pid, 9)
    assert [torchrun.returncode for torchrun in torchruns] == [0, 0], "\n".join(said)
    return re.search(r"steps (\d+) to 6: loss ([\d.]+) -> ([\d.]+)", "".join(said)).groups()


@pytest.mark.timeout(500)
def test_two_nodes_go_on_from_a_run_of_one_process(two_nodes, tmp_path):
    """Tensor parallel within a node, a pipeline between them; the losses of one process, and a checkpoint of both."""
    keep = f"--checkpoint {tmp_path / 'run'} "
    with World(1, threads=1) as alone:
        losses = alone.run(train, options(TRAIN + " --quiet"))[0].losses
        alone.run(train, options(TRAIN + f" --quiet --steps 3 {keep}"))
        found = losses_of(two_nodes, tmp_path, f"--tp 2 --pp 2 --micro-batches 2 --resume {keep}")
        assert found == ("3", f"{losses[3]:.3f}", f"{losses[-1]:.3f}")
        assert losses[-1] < losses[0]
        later = alone.run(train, options(TRAIN + f" --quiet --steps 7 --resume {keep}"))[0]
        assert later.first_step == 6 and later.losses[0] < losses[3]
