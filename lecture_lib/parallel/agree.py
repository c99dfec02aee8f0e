"""Before the first step: all ranks bring the same model, with the same values in it.

A rank with one parameter more would make the others wait for ever, or add up tensors that do not belong together. So
every wrapper compares what the ranks bring when it is built: a few bytes a rank, and only if they differ the details.
"""

import functools
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from lecture_lib.collectives.agreement import digest, numbers_of_all, odd_and_usual
from lecture_lib.trace import unrecorded


def agree(who: str, facts: Iterable[str], group: dist.ProcessGroup | None = None, problem: str | None = None) -> None:
    """Compare what this rank brings, one line a fact, with the other ranks of the group. The ledger leaves it out.

    Raises ValueError, with the same message on every rank, if the facts differ, or if any rank has a problem: the end
    of a sentence that begins with "rank 2".
    """
    facts = list(facts)
    text = "\n".join([problem or "", *facts])
    everyone = numbers_of_all([digest(text), problem is not None], group)  # (n, 2)
    if (everyone == everyone[0]).all() and problem is None:
        return
    brought: list = [None] * len(everyone)
    with unrecorded():
        dist.all_gather_object(brought, (problem, facts), group)
    raise ValueError(f"{who}: {_difference(brought, dist.get_process_group_ranks(group or dist.group.WORLD))}")


def facts_of(module: nn.Module) -> list[str]:
    """Name, shape and dtype of every parameter and buffer, whether it is trained, and to which other parameter it is
    tied: what the ranks must agree on."""
    facts, names = [], {}
    for name, p in module.named_parameters(remove_duplicate=False):
        tied = "" if names.setdefault(p, name) == name else f", tied to {names[p]}"
        facts.append(f"{name} of {describe(p)}{'' if p.requires_grad else ', frozen'}{tied}")
    return facts + [f"buffer {name} of {describe(b)}" for name, b in module.named_buffers()]


def describe(tensor: torch.Tensor) -> str:
    """ "shape (4, 2), float32" """
    return f"shape {tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}"


def name_of(function: Callable) -> str:
    """ "ring_attention", of a partial "ring_attention(tile=4)": the same on every rank, as no address is in it."""
    if isinstance(function, functools.partial):
        options = [*map(repr, function.args), *(f"{name}={value!r}" for name, value in function.keywords.items())]
        return f"{name_of(function.func)}({', '.join(options)})"
    return getattr(function, "__name__", type(function).__name__)


def several_devices(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """The problem, for ``agree``, if not all of these (name, tensor) are on one device."""
    first = None
    for name, tensor in tensors:
        first = first or (name, tensor.device)
        if tensor.device != first[1]:
            return f"has {first[0]} on {first[1]} and {name} on {tensor.device}; move the module to one device first."
    return None


def split_among(module: nn.Module, group: dist.ProcessGroup | None = None) -> str | None:
    """The problem, for ``agree``, if ranks of this group hold different slices of a part of the module: they cannot all
    take the first rank's parameters, nor average their gradients."""
    ranks = set(dist.get_process_group_ranks(group or dist.group.WORLD))
    for name, holders in split_parts(module):
        both = sorted(ranks & set(holders))
        if len(both) > 1:
            return (
                f"brought {name}, of which ranks {', '.join(map(str, both))} hold different slices; give a group of "
                "ranks that hold the same slices, such as the data-parallel axis of a mesh (for experts use "
                "lecture_lib.parallel.expert.average_gradients)."
            )
    return None


def split_parts(module: nn.Module) -> Iterator[tuple[str, list[int]]]:
    """The name of each part of which ranks hold different slices, and these ranks."""
    for name, part in module.named_modules():
        if hasattr(part, "sharded") and hasattr(part, "group"):  # one of ours that is split over part.group
            ranks = dist.get_process_group_ranks(part.group or dist.group.WORLD)
            if len(ranks) > 1:
                yield name or "a layer", ranks


@torch.no_grad()
def broadcast_from_first(tensors: list[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Every rank gets the values of the group's first rank, in place; one broadcast for each dtype."""
    first = dist.get_process_group_ranks(group or dist.group.WORLD)[0]
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.flatten() for tensor in alike])  # (elements,)
        dist.broadcast(flat, src=first, group=group)
        for tensor, values in zip(alike, flat.split([tensor.numel() for tensor in alike])):
            tensor.copy_(values.view(tensor.shape))


def unchanged(who: str, module: nn.Module) -> Callable[[], None]:
    """A function that raises RuntimeError if the module no longer has the parameters that it has now."""

    def parameters() -> list[tuple]:
        return [(name, id(p), p.requires_grad, p.shape, p.dtype, p.device) for name, p in module.named_parameters()]

    wrapped = parameters()

    def check() -> None:
        if (now := parameters()) != wrapped:
            name = min(row[0] for row in set(now) ^ set(wrapped))
            raise RuntimeError(
                f"{who}: parameter {name} was added, removed, replaced, frozen, moved or reshaped after the module was "
                "wrapped; change the module first, and wrap it then."
            )

    return check


def _difference(brought: list[tuple[str | None, list[str]]], ranks: list[int]) -> str:
    for rank, (problem, _) in zip(ranks, brought, strict=True):
        if problem is not None:
            return f"rank {rank} {problem}"
    all_facts = [facts for _, facts in brought]
    (a, odd), (b, usual) = ((ranks[i], all_facts[i]) for i in odd_and_usual(all_facts))
    for mine, theirs in zip(odd, usual, strict=False):
        if mine != theirs:
            return (
                f"the ranks disagree: rank {a} brought {mine}; rank {b} brought {theirs}. Build the same on every rank."
            )
    (less, few), (more, many) = sorted([(a, odd), (b, usual)], key=lambda brought: len(brought[1]))
    return (
        f"the ranks disagree: rank {more} brought {len(many) - len(few)} more than rank {less}, the first of them "
        f"{many[len(few)]}. Build the same on every rank."
    )
