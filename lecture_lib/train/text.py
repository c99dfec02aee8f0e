"""Text as tokens: each byte is one. Every machine that runs this has some: the source of Python's standard library."""

import functools
import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lecture_lib.parallel.agree import agree

VOCABULARY = 256


def read(files: Sequence[str] = (), at_least: int = 0) -> Tensor:
    """All bytes of these files, one after the other, uint8 (bytes,); without files, of the modules of the standard
    library, by name. Every rank calls this.

    Raises ValueError, the same on every rank, if a rank cannot read a file, has other text than the others, or fewer
    bytes than ``at_least``.
    """
    data, digest, problem = torch.empty(0), "", None
    try:
        data, digest = _text(files) if files else _standard_library()
    except OSError as error:
        problem = f"cannot read {error.filename}: {error.strerror}; give --data files that every rank can read."
    if problem is None and len(data) < at_least:
        problem = f"has {len(data)} bytes of text, and a sample takes {at_least}; give more --data, or a smaller --seq."
    agree("train", [f"{len(data)} bytes of text with digest {digest}"], problem=problem)
    return data


@functools.cache  # a rank of a World trains many times
def _standard_library() -> tuple[Tensor, str]:
    return _text(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))


def _text(files: Iterable[str | Path]) -> tuple[Tensor, str]:
    """All bytes of these files, and a digest of them."""
    data = bytearray().join(Path(file).read_bytes() for file in files)
    tokens = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return tokens, hashlib.blake2b(data, digest_size=8).hexdigest()


def batch_of(text: Tensor, step: int, *, batch: int, seq: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(tokens, targets) of a step, int64 (batch, seq) each: samples from random places, and the same one byte later.

    They depend on the seed and the step alone: a run that goes on from a checkpoint sees what it would have seen, and
    every layout sees the same.
    """
    first = np.random.default_rng((seed, step)).integers(0, len(text) - seq, size=batch)  # (batch,)
    places = torch.from_numpy(first)[:, None] + torch.arange(seq + 1, device="cpu")  # (batch, seq + 1)
    samples = text[places].long()
    return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
