"""Checkpoints that a kill cannot spoil and that any layout can go on with.

    DIR/step-00000100/checkpoint.json     of which run, after how many steps; size and digest of each file
                      .metadata           torch.distributed.checkpoint's: which tensor is where
                      __3_0.distcp        the tensors that rank 3 wrote
    DIR/.lock                             locked by the run that writes here; the lock ends with the process

Whatever the layout, a checkpoint holds whole tensors under the names of the one-process model: the parameter, and the
optimizer's two moments of it. The ranks of a stage gather each tensor, and take turns in writing them; so each writes,
and holds for a moment, about its share of the model. Reading, each rank goes through its stage's parameters one by one
and keeps its part.

A checkpoint is written under a name that begins with a dot, and renamed when all of it is on the disk: whoever sees
step-00000100 sees all of it. The newest two are kept.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from lecture_lib.parallel.agree import agree
from lecture_lib.parallel.mesh import ParallelTransformer, gather, part_of

KEPT = 2
MOMENTS = ("exp_avg", "exp_avg_sq")  # of Adam: Kingma and Ba 2015
A_DIRECTORY = "a directory with room, which all nodes share"


@contextlib.contextmanager
def begin(
    directory: Path, model: ParallelTransformer, optimizer: torch.optim.AdamW, run: dict[str, dict], resume: bool
) -> Iterator[int]:
    """Go on from the newest checkpoint, if there is one: gives the steps that were done then. In the block this run
    alone writes to the directory. Every rank calls this. ``run``: what the "model" is made from, and its "samples".

    Raises ValueError, the same on every rank and with nothing changed, if there is one and ``resume`` is not set, it is
    of another model, or it is damaged; and if the directory cannot be written, or another run writes there.
    """
    newest, facts, problem = None, {"step": 0}, None
    try:
        newest = (checkpoints(directory) or [None])[-1]
        if newest is not None and not resume:
            problem = f"found the checkpoint {newest}; say --resume to go on from it, or choose another --checkpoint."
        elif newest is not None:
            facts, problem = _look(newest, run)
    except OSError as error:
        problem = f"cannot read {error.filename}: {error.strerror}; --checkpoint has to be {A_DIRECTORY}."
    agree("train", [f"the checkpoint {newest and newest.name}"], problem=problem)
    with contextlib.ExitStack() as held:
        _on_first_rank(lambda: _take(directory, held))
        if newest is not None:
            try:
                _load(newest, model, optimizer, facts["step"])
            except (Exception, dcp.api.CheckpointException) as error:  # torch's is no Exception
                problem = f"cannot load {newest}: {_cause(error)}; remove it to go on from the one before it."
            agree("train", [], problem=problem)
        yield facts["step"]


def save(
    directory: Path, model: ParallelTransformer, optimizer: torch.optim.AdamW, run: dict[str, dict], step: int
) -> None:
    """Write a checkpoint; every rank calls this. Sends, within a stage, all of its tensors to all of its ranks.

    Raises ValueError, the same on every rank, if it cannot be written; the checkpoints before it stay.
    """
    final, partial = directory / f"step-{step:08}", directory / f".step-{step:08}"
    _on_first_rank(partial.mkdir)
    tensors = _whole_tensors(model, optimizer)
    try:
        metadata = dcp.save(tensors, storage_writer=dcp.FileSystemWriter(partial))
    except dcp.api.CheckpointException as error:  # the same on every rank
        free = shutil.disk_usage(directory).free if dist.get_rank() == 0 else 0
        _on_first_rank(lambda: shutil.rmtree(partial))  # else a full disk stays full
        problem = (
            f"could not write the checkpoint {final}, with {free:,} bytes free there: {_cause(error)}; --checkpoint "
            f"has to be {A_DIRECTORY}. The checkpoints before it are there."
        )
        agree("train", [], problem=problem if dist.get_rank() == 0 else None)

    def finish() -> None:
        try:
            publish()
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        for old in checkpoints(directory)[:-KEPT]:
            os.rename(old, going := old.with_name("." + old.name))  # a half-deleted one is none
            shutil.rmtree(going)

    def publish() -> None:
        names = sorted({place.relative_path for place in metadata.storage_data.values()} | {".metadata"})
        files = {name: {"bytes": (partial / name).stat().st_size, "digest": _digest(partial / name)} for name in names}
        with open(partial / "checkpoint.json", "w") as file:
            json.dump({"step": step, **run, "files": files}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync(partial)
        os.rename(partial, final)
        _sync(directory)

    _on_first_rank(finish)


def checkpoints(directory: Path) -> list[Path]:
    """The complete ones, oldest first."""
    return _named(directory, r"step-(\d{8,})")


def _named(directory: Path, pattern: str) -> list[Path]:
    """What has such a name, by the number in it. Nothing else in the directory is ours."""
    found = [(re.fullmatch(pattern, path.name), path) for path in (directory.iterdir() if directory.is_dir() else ())]
    return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]


# ---- writing ---------------------------------------------------------------------------------------------------------


def _whole_tensors(model: ParallelTransformer, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """Those that this rank writes: the ranks of a stage take turns. A tied parameter is written by its first stage."""
    writers, me, mine = model.stage_ranks, dist.get_rank(), {}
    for i, (name, piece) in enumerate(model.pieces.items()):
        state = optimizer.state[piece.parameter]
        own = {name: piece.parameter.detach()}
        own |= {f"{name}.{moment}": state.get(moment, torch.zeros_like(piece.parameter)) for moment in MOMENTS}
        whole = {key: gather(piece, tensor, model.mesh) for key, tensor in own.items()}
        if piece.owned and writers[i % len(writers)] == me:
            mine |= whole
    return mine


def _on_first_rank(action) -> None:
    """Rank 0 does it; all ranks go on when it is done, or raise why it could not be."""
    problem = None
    if dist.get_rank() == 0:
        try:
            action()
        except BlockingIOError:
            problem = "found another run that writes to the same directory; choose another --checkpoint."
        except OSError as error:
            what = ": ".join(filter(None, (error.strerror, error.filename)))
            problem = f"could not write the checkpoint: {what}; --checkpoint has to be {A_DIRECTORY}."
    agree("train", [], problem=problem)


def _take(directory: Path, held: contextlib.ExitStack) -> None:
    """Lock the directory for this process, and remove what a killed run has left half-written in it."""
    directory.mkdir(parents=True, exist_ok=True)
    lock = held.enter_context(open(directory / ".lock", "a"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # some network file systems have no locks
        pass
    for left in _named(directory, r"\.step-(\d{8,})"):
        shutil.rmtree(left)


def _cause(error: BaseException) -> str:
    """The first line of what went wrong on the rank where it did."""
    if failures := getattr(error, "failures", None):
        error = next(iter(failures.values()))[0]
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__
    return (str(error) or type(error).__name__).splitlines()[0]


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


def _sync(directory: Path) -> None:
    """What is in a directory, its names, is on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- reading ---------------------------------------------------------------------------------------------------------


def _look(path: Path, run: dict[str, dict]) -> tuple[dict, str | None]:
    """What is said of a checkpoint, and what is wrong with it, as the end of a sentence that begins with "rank 2"."""
    instead = f"the checkpoint is damaged; remove {path} to go on from the one before it."
    try:
        facts = json.loads((path / "checkpoint.json").read_text())
        model, samples = dict(facts["model"]), dict(facts["samples"])
        files = {name: (int(file["bytes"]), file["digest"]) for name, file in facts["files"].items()}
        facts = {"step": int(facts["step"])}
        sizes = {name: (path / name).stat().st_size for name in files}
    except FileNotFoundError as error:
        return {}, f"found no {error.filename}: {instead}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}, f"cannot read {path / 'checkpoint.json'}: {instead}"
    for name, (size, digest) in files.items():
        if sizes[name] != size:
            return {}, f"found {path / name} with {sizes[name]:,} bytes, and {size:,} were written: {instead}"
        if dist.get_rank() == 0 and _digest(path / name) != digest:  # one reads it all, for all
            return {}, f"found {path / name} with other bytes than were written: {instead}"
    if difference := _difference(model, run["model"]):
        return {}, (
            f"found {path}, a checkpoint of another model: it has {difference}; choose the same, or another "
            "--checkpoint."
        )
    if dist.get_rank() == 0 and (difference := _difference(samples, run["samples"])):
        print(f"train: goes on from {path} with other samples: it had {difference}", flush=True)
    return facts, None


def _difference(saved: dict, ours: dict) -> str:
    """ "hidden 32, and this one hidden 64", or nothing."""
    differ = sorted(name for name in ours.keys() | saved.keys() if ours.get(name) != saved.get(name))
    there, here = (", ".join(f"{name} {facts.get(name)}" for name in differ) for facts in (saved, ours))
    return differ and f"{there}, and this one {here}" or ""


def _load(path: Path, model: ParallelTransformer, optimizer: torch.optim.AdamW, step: int) -> None:
    reader = dcp.FileSystemReader(path)
    sizes = {name: stored.size for name, stored in reader.read_metadata().state_dict_metadata.items()}
    for name, piece in model.pieces.items():
        keys = (name, *(f"{name}.{moment}" for moment in MOMENTS))
        whole = {key: torch.empty(sizes[key], dtype=piece.parameter.dtype, device="cpu") for key in keys}
        with warnings.catch_warnings():  # each rank reads by itself, as is meant
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(whole, storage_reader=reader, no_dist=True)
        own = [part_of(piece, whole[key], model.mesh).to(piece.parameter.device) for key in keys]
        with torch.no_grad():
            piece.parameter.copy_(own[0])
        moments = {moment: tensor.clone() for moment, tensor in zip(MOMENTS, own[1:])}
        optimizer.state[piece.parameter] = {"step": torch.tensor(float(step), device="cpu"), **moments}
