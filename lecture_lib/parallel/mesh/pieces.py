"""What a rank holds of each parameter of the one-process model, and what can be said of all pieces together.

A parameter may be split twice: a slice of it for each rank along tp, and of this slice, flattened, a range for each
rank that shares the copy (dp_shard x cp). What is not split is there several times: on all ranks along tp (norms), on
several of them (heads that they share), on two stages (a tied embedding).
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lecture_lib.parallel.mesh.axes import Mesh
from lecture_lib.parallel.tensor.split import joined
from lecture_lib.trace import unrecorded


class Piece(NamedTuple):
    """What this rank holds of a parameter of the one-process model.

    parameter:  this rank's piece, what the optimizer updates
    dim:        along which the tp ranks split it; None: all have all of it
    copies:     how many neighbouring tp ranks have the same slice
    shape:      of this rank's slice, before a fully sharded stage makes it flat
    sizes:      how many elements of the slice each rank of dp_shard x cp has; None: each has all
    owned:      whether no earlier stage holds it too
    """

    parameter: nn.Parameter
    dim: int | None
    copies: int
    shape: torch.Size
    sizes: list[int] | None
    owned: bool


def pieces_of(
    model: nn.Module, mesh: Mesh, shapes: dict[nn.Parameter, torch.Size], owned: set[nn.Parameter]
) -> dict[str, Piece]:
    """Of the parameters in ``shapes`` (each with its slice's), by their names in the model; a tied one once."""
    sizes, pieces, seen = _sizes(mesh, shapes), {}, set()
    for path, part in model.named_modules():
        for leaf, parameter in part.named_parameters(recurse=False):
            if parameter in shapes and parameter not in seen:
                seen.add(parameter)
                dim = getattr(part, "sharded", {}).get(leaf)
                copies = mesh.size["tp"] if dim is None else getattr(part, "copies", 1)
                piece = Piece(parameter, dim, copies, shapes[parameter], sizes[parameter], parameter in owned)
                pieces[f"{path}.{leaf}"] = piece
    return pieces


def _sizes(mesh: Mesh, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, list[int] | None]:
    """How many elements of each parameter the ranks that share the copy have."""
    parameters = list(parameters)
    if mesh.size["dp_shard"] == 1:
        return dict.fromkeys(parameters)
    ranks = mesh.count("dp_shard", "cp")
    mine = torch.tensor([p.numel() for p in parameters], device=parameters[0].device)
    everyone = mine.new_empty(ranks * len(parameters))
    with unrecorded():
        dist.all_gather_single(everyone, mine, group=mesh.group("dp_shard", "cp"))
    return dict(zip(parameters, everyone.view(ranks, -1).t().tolist()))


# ---- all of them together --------------------------------------------------------------------------------------------


def global_norm(pieces: Iterable[Piece], mesh: Mesh) -> Tensor:
    """sqrt(sum of squares of all gradients of the one-process model), (), on every rank.

    Each element counts once: a slice or a range on the rank that has it; what several ranks hold, on the first of them.
    Ranks along dp_replicate, and along cp unless dp_shard splits over it, hold the same: they are not asked. An
    all-reduce of 8 bytes along tp, along pp, and along dp_shard x cp.
    """
    pieces = list(pieces)
    mine = [p.parameter.grad for p in pieces if p.owned and mesh.place["tp"] % p.copies == 0]
    norm = torch.nn.utils.get_total_norm([gradient for gradient in mine if gradient is not None])
    squares = norm.to(pieces[0].parameter.device, torch.float64) ** 2
    for axes in (("tp",), ("pp",), ("dp_shard", "cp") if mesh.size["dp_shard"] > 1 else ()):
        if mesh.count(*axes) > 1:
            dist.all_reduce(squares, group=mesh.group(*axes))
    return squares.sqrt().float()


def full_state_dict(pieces: dict[str, Piece], mesh: Mesh) -> dict[str, Tensor]:
    """The parameters of the one-process model, whole, on the CPU of every rank. Each rank must call it.

    A tied parameter is there once, so load it with ``strict=False``. For small models: each rank sends its stage to all
    others.
    """
    mine = {name: gather(piece, piece.parameter.detach(), mesh).cpu() for name, piece in pieces.items()}
    if mesh.size["pp"] == 1:
        return mine
    stages: list = [None] * mesh.size["pp"]
    dist.all_gather_object(stages, mine, group=mesh.group("pp"))
    return {name: tensor for stage in stages for name, tensor in stage.items()}


# ---- whole tensors, and this rank's part of them ---------------------------------------------------------------------


def gather(piece: Piece, own: Tensor, mesh: Mesh) -> Tensor:
    """All of a tensor, of which each rank has ``own`` as it has this parameter: the parameter itself, its gradient, or
    the optimizer's moments. All ranks that hold a part of it call this together."""
    if piece.sizes is not None:
        longest = max(piece.sizes)
        padded = own.new_zeros(longest)
        padded[: own.numel()] = own
        everyone = own.new_empty(len(piece.sizes) * longest)
        dist.all_gather_single(everyone, padded, group=mesh.group("dp_shard", "cp"))
        parts = zip(everyone.split(longest), piece.sizes)
        own = torch.cat([part[:size] for part, size in parts]).view(piece.shape)
    return own if piece.dim is None else joined(own, piece.dim, mesh.group("tp"), piece.copies)


def part_of(piece: Piece, whole: Tensor, mesh: Mesh) -> Tensor:
    """What this rank has of a whole tensor: the way back from ``gather``."""
    if piece.dim is not None:
        whole = whole.chunk(mesh.size["tp"] // piece.copies, piece.dim)[mesh.place["tp"] // piece.copies]
    if piece.sizes is not None:
        whole = whole.flatten().split(piece.sizes)[dist.get_rank(mesh.group("dp_shard", "cp"))]
    return whole
