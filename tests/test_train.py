"""The trainer: the same run on any layout, killed and resumed, under World, torchrun and Slurm; and what it refuses."""

import contextlib
import errno
import fcntl
import importlib
import io
import json
import math
import os
import re
import resource
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lecture_lib import RankError, World, planner
from lecture_lib.train import checkpoint, options, text, tradeoff, tradeoff_table, train
from lecture_lib.train.loop import flops_per_token, model_of

pytestmark = pytest.mark.timeout(400)  # a crowded machine takes many times as long
CLOSE = 1e-4  # relative
SMALL = "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn-hidden 48 --seq 16 --batch 4 --steps 6 --quiet "
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def alone(worlds):
    return worlds[1]


@pytest.fixture(scope="module")
def losses(alone):
    """Of 6 steps in one process."""
    return alone.run(train, options(SMALL))[0].losses


@pytest.fixture(scope="module")
def pair(worlds):
    """Two ranks, to be killed."""
    return worlds[2]


def far(ours, theirs):
    """Largest relative difference."""
    assert len(ours) == len(theirs) and all(map(math.isfinite, ours))
    return max(abs(a - b) / b for a, b in zip(ours, theirs))


def message_of(world, words, function=train):
    """The ValueError that all ranks raise."""
    with pytest.raises(RankError) as raised:
        world.run(function, options(SMALL + words))
    assert isinstance(raised.value.exception, ValueError), str(raised.value)
    assert str(raised.value).count("raised the same") == world.size - 1
    return str(raised.value.exception)


def everything_in(directory):
    """Names, sizes and times of change of all files."""
    return {
        str(path.relative_to(directory)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in Path(directory).rglob("*")
    }


# ---- text ------------------------------------------------------------------------------------------------------------


def test_a_batch_is_text_and_the_same_text_one_byte_later():
    data = torch.arange(256, dtype=torch.uint8)
    tokens, targets = text.batch_of(data, 3, batch=5, seq=10)
    assert tokens.shape == targets.shape == (5, 10) and tokens.dtype == torch.int64
    assert torch.equal(tokens + 1, targets)
    assert torch.equal(tokens, text.batch_of(data, 3, batch=5, seq=10)[0])
    assert not torch.equal(tokens, text.batch_of(data, 4, batch=5, seq=10)[0])
    assert not torch.equal(tokens, text.batch_of(data, 3, batch=5, seq=10, seed=1)[0])


def test_a_batch_can_be_the_first_and_the_last_bytes():
    data = torch.arange(12, dtype=torch.uint8)
    first = {text.batch_of(data, step, batch=50, seq=10)[0][:, 0].unique().numel() for step in range(3)}
    assert first == {2}  # 0 and 1: 11 bytes from there


def test_the_text_is_the_standard_library_unless_files_are_given(alone, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one ")
    (tmp_path / "b.txt").write_bytes(bytes([255, 0]))
    files = [str(tmp_path / "b.txt"), str(tmp_path / "a.txt")]
    assert bytes(alone.run(text.read, files)[0].tolist()) == bytes([255, 0]) + b"one "
    library = bytes(alone.run(text.read)[0].numpy())
    assert b"class ArgumentParser" in library and b"class Decimal" in library


# ---- layouts and checkpoints -----------------------------------------------------------------------------------------


def test_a_run_goes_on_at_one_layout_after_the_other(world, alone, losses, tmp_path):
    """Six steps, each at another layout, each from the checkpoint of the one before: the losses of one process."""
    keep = f"--checkpoint {tmp_path / 'run'} --resume "
    layouts = [
        (alone, ""),
        (world, "--tp 2 --pp 2 --micro-batches 2 --schedule zero_bubble_h1"),
        (world, "--dp-shard 2 --tp 2 --sequence-parallel --recompute full"),
        (world, "--dp 2 --dp-shard 2"),
        (world, "--cp 2 --tp 2"),
        (alone, "--micro-batches 4"),
    ]
    for step, (ranks, layout) in enumerate(layouts):
        for result in ranks.run(train, options(SMALL + keep + layout + f" --steps {step + 1}")):
            assert result.first_step == step, layout
            assert far(result.losses, losses[step : step + 1]) < CLOSE, layout
    assert losses[-1] < losses[0]
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "run")] == ["step-00000005", "step-00000006"]


def test_a_run_that_goes_on_drops_what_it_would_have_dropped(pair, losses, tmp_path):
    words = SMALL + "--tp 2 --dropout 0.2 --steps 4 "
    whole = pair.run(train, options(words))[0].losses
    keep = f"--checkpoint {tmp_path / 'run'} "
    pair.run(train, options(words + keep + "--steps 2"))
    for result in pair.run(train, options(words + keep + "--resume")):
        assert result.first_step == 2 and far(result.losses, whole[2:]) < CLOSE
    assert far(whole, losses[:4]) > CLOSE


def die_at(function_name, module_name, rank, call):
    """Have the ``call``-th call of a function on this rank kill the rank."""
    if dist.get_rank() != rank:
        return
    module, left = importlib.import_module(module_name), [call]
    original = getattr(module, function_name)

    def dying(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(module, function_name, dying)


@pytest.mark.parametrize(
    "function, module, rank, call, steps_done",
    [
        ("save", "torch.distributed.checkpoint", 1, 2, 1),  # while the other writes its tensors
        ("fsync", "os", 1, 2, 1),  # its tensors are written, the whole is not
        ("_sync", "lecture_lib.train.checkpoint", 0, 3, 1),  # all is there, under another name yet
        ("_sync", "lecture_lib.train.checkpoint", 0, 4, 2),  # it has its name
        ("rmtree", "shutil", 0, 1, 3),  # an old one is half removed
    ],
)
def test_a_kill_at_any_moment_leaves_a_checkpoint_to_go_on_from(
    pair, losses, tmp_path, function, module, rank, call, steps_done
):
    keep = f"--checkpoint {tmp_path / 'run'} --tp 2 --steps 4 "

    def killed(chosen):
        die_at(function, module, rank, call)
        return train(chosen)

    with pytest.raises(RankError):
        pair.run(killed, options(SMALL + keep + "--checkpoint-every 1"))
    assert checkpoint.checkpoints(tmp_path / "run")[-1].name == f"step-{steps_done:08}"
    for result in pair.run(train, options(SMALL + keep + "--resume")):
        assert result.first_step == steps_done and far(result.losses, losses[steps_done:4]) < CLOSE
    left = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert left == [".lock", f"step-{steps_done:08}", "step-00000004"]


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, said",
    [
        ("--tp 3", ["tp 3", "3 ranks", "there are 4"]),
        ("--pp 4 --micro-batches 4", ["2 layers", "4 stages"]),
        ("--tp 4 --heads 2", ["2 query heads", "4 ranks"]),
        ("--cp 4 --seq 20", ["--seq 20", "--cp 4", "multiple of 8", "16"]),
        ("--tp 4 --sequence-parallel --seq 18", ["--seq 18", "--tp 4", "multiple of 4"]),
        ("--batch 6", ["batch of 6", "multiple of 4"]),
        ("--data /no/such/file.txt", ["rank 0 cannot read /no/such/file.txt", "No such file"]),
        ("--seq 100000000", ["bytes of text", "100000001"]),
    ],
)
def test_what_does_not_fit_is_one_error_with_its_numbers_on_every_rank(world, tmp_path, words, said):
    message = message_of(world, f"--checkpoint {tmp_path / 'run'} " + words)
    assert all(part in message for part in said), message
    assert not (tmp_path / "run").exists()


def test_a_file_that_one_rank_cannot_read(world, tmp_path):
    def one_lacks_it(chosen):
        if dist.get_rank() == 2:
            (Path(chosen.data[0])).rename(chosen.data[0] + ".moved")
        dist.barrier()
        chosen.data = [chosen.data[0] + (".moved" if dist.get_rank() == 1 else "")]
        return text.read(chosen.data)

    (tmp_path / "some.txt").write_text("words " * 100)
    with pytest.raises(RankError, match="rank 0 cannot read") as raised:
        world.run(one_lacks_it, options(f"--data {tmp_path / 'some.txt'}"))
    assert str(raised.value).count("raised the same") == 3


def test_ranks_that_read_different_texts(world, tmp_path):
    def different(folder):
        path = folder / f"{dist.get_rank()}.txt"
        path.write_text("a" * (100 + dist.get_rank() // 3))
        return text.read([str(path)])

    with pytest.raises(RankError, match="rank 3 brought 101 bytes of text"):
        world.run(different, tmp_path)


@pytest.fixture
def kept(alone, tmp_path):
    """A directory with one checkpoint of SMALL, after 2 steps."""
    alone.run(train, options(SMALL + f"--steps 2 --checkpoint {tmp_path / 'run'}"))
    return tmp_path / "run"


def test_a_checkpoint_is_not_overwritten_by_a_run_that_does_not_resume(world, kept):
    before = everything_in(kept)
    message = message_of(world, f"--checkpoint {kept}")
    assert "step-00000002" in message and "--resume" in message
    assert everything_in(kept) == before


def test_a_checkpoint_of_another_model(world, kept):
    before = everything_in(kept)
    message = message_of(world, f"--checkpoint {kept} --resume --hidden 64 --layers 4 --pp 2")
    assert "hidden 32, layers 2" in message and "hidden 64, layers 4" in message
    assert everything_in(kept) == before


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "checkpoint.json"])
def test_a_truncated_checkpoint(world, kept, file):
    path = kept / "step-00000002" / file
    size = path.stat().st_size
    os.truncate(path, size // 2)
    before = everything_in(kept)
    message = message_of(world, f"--checkpoint {kept} --resume --tp 2")
    assert "damaged" in message and str(path) in message
    assert file == "checkpoint.json" or (f"{size // 2:,}" in message and f"{size:,}" in message)
    assert everything_in(kept) == before


def test_a_checkpoint_with_one_byte_changed(world, kept):
    path = kept / "step-00000002" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    message = message_of(world, f"--checkpoint {kept} --resume --pp 2")
    assert f"{path} with other bytes than were written" in message and "remove" in message


@pytest.mark.parametrize("facts", ["[]", "null", '{"step": 2}', '{"step": 2, "model": 3, "samples": {}, "files": {}}'])
def test_a_checkpoint_whose_facts_are_others(alone, kept, facts):
    (kept / "step-00000002" / "checkpoint.json").write_text(facts)
    assert "checkpoint.json: the checkpoint is damaged" in message_of(alone, f"--checkpoint {kept} --resume")


def test_a_checkpoint_of_a_run_with_other_samples_goes_on_and_says_so(alone, kept, capfd):
    alone.run(train, options(SMALL + f"--steps 3 --checkpoint {kept} --resume"))
    assert capfd.readouterr().out == ""
    alone.run(train, options(SMALL + f"--steps 4 --checkpoint {kept} --resume --batch 8"))
    said = capfd.readouterr().out
    assert re.search(r"other samples: it had batch 4, first batch \w+, and this one batch 8, first batch \w+\n", said)


def test_a_checkpoint_of_a_run_on_other_text_goes_on_and_says_so(alone, kept, tmp_path, capfd):
    (tmp_path / "other.txt").write_text("other words " * 1000)
    alone.run(train, options(SMALL + f"--steps 3 --checkpoint {kept} --resume --data {tmp_path / 'other.txt'}"))
    said = capfd.readouterr().out
    assert re.search(r"with other samples: it had first batch (\w+), and this one first batch (?!\1)\w+\n", said)


def test_two_runs_do_not_write_to_the_same_directory(pair, kept):
    (kept / ".step-00000003").mkdir()  # half written, by the run that goes on
    before = everything_in(kept)
    with open(kept / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "found another run that writes" in message_of(pair, f"--checkpoint {kept} --resume")
        assert everything_in(kept) == before
    assert pair.run(train, options(SMALL + f"--checkpoint {kept} --resume --steps 3"))[0].first_step == 2


def test_a_disk_that_is_full_is_one_sentence_and_keeps_what_was_there(pair, kept):
    before = everything_in(kept)

    def without_room(chosen):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        try:
            return train(chosen)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    message = message_of(pair, f"--checkpoint {kept} --resume --tp 2 --steps 3", without_room)
    assert "could not write the checkpoint" in message and "a directory with room" in message
    assert "bytes free" in message and "\n" not in message and len(message) < 500
    assert everything_in(kept).keys() == before.keys()


def test_a_disk_that_is_full_at_the_last_file_is_left_as_it_was(alone, kept):
    before = everything_in(kept)

    def without_room(chosen):
        def no_room(*_, **__):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as from a write: without a name

        from lecture_lib.train import checkpoint

        with mock.patch.object(checkpoint.json, "dump", no_room):
            return train(chosen)

    message = message_of(alone, f"--checkpoint {kept} --resume --steps 3", without_room)
    assert "could not write the checkpoint: No space left on device; --checkpoint has to be" in message
    assert everything_in(kept) == before


def test_what_is_not_ours_in_the_directory_stays(alone, kept):
    folders = (".step-by-step", "step-1", ".step-0000000a", "step-00000004.old")
    foreign = [".step-notes", *(f"{name}/note" for name in folders)]
    for name in foreign:
        (kept / name).parent.mkdir(exist_ok=True)
        (kept / name).write_text("mine")
    (kept / ".step-00000007").mkdir()  # half written
    alone.run(train, options(SMALL + f"--checkpoint {kept} --resume --steps 5 --checkpoint-every 1"))
    assert {path.name for path in kept.iterdir() if "step-0000000" in path.name and "a" not in path.name} == {
        "step-00000004",
        "step-00000004.old",
        "step-00000005",
    }
    assert {(kept / name).read_text() for name in foreign} == {"mine"}


def test_a_checkpoint_that_lacks_a_file(world, kept):
    (kept / "step-00000002" / "__0_0.distcp").unlink()
    assert "found no" in message_of(world, f"--checkpoint {kept} --resume")


def test_a_checkpoint_that_cannot_be_written(world, tmp_path):
    (tmp_path / "file").write_text("in the way")
    message = message_of(world, f"--checkpoint {tmp_path / 'file' / 'run'}")
    assert "could not write the checkpoint" in message
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_loss_that_is_no_number_stops_the_run(world):
    message = message_of(world, "--lr 1e30 --steps 20")
    assert re.search(r"the (loss|gradient's norm) of step \d+ is (nan|inf)", message) and "1e+30" in message


def test_what_is_no_number_is_never_kept(alone, tmp_path):
    message_of(alone, f"--checkpoint {tmp_path / 'run'} --checkpoint-every 1 --steps 20 --lr 1e3")
    for path in checkpoint.checkpoints(tmp_path / "run"):
        dcp_to_torch_save(path, tmp_path / "tensors")
        tensors = torch.load(tmp_path / "tensors")
        assert len(tensors) > 20 and all(tensor.isfinite().all() for tensor in tensors.values())


def test_a_profile_that_cannot_be_written(pair, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert f"cannot write to {tmp_path / 'file'}" in message_of(pair, f"--profile {tmp_path / 'file'}")
    assert "cannot write to /proc/self" in message_of(pair, "--profile /proc/self")  # it is there, and takes no files


@pytest.mark.parametrize(
    "words, said",
    [
        ("--clip -1", "argument --clip: -1.0 is not more than 0"),
        ("--clip nan", "argument --clip: nan is not more than 0"),
        ("--lr 0", "argument --lr: 0.0 is not more than 0"),
        ("--lr inf", "argument --lr: inf is not more than 0, or no number that float32 has"),
        ("--lr 1e300", "argument --lr: 1e+300 is not more than 0, or no number that float32 has"),
        ("--batch 100000000000000000000", "is not from 1 to 2^31 - 1"),
        ("--checkpoint ''", "argument --checkpoint: it is empty; name a directory"),
        ("--profile ''", "argument --profile: it is empty; name a directory"),
        ("--seed -1", "argument --seed: -1 is not from 0"),
        ("--sample -3", "argument --sample: -3 is not from 0"),
        ("--resume", "no --checkpoint DIR is given"),
    ],
)
def test_what_cannot_be_said(words, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        options(words)


def test_data_said_twice_is_all_read():
    assert options("--data a b --data c").data == ["a", "b", "c"] and options().data == []


# ---- what else it can do ---------------------------------------------------------------------------------------------


def test_bf16_learns_as_fp32_does(world, losses):
    result = world.run(train, options(SMALL + "--precision bf16 --dp-shard 2 --tp 2"))[0]
    assert far(result.losses, losses) < 0.02 and result.losses != losses


def test_the_first_rank_writes_some_text(world):
    results = world.run(train, options(SMALL + "--sample 30 --pp 2 --tp 2"))
    assert results[0].sample.startswith("def ") and len(results[0].sample.encode()) >= 34
    assert [result.sample for result in results[1:]] == [""] * 3


def test_a_profile_is_a_chrome_trace_of_each_rank(world, tmp_path):
    world.run(train, options(SMALL + f"--steps 3 --tp 2 --profile {tmp_path / 'traces'}"))
    for rank in range(4):
        trace = json.loads((tmp_path / "traces" / f"rank{rank}.json").read_text())
        names = {event.get("name") for event in trace["traceEvents"]}
        assert {"aten::mm", "gloo:all_reduce"} <= names
        assert sum(event.get("name") == "Optimizer.step#AdamW.step" for event in trace["traceEvents"]) == 1  # one step


def test_the_flops_of_a_token_are_those_of_the_planner():
    for words in ("", "--layers 3 --hidden 96 --heads 6 --kv-heads 2 --ffn-hidden 80 --seq 40"):
        chosen = options(words)
        on_paper = planner.Transformer(**model_of(chosen), gated=True, seq=chosen.seq)
        assert flops_per_token(chosen) == on_paper.flops_per_token()


def test_store_recompute_communicate(world):
    chosen = options(SMALL + "--batch 8 --kv-heads 4")
    rows = world.run(tradeoff, chosen)[0]
    store, selective, full, tensor, sequence, both, context = rows
    assert all(abs(row.loss - store.loss) < CLOSE for row in rows)

    assert full.activation_bytes < selective.activation_bytes < store.activation_bytes
    assert both.activation_bytes < sequence.activation_bytes < tensor.activation_bytes < store.activation_bytes
    assert context.activation_bytes < store.activation_bytes
    assert [row.bytes_sent for row in (store, selective, full)] == [0, 0, 0]

    # Of a block's forward pass, selective repeats attention, 2 matmuls of T x T x d for each head, of which a causal
    # mask leaves half; full repeats all but the last matrix, whose output the backward pass does not ask for.
    layers, h, f, T, rows_ = 2, 32, 48, 16, 8 * 16
    attention = layers * 2 * rows_ * T * h
    matrices = layers * 2 * rows_ * (4 * h * h + 2 * h * f)
    assert tensor.flops == sequence.flops == context.flops == store.flops  # the work is shared, and none is added
    assert both.flops == full.flops
    assert selective.flops - store.flops == attention
    assert full.flops - store.flops == attention + matrices

    # Sequence parallelism sends the bytes of tensor parallelism, and the gradients of 2L + 1 norms; full recomputation
    # sends again what a block's forward pass does.
    S = rows_ * h * 4
    assert sequence.bytes_sent - tensor.bytes_sent == (2 * layers + 1) * 2 * 3 / 4 * h * 4
    assert both.bytes_sent - sequence.bytes_sent == pytest.approx(layers * 4 * 3 / 4 * S, rel=0.3)
    in_bf16 = world.run(tradeoff, options(SMALL + "--batch 8 --kv-heads 4 --precision bf16"))[0]
    assert in_bf16[0].activation_bytes < store.activation_bytes
    assert all(0 < abs(half.loss - row.loss) < 0.01 * row.loss for half, row in zip(in_bf16, rows))
    table = tradeoff_table([*rows[1:], store._replace(loss=store.loss * 1.01)]).splitlines()
    assert len(table) == 8 and len({len(line) for line in table}) == 1
    assert [line.split()[-1] for line in table[1:]] == ["same"] * 6 + ["other"]


# ---- as a program ----------------------------------------------------------------------------------------------------


def as_a_program(folder, words):
    """What ``python -m lecture_lib.train WORDS`` prints, and how it ends. One process alone has no launcher; several
    have the environment that torchrun gives them."""
    if os.environ["WORLD_SIZE"] == "1":
        os.environ.pop("RANK", None)
    os.chdir(folder)
    said, sys.argv = io.StringIO(), ["train", *words]
    with contextlib.redirect_stdout(said):
        try:
            runpy.run_module("lecture_lib.train", run_name="__main__")
        except SystemExit as end:
            return said.getvalue(), end.code
    return said.getvalue(), 0


PROGRAM = SMALL.replace("--quiet", "").split()


def test_four_ranks_train_on_real_text_in_the_environment_of_torchrun(tmp_path, losses):
    with World(4, backend=None, threads=1) as ranks:
        said = ranks.run(as_a_program, tmp_path, [*PROGRAM, "--tp", "2", "--pp", "2"])
    assert [code for _, code in said] == [0, 0, 0, 0]
    assert f"steps 0 to 6: loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per byte" in said[0][0]
    assert [words for words, _ in said[1:]] == ["", "", ""] and losses[-1] < losses[0]


def test_one_process_needs_no_launcher_and_says_what_is_wrong(tmp_path):
    with World(1, backend=None, threads=1) as alone:
        said, code = alone.run(as_a_program, tmp_path, [*PROGRAM, "--steps", "2"])[0]
        assert code == 0 and re.search(
            r"steps 0 to 2: loss [\d.]+ -> [\d.]+ nats per byte; [\d,.]+ tokens/s, MFU", said
        )
        for words, sentence in (
            (["--tp", "2"], "2 ranks, and there are 1; choose axes of 1 ranks."),
            (["--steps", "0"], "train: argument --steps: 0 is not from 1 to 2^31 - 1; --help says what there is."),
        ):
            said, code = alone.run(as_a_program, tmp_path, [*PROGRAM, *words])[0]
            assert said == "" and code.endswith(sentence)
    assert list(tmp_path.iterdir()) == []


def test_the_slurm_template_runs_torchrun_as_slurm_would_run_it(tmp_path, alone, losses):
    """Slurm's own programs are replaced by two lines each; all else is the template, torchrun and the trainer."""
    alone.run(train, options(SMALL + f"--steps 2 --checkpoint {tmp_path / 'run'}"))  # a job that was requeued goes on
    for name, body in (
        ("scontrol", "echo localhost"),
        ("srun", 'shift; echo "srun $SRUN_CPUS_PER_TASK $*" >> srun.txt; exec "$@"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "torchrun").write_text(f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    slurm = dict(
        SLURM_JOB_ID="123456", SLURM_JOB_NODELIST="localhost", SLURM_NNODES="1", SLURM_CPUS_PER_TASK="2",
        SLURM_GPUS_ON_NODE="2", SLURM_RESTART_COUNT="1",
        PATH=f"{tmp_path}:{os.environ['PATH']}", PYTHONPATH=str(ROOT),
    )  # fmt: skip
    words = [*PROGRAM, "--tp", "2", f"--checkpoint={tmp_path / 'run'}"]
    done = subprocess.run(
        ["bash", str(ROOT / "tools" / "train.sbatch"), *words],
        cwd=tmp_path, env={**os.environ, **slurm}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"steps 2 to 6: loss {losses[2]:.3f} -> {losses[-1]:.3f}" in done.stdout
    assert losses[-1] < losses[2]  # on the source of the standard library
    line = (tmp_path / "srun.txt").read_text()
    assert "--nnodes 1 --nproc-per-node 2 --rdzv-id 123456 --rdzv-backend c10d --rdzv-endpoint localhost:23456" in line
    assert line.strip().endswith("--resume") and line.startswith("srun 2 torchrun")
