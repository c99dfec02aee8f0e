"""Checkpoints that a kill cannot spoil and that any layout can go on with.

    DIR/step-00000100/checkpoint.json     of which model, after how many steps, how many bytes in each file
                      .metadata           torch.distributed.checkpoint's: which tensor is where
                      __3_0.distcp        the tensors that rank 3 wrote

Whatever the layout, a checkpoint holds whole tensors under the names of the one-process model: the parameter, and the
optimizer's two moments of it. The ranks of a stage gather each tensor, and take turns in writing them; so each writes,
and holds for a moment, about its share of the model. Reading, each rank goes through its stage's parameters one by one
and keeps its part.

A checkpoint is written under a name that begins with a dot, and renamed when all of it is on the disk: whoever sees
step-00000100 sees all of it. The newest two are kept.
"""

import json
import os
import re
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from lecture_lib.parallel.agree import agree
from lecture_lib.parallel.mesh import ParallelTransformer, gather, part_of

KEPT = 2
MOMENTS = ("exp_avg", "exp_avg_sq")  # of Adam: Kingma and Ba 2015


def save(
    directory: Path, model: ParallelTransformer, optimizer: torch.optim.AdamW, made_from: dict[str, int], step: int
) -> None:
    """Write a checkpoint; every rank calls this. Sends, within a stage, all of its tensors to all of its ranks.

    Raises ValueError, the same on every rank, if it cannot be written; the checkpoints before it stay.
    """
    final, partial = directory / f"step-{step:08}", directory / f".step-{step:08}"

    def start() -> None:
        for left in directory.glob(".step-*"):  # by a run that was killed
            shutil.rmtree(left)
        partial.mkdir(parents=True)

    _on_first_rank(start)
    tensors = _whole_tensors(model, optimizer)
    try:
        metadata = dcp.save(tensors, storage_writer=dcp.FileSystemWriter(partial))
    except dcp.api.CheckpointException as error:  # the same on every rank
        raise ValueError(f"train: the checkpoint {final} could not be written: {error}") from error

    def finish() -> None:
        written = {place.relative_path for place in metadata.storage_data.values()} | {".metadata"}
        sizes = {name: (partial / name).stat().st_size for name in sorted(written)}
        facts = {"step": step, "model": made_from, "bytes": sizes}
        with open(partial / "checkpoint.json", "w") as file:
            json.dump(facts, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync(partial)
        os.rename(partial, final)
        _sync(directory)
        for old in checkpoints(directory)[:-KEPT]:
            os.rename(old, going := old.with_name("." + old.name))  # a half-deleted one is none
            shutil.rmtree(going)

    _on_first_rank(finish)


def begin(
    directory: Path,
    model: ParallelTransformer,
    optimizer: torch.optim.AdamW,
    made_from: dict[str, int],
    resume: bool,
) -> int:
    """Go on from the newest checkpoint, if there is one; the steps that were done then. Every rank calls this.

    Raises ValueError, the same on every rank and with nothing changed, if there is one and ``resume`` is not set, it is
    of another model, or it is damaged.
    """
    newest = (checkpoints(directory) or [None])[-1]
    facts, problem = {"step": 0}, None
    if newest is not None:
        if not resume:
            problem = f"found the checkpoint {newest}; say --resume to go on from it, or choose another --checkpoint."
        else:
            facts, problem = _look(newest, made_from)
    agree("train", [f"the checkpoint {newest and newest.name}"], problem=problem)
    if newest is not None:
        _load(newest, model, optimizer, facts["step"])
    return facts["step"]


def checkpoints(directory: Path) -> list[Path]:
    """The complete ones, oldest first."""
    found = directory.iterdir() if directory.is_dir() else ()
    return sorted(path for path in found if re.fullmatch(r"step-\d{8}", path.name))


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
        except OSError as error:
            problem = (
                f"could not write the checkpoint: {error.strerror}: {error.filename}; --checkpoint has to be a "
                "directory with room, which all nodes share."
            )
    agree("train", [], problem=problem)


def _sync(directory: Path) -> None:
    """What is in a directory, its names, is on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- reading ---------------------------------------------------------------------------------------------------------


def _look(path: Path, made_from: dict[str, int]) -> tuple[dict, str | None]:
    """What is said of a checkpoint, and what is wrong with it, as the end of a sentence that begins with "rank 2"."""
    instead = f"remove {path} to go on from the one before it."
    try:
        facts = json.loads((path / "checkpoint.json").read_text())
        sizes = {name: (path / name).stat().st_size for name in facts["bytes"]}
    except FileNotFoundError as error:
        return {}, f"found no {error.filename}: the checkpoint is damaged; {instead}"
    except (ValueError, KeyError):
        return {}, f"cannot read {path / 'checkpoint.json'}: the checkpoint is damaged; {instead}"
    for name, expected in facts["bytes"].items():
        if sizes[name] != expected:
            return {}, (
                f"found {path / name} with {sizes[name]:,} bytes, and {expected:,} were written: the checkpoint is "
                f"damaged; {instead}"
            )
    if (saved := facts["model"]) != made_from:
        differ = sorted(n for n in made_from.keys() | saved.keys() if made_from.get(n) != saved.get(n))
        there, here = (", ".join(f"{name} {model.get(name)}" for name in differ) for model in (saved, made_from))
        return {}, (
            f"found {path}, a checkpoint of another model: it has {there}, and this one {here}; choose the same, or "
            "another --checkpoint."
        )
    return facts, None


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
