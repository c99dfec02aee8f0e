"""Build the model on its mesh, train it, sample from it. The same under World, under torchrun, and in one process."""

import argparse
import contextlib
import hashlib
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from lecture_lib.parallel.agree import agree
from lecture_lib.parallel.mesh import Mesh, ParallelTransformer
from lecture_lib.parallel.model import Transformer
from lecture_lib.trace import unrecorded
from lecture_lib.train import text

TEMPERATURE = 0.8  # of samples
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}  # of matmuls


class Training(NamedTuple):
    """What ``build`` makes: ``batch(step)`` gives the whole batch of a step, (tokens, targets)."""

    mesh: Mesh
    model: ParallelTransformer
    optimizer: torch.optim.Optimizer
    batch: Callable[[int], tuple[Tensor, Tensor]]


@dataclass
class Result:
    """What a rank returns. The steps and the losses are the same on every rank.

    first_step:         0, or that of the checkpoint
    losses:             of each step from then on, before its update, in nats
    tokens_per_second:  of all ranks together, by this rank's clock; median over the steps but the first
    mfu:                model FLOP/s over the FLOP/s of a large matmul on the same ranks; None if quiet
    sample:             text written by the model; on rank 0
    """

    first_step: int
    losses: list[float]
    tokens_per_second: float
    mfu: float | None
    sample: str


def train(options: argparse.Namespace) -> Result:
    """Runs on every rank. Options: from ``lecture_lib.train.options``.

    Raises ValueError, the same on every rank and before anything is written, for a layout that does not fit the ranks
    or the model, text that cannot be read, a checkpoint of another model, a damaged one, a directory that has
    checkpoints when --resume was not said, that another run writes to or that cannot be written; and in a step whose
    loss or gradient is no number, before anything learns from it.
    """
    with process_group():
        training = build(options)
        try:
            return _train(training, options)
        finally:
            training.mesh.close()


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """The ranks of a World have a process group. Under torchrun it is made here, and for one process alone, too."""
    if dist.is_initialized():
        yield
        return
    local, ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    alone = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
    on_gpus = torch.cuda.device_count() >= ranks
    if on_gpus:
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if on_gpus else "gloo", **alone)
    try:
        yield
    finally:
        dist.destroy_process_group()


def build(options: argparse.Namespace) -> Training:
    """The model on its mesh, its optimizer, and the batches. Raises ValueError as ``train``."""
    agree("train", [f"--{name.replace('_', '-')}={value}" for name, value in vars(options).items()])
    data = text.read(options.data, at_least=options.seq + 1)
    device = device_of_ranks()
    mesh = Mesh(**_axes(options))
    try:
        _check(options)
        with torch.device("cpu"):  # the same weights on every kind of machine
            torch.manual_seed(options.seed)
            whole = Transformer(**model_of(options)).to(device)
        model = ParallelTransformer(
            whole,
            mesh,
            sequence_parallel=options.sequence_parallel,
            schedule=options.schedule,
            micro_batches=options.micro_batches,
            recompute=options.recompute,
            dropout=options.dropout,
            compute_dtype=PRECISIONS[options.precision],
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    except BaseException:
        mesh.close()
        raise

    def batch(step: int) -> tuple[Tensor, Tensor]:
        tokens, targets = text.batch_of(data, step, batch=options.batch, seq=options.seq, seed=options.seed)
        return tokens.to(device), targets.to(device)

    return Training(mesh, model, optimizer, batch)


def device_of_ranks() -> torch.device:
    """Where a rank's tensors are made: a World of GPUs has made its GPU the default."""
    return torch.device("cuda") if dist.get_backend() == "nccl" else torch.get_default_device()


def model_of(options: argparse.Namespace) -> dict[str, int]:
    """What the model is made from; a checkpoint of it fits no other."""
    names = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden")
    return {name: getattr(options, name) for name in names} | {"vocab": text.VOCABULARY}


def _run_of(training: Training, options: argparse.Namespace) -> dict[str, dict]:
    """What a checkpoint says of its run. Other text, as the library of another Python, shows in the first batch."""
    first = hashlib.blake2b(torch.stack(training.batch(0)).cpu().numpy(), digest_size=8).hexdigest()
    samples = {name: getattr(options, name) for name in ("batch", "seq", "seed")} | {"first batch": first}
    return {"model": model_of(options), "samples": samples}


def _axes(options: argparse.Namespace) -> dict[str, int]:
    others = options.dp_shard * options.tp * options.pp * options.cp
    dp = options.dp if options.dp is not None else max(1, dist.get_world_size() // max(1, others))
    return dict(pp=options.pp, dp_replicate=dp, dp_shard=options.dp_shard, cp=options.cp, tp=options.tp)


def _check(options: argparse.Namespace) -> None:
    """That all ranks can share the sequence; all else is checked by the part that it concerns."""
    parts = 2 * options.cp if options.cp > 1 else 1
    parts = math.lcm(parts, options.cp * options.tp) if options.sequence_parallel else parts
    if options.seq < 1 or options.seq % parts:
        raise ValueError(
            f"--seq {options.seq} cannot be shared equally: --cp {options.cp} and --tp {options.tp} need a multiple of "
            f"{parts}, such as {max(parts, options.seq // parts * parts)}."
        )


# ---- the loop --------------------------------------------------------------------------------------------------------


def _train(training: Training, options: argparse.Namespace) -> Result:
    training.model.share(training.batch(0)[0])  # raises if the ranks cannot
    if options.profile:
        agree("train", [], problem=_not_a_directory(Path(options.profile)))
    if not options.checkpoint:
        return _steps(training, options, 0)
    from lecture_lib.train import checkpoint  # takes a moment, which a run without checkpoints need not wait

    directory, (_, model, optimizer, _) = Path(options.checkpoint), training
    run = _run_of(training, options)
    with checkpoint.begin(directory, model, optimizer, run, options.resume) as first:

        def save(done: int) -> None:
            if done % options.checkpoint_every == 0 or done == options.steps:
                checkpoint.save(directory, model, optimizer, run, done)

        return _steps(training, options, first, save)


def _not_a_directory(path: Path) -> str | None:
    """What is wrong with a directory to be written to, as the end of a sentence that begins with "rank 2"."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):  # the profiler says nothing when it cannot write
            pass
    except OSError as error:
        return f"cannot write to {path}: {error.strerror}; --profile has to be a directory."
    return None


def _steps(
    training: Training, options: argparse.Namespace, first: int, save: Callable[[int], None] = lambda done: None
) -> Result:
    """All steps from ``first`` on. ``save``: called after each, with how many are done."""
    mesh, model, optimizer, batch = training
    speaks = dist.get_rank() == 0 and not options.quiet
    peak = None if options.quiet else peak_flops(options.precision, batch(0)[0].device)

    losses, seconds = [], []
    steps = tqdm(range(first, options.steps), disable=not speaks, unit="step", mininterval=0.5)
    for step in steps:
        began = time.perf_counter()
        if options.dropout:
            model.seed_dropout(options.seed, step)
        profiled = options.profile and step == min(first + 1, options.steps - 1)
        trace = Path(options.profile or "") / f"rank{dist.get_rank()}.json"
        with profile(trace) if profiled else contextlib.nullcontext():
            losses.append(model.step(*batch(step)).item())
            norm = model.clip_gradients(options.clip).item()
            for name, value in (("loss", losses[-1]), ("gradient's norm", norm)):  # both the same on every rank
                if not math.isfinite(value):
                    raise ValueError(
                        f"train: the {name} of step {step} is {value}; try a smaller --lr than {options.lr:g}, from "
                        "an earlier checkpoint if there is one."
                    )
            optimizer.step()
            optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        steps.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
        save(step + 1)

    rate = options.batch * options.seq / statistics.median(seconds[1:] or seconds or [math.inf])
    mfu = None if peak is None else rate * flops_per_token(options) / peak
    if speaks and losses:
        print(f"steps {first} to {options.steps}: loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per byte; ", end="")
        print(f"{rate:,.1f} tokens/s, MFU {mfu:.1%} of the {peak / 1e9:,.1f} GFLOP/s that matmuls reach on these ranks")
    if speaks and not losses:
        print(f"nothing to do: {first} steps are done, and --steps is {options.steps}")
    sample = ""
    if options.sample:
        parameters = model.full_state_dict()
        sample = _sample(parameters, options) if dist.get_rank() == 0 else ""
        if speaks:
            print(sample)
    return Result(first, losses, rate, mfu, sample)


def flops_per_token(options: argparse.Namespace) -> int:
    """Of a step of the model, whatever is computed twice: 6 for each weight that multiplies, 2 forward and 4 backward,
    and 12 seq for each feature of attention (Chowdhery et al. 2022, PaLM, appendix B; no causal mask)."""
    key_or_value = options.hidden // options.heads * options.kv_heads
    block = options.hidden * (2 * options.hidden + 2 * key_or_value + 3 * options.ffn_hidden)
    weights = options.layers * block + options.hidden * text.VOCABULARY
    return 6 * weights + 12 * options.layers * options.seq * options.hidden


def peak_flops(precision: str, device: torch.device) -> float:
    """FLOP/s of a large matmul that all ranks do at the same time, summed over the ranks."""
    from torch.utils.benchmark import Timer  # takes a moment, which a quiet run need not wait

    n = 8192 if device.type == "cuda" else 512
    a = torch.randn(n, n, device=device, dtype=PRECISIONS[precision])
    timer = Timer("a @ a", globals={"a": a}, num_threads=torch.get_num_threads())
    with unrecorded():
        dist.barrier()
        rate = torch.tensor(2 * n**3 / timer.blocked_autorange(min_run_time=0.1).median, device=device)
        dist.all_reduce(rate)
    return rate.item()


@contextlib.contextmanager
def profile(path: str | os.PathLike) -> Iterator[torch.profiler.profile]:
    """torch.profiler in the block; then a chrome trace of it in the file ``path``, for https://ui.perfetto.dev."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it says on stderr that it begins and ends
    with torch.profiler.profile() as profiler:
        yield profiler
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))


@torch.no_grad()
def _sample(parameters: dict[str, Tensor], options: argparse.Namespace) -> str:
    """Text, byte by byte, each from what the model expects after those before it."""
    with torch.device("cpu"):
        model, random = Transformer(**model_of(options)), torch.Generator().manual_seed(options.seed)
        model.load_state_dict(parameters)
        tokens = list(b"def ")
        for _ in range(options.sample):
            logits = model(torch.tensor([tokens[-options.seq :]]))[0, -1]  # (vocab,)
            tokens.append(torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=random).item())
    return bytes(tokens).decode("utf-8", errors="replace")
