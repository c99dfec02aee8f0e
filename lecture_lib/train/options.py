"""All that can be chosen about a run, said once: on the command line, or as the same words in a cell."""

import argparse
import shlex
from collections.abc import Sequence

import torch

from lecture_lib.parallel.mesh import SCHEDULES
from lecture_lib.parallel.recompute import WAYS


def count(word: str) -> int:
    if not 1 <= (number := int(word)) < 2**31:
        raise argparse.ArgumentTypeError(f"{number} is not from 1 to 2^31 - 1")
    return number


def number_from_0(word: str) -> int:
    if not 0 <= (number := int(word)) < 2**63:
        raise argparse.ArgumentTypeError(f"{number} is not from 0 to 2^63 - 1")
    return number


def positive(word: str) -> float:
    if not 0 < (number := float(word)) <= torch.finfo(torch.float32).max:
        raise argparse.ArgumentTypeError(f"{number} is not more than 0, or no number that float32 has")
    return number


def directory(word: str) -> str:
    if not word:
        raise argparse.ArgumentTypeError("it is empty; name a directory")
    return word


class Parser(argparse.ArgumentParser):
    """Raises ValueError where others print their usage and end the process: a cell is no process."""

    def error(self, message: str):
        raise ValueError(f"train: {message}; --help says what there is.")


def options(words: str | Sequence[str] = ()) -> argparse.Namespace:
    """``options("--tp 2 --pp 2")``: what was said, and the defaults for all else.

    Raises ValueError for what cannot be said.
    """
    what = "Train a small transformer on text."
    parser = Parser(prog="python -m lecture_lib.train", description=what)

    layout = parser.add_argument_group("layout", "ranks along each axis; together they are all ranks")
    layout.add_argument("--dp", type=count, help="copies of the model; default: as many as the ranks allow")
    layout.add_argument("--dp-shard", type=count, default=1, help="pieces into which a copy is sharded (ZeRO-3)")
    layout.add_argument("--tp", type=count, default=1, help="slices of every matrix")
    layout.add_argument("--pp", type=count, default=1, help="ranks that share the layers, as a pipeline")
    layout.add_argument("--cp", type=count, default=1, help="slices of the sequence")
    layout.add_argument("--sequence-parallel", action="store_true", help="with --tp: split all else by tokens")
    layout.add_argument("--schedule", choices=SCHEDULES, default="one_f_one_b", help="of the pipeline")
    layout.add_argument("--micro-batches", type=count, default=1, help="parts of a rank's share of the batch")

    model = parser.add_argument_group("model, which reads bytes")
    model.add_argument("--layers", type=count, default=4)
    model.add_argument("--hidden", type=count, default=128)
    model.add_argument("--heads", type=count, default=4)
    model.add_argument("--kv-heads", type=count, default=2)
    model.add_argument("--ffn-hidden", type=count, default=384)

    training = parser.add_argument_group("training")
    training.add_argument("--data", nargs="+", action="extend", default=[], help="default: Python's standard library")
    training.add_argument("--seq", type=count, default=128, help="tokens in a sample")
    training.add_argument("--batch", type=count, default=16, help="samples in a step, over all ranks")
    training.add_argument("--steps", type=count, default=200, help="in all, with those before a checkpoint")
    training.add_argument("--lr", type=positive, default=3e-3, help="of AdamW")
    training.add_argument("--clip", type=positive, default=1.0, help="largest norm of the gradient")
    training.add_argument("--seed", type=number_from_0, default=0, help="decides the first weights and the batches")
    training.add_argument("--recompute", choices=WAYS, default="none", help="activations, in the backward pass")
    training.add_argument("--dropout", type=float, default=0.0, help="share of what a layer adds that falls out")
    training.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of matmuls; weights are fp32")

    keeping = parser.add_argument_group("checkpoints")
    keeping.add_argument("--checkpoint", type=directory, metavar="DIR", help="a directory that all nodes share")
    keeping.add_argument("--checkpoint-every", type=count, default=100, metavar="STEPS", help="and after the last step")
    keeping.add_argument("--resume", action="store_true", help="go on from the newest one in DIR, if there is one")

    shown = parser.add_argument_group("output")
    shown.add_argument("--sample", type=number_from_0, default=0, metavar="BYTES", help="of text to write in the end")
    shown.add_argument("--profile", type=directory, metavar="DIR", help="for a chrome trace of one step of each rank")
    shown.add_argument("--quiet", action="store_true", help="no progress, no summary")
    chosen = parser.parse_args(shlex.split(words) if isinstance(words, str) else words)
    if chosen.resume and not chosen.checkpoint:
        parser.error("--resume goes on from a checkpoint, and no --checkpoint DIR is given")
    return chosen
