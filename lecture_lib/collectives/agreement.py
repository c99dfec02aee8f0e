"""A mistake on one rank becomes one clear error on all of them.

If rank 2 brought a longer tensor, or its argument made it raise before it sent anything, the others would wait for
ever. So every collective of this package begins with an agreement: the ranks compare a few bytes that stand for what
each is about to do, and only if they differ do they tell each other what it was. The ledger leaves the agreement out.
The algorithm alone, without it, is ``ring_all_reduce.__wrapped__``.
"""

import functools
import hashlib
import inspect

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from lecture_lib.collectives.exchange import combine, ranks_of_a_node
from lecture_lib.trace import unrecorded

OPERATORS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)


def collective(algorithm):
    """Check the arguments of an algorithm on every rank, and that all ranks ask for the same.

    Raises ValueError, with the same message on every rank of the group, for tensors that differ between ranks in shape,
    dtype or kind of device, for one that is not contiguous, an operator that the dtype cannot have, ranks that call
    different collectives or name different roots, and, on that rank alone, for a rank outside the group.
    """
    signature = inspect.signature(algorithm)

    @functools.wraps(algorithm)
    def checked(*args, **kwargs):
        try:
            arguments = signature.bind(*args, **kwargs)
            arguments.apply_defaults()
            arguments, problem = arguments.arguments, None
        except TypeError as error:  # the other ranks wait for this one's word all the same
            arguments, problem = {"group": kwargs.get("group")}, f"called it wrongly: {error}."
        with torch.no_grad():  # as in torch.distributed, gradients do not flow through a collective
            _agree(algorithm.__name__, arguments, problem)
            return algorithm(**arguments)

    return checked


def _agree(name: str, arguments: dict, problem: str | None) -> None:
    group = arguments["group"]
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank < 0:
        members = dist.get_process_group_ranks(group)
        raise ValueError(f"{name}: rank {dist.get_rank()} is not in the group {members}; only its ranks may call this.")
    if arguments.get("ranks_per_node", 1) is None:
        arguments["ranks_per_node"] = ranks_of_a_node(n)
    if problem is None:
        try:
            problem = _problem(arguments, n)
        except Exception as error:
            problem = f"brought arguments that cannot be right ({type(error).__name__}: {error})."
    description = problem or f"called {name}({_description(arguments)})"
    splits = [0] * (2 * n) if problem else [*_split_sizes("input", arguments, n), *_split_sizes("output", arguments, n)]
    everyone = numbers_of_all([digest(description), problem is not None, *splits], group)  # (n, 2 + 2n)
    if everyone[:, 1].any() or (everyone[:, 0] != everyone[0, 0]).any():
        descriptions = [None] * n
        with unrecorded():
            dist.all_gather_object(descriptions, description, group)
        raise ValueError(_disagreement(name, descriptions, everyone[:, 1].tolist(), group))
    sent, expected = everyone[:, 2 : 2 + n], everyone[:, 2 + n :]  # (from, to), (to, from)
    if (sent != expected.T).any():
        at, to = (sent != expected.T).nonzero()[0].tolist()
        raise ValueError(
            f"{name}: rank {at} of the group sends {sent[at, to]} rows to rank {to}, which expects {expected[to, at]}; "
            "input_split_sizes of the one must be output_split_sizes of the other."
        )


def _split_sizes(name: str, arguments: dict, n: int) -> list[int]:
    """Rows for or from each rank in an all-to-all; zeros in any other collective."""
    if f"{name}_split_sizes" not in arguments:
        return [0] * n
    return list(arguments[f"{name}_split_sizes"] or [arguments[name].shape[0] // n] * n)


def _disagreement(name: str, descriptions: list[str], at_fault: list[int], group) -> str:
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    if any(at_fault):
        wrong = at_fault.index(1)
        return f"{name}: rank {ranks[wrong]} {descriptions[wrong]}"
    odd, usual = (f"rank {ranks[i]} {descriptions[i]}" for i in odd_and_usual(descriptions))
    return (
        f"the ranks disagree: {odd}, and {usual}. All ranks of a group must call the same collective with tensors of "
        "the same shape, dtype and kind of device."
    )


# ---- comparing -------------------------------------------------------------------------------------------------------


def digest(text: str) -> int:
    """64 bits that stand for a text: the same on every rank."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def numbers_of_all(mine: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """What each rank brought, by rank in the group: int64 (n, k). 8 k bytes from each; the ledger leaves it out."""
    n, mine = dist.get_world_size(group), torch.tensor(mine)  # (k,)
    if n == 1:
        return mine[None]
    if dist.get_backend(group) == "nccl":
        mine = mine.cuda()
    everyone = mine.new_empty(n, mine.numel())
    with unrecorded():
        dist.all_gather_single(everyone.view(-1), mine, group=group)
    return everyone.cpu()


def odd_and_usual(brought: list) -> tuple[int, int]:
    """Of what ranks brought, where it is not all the same: the first that differs from what most have, and the first of
    these."""
    usual = max(brought, key=brought.count)
    return next(i for i, each in enumerate(brought) if each != usual), brought.index(usual)


# ---- one rank's arguments --------------------------------------------------------------------------------------------


def _tensors(arguments: dict) -> dict[str, Tensor]:
    """Every tensor among the arguments, by name; those of a list as name[i]."""
    found = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, (list, tuple)) and not name.endswith("sizes"):
            found |= {f"{name}[{i}]": part for i, part in enumerate(value) if isinstance(part, Tensor)}
    return found


def _problem(arguments: dict, n: int) -> str | None:
    """What is wrong with this rank's arguments, as the end of a sentence that begins with "rank 2"."""
    group, op, tensors = arguments["group"], arguments.get("op"), _tensors(arguments)
    for name, value in arguments.items():
        if name in ("tensor", "output", "input") and not isinstance(value, Tensor):
            return f"brought {name} of type {type(value).__name__}; it needs a tensor."
    first = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            shape = f"shape {list(tensor.shape)} and strides {list(tensor.stride())}"
            return f"brought {name} of {shape}, which is not contiguous; pass {name}.contiguous() and copy back."
        if (tensor.dtype, tensor.device.type) != (first.dtype, first.device.type):
            return (
                f"brought {_of(first)} and {_of(tensor)}; all tensors of a call need one dtype and one kind of device."
            )
    if dist.get_backend(group) == "nccl" and first.device.type != "cuda":
        return f"brought {_of(first)}, and the group's backend, nccl, moves GPU memory only."
    if op is not None:
        if op not in OPERATORS:
            return f"asked for {op}; SUM, AVG, MIN, MAX and PRODUCT exist here."
        if op == ReduceOp.AVG and not (first.is_floating_point() or first.is_complex()):
            return f"asked for the average of {_of(first)}; AVG needs a floating-point tensor, so use SUM and divide."
        one = first.new_empty(1)
        try:
            combine(one, one, op, out=one)
        except (RuntimeError, TypeError) as error:
            return f"asked for {op} of {_of(first)}, which torch cannot do there ({error}); convert it first."
    for root in ("src", "dst"):
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        if root in arguments and arguments[root] not in members:
            return f"named {root}={arguments[root]}, which is not in the group {members}."
    k = arguments.get("ranks_per_node", 1)
    if k < 1 or n % k:
        return f"asked for {k} ranks to a node; ranks_per_node must divide the {n} ranks."
    if (problem := _wrong_sizes(arguments, n)) is not None:
        return problem
    return _wrong_list(arguments, n)


def _wrong_sizes(arguments: dict, n: int) -> str | None:
    """Where output and input have to fit together."""
    output, input_ = arguments.get("output"), arguments.get("input")
    if output is None:
        return None
    have = f"brought an output of {output.numel()} elements for an input of {input_.numel()}"
    if "output_split_sizes" in arguments:  # all-to-all
        for name, tensor in (("input", input_), ("output", output)):
            if tensor.dim() == 0:
                return f"brought an {name} without rows; all-to-all needs at least one dimension."
            splits, rows = arguments[f"{name}_split_sizes"], tensor.shape[0]
            if splits is None and rows % n:
                return (
                    f"brought an {name} of {rows} rows, which {n} ranks cannot share equally; pass {name}_split_sizes."
                )
            if splits is not None and (len(splits) != n or sum(splits) != rows):
                return f"brought {name}_split_sizes={list(splits)} for an {name} of {rows} rows and {n} ranks."
        return None if output.shape[1:] == input_.shape[1:] else f"{have}; their rows must have the same shape."
    if "op" in arguments and input_.numel() != n * output.numel():
        return f"{have}; with {n} ranks the input needs {n} times the elements of the output."
    if "op" not in arguments and output.numel() != n * input_.numel():
        return f"{have}; with {n} ranks the output needs {n} times the elements of the input."
    return None


def _wrong_list(arguments: dict, n: int) -> str | None:
    """The list that the root of a scatter or gather brings, one tensor for each rank."""
    for name, root in (("scatter_list", "src"), ("gather_list", "dst")):
        if name not in arguments:
            continue
        parts, is_root = arguments[name], arguments[root] == dist.get_rank()
        if not is_root:
            return None if not parts else f"brought a {name}, and is not {root}; only {root} brings one."
        if parts is None or len(parts) != n:
            return f"is {root} and brought a {name} of {len(parts or [])} tensors; it needs one for each of {n} ranks."
        shape = arguments["tensor"].shape
        if any(part.shape != shape for part in parts):
            return f"brought a {name} with tensors that differ in shape from its tensor, {list(shape)}."
    return None


def _of(tensor: Tensor, rows: bool = False) -> str:
    """ "float32[4, 2] on cpu", or, with ``rows``, "float32[rows, 2] on cpu" """
    shape = ", ".join(["rows" if rows and i == 0 else str(size) for i, size in enumerate(tensor.shape)])
    return f"{str(tensor.dtype).removeprefix('torch.')}[{shape}] on {tensor.device.type}"


def _description(arguments: dict) -> str:
    """What must be the same on all ranks."""
    said = []
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            said.append(_of(value, rows=f"{name}_split_sizes" in arguments))  # the rows of an all-to-all may differ
        elif name not in ("group", "scatter_list", "gather_list") and not name.endswith("sizes") and value is not None:
            said.append(f"{name}={value}")
    return ", ".join(said)
