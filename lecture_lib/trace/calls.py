"""One operation of torch.distributed as a record.

Whoever calls it (your code, DistributedDataParallel, fully_shard, DTensor, a pipeline schedule), every collective and
message becomes an operator of torch's dispatcher: ``c10d::allreduce_(tensors, group, op, ...)``, or its functional twin
``_c10d_functional::all_reduce(tensor, op, group)``. A dispatch mode sees them all, with their arguments.

Bytes sent are those of the standard accounting: what this rank has to send if the operation runs around a ring (S bytes
in the whole tensor, n ranks):

    all_reduce                2 (n-1)/n S      reduce-scatter, then all-gather
    all_gather, all_to_all      (n-1)/n S      S: all that is gathered; all pieces for others
    reduce_scatter              (n-1)/n S      S: all that is brought
    broadcast                           S      0 on the rank before the root, where the ring ends
    reduce                              S      0 on the root, where the ring ends
    gather                              S      0 on the root; straight to it
    scatter                     (n-1)/n S      on the root, 0 elsewhere; straight from it
    send                                S      what is really handed over
    recv, barrier                       0

Source: NVIDIA nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth", for the ring's share.
"""

import contextlib
import contextvars
from dataclasses import dataclass
from fractions import Fraction

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.utils._python_dispatch import TorchDispatchMode

_paused = contextvars.ContextVar("paused", default=False)


@dataclass(frozen=True, slots=True)
class Call:
    """One operation on this rank.

    name:        as in torch.distributed: "all_reduce", "all_gather_single", "send", ...
    group:       global ranks of the group, in its order
    dtype:       "float32", ...
    elements:    of the tensor that this rank brings, or of the one it gets where it brings none (recv, scatter)
    bytes_sent:  by this rank, under the accounting above; a fraction where the ranks do not divide the bytes
    peer:        global rank at the other end of send and recv; root of broadcast, reduce, gather, scatter; else None
    offset:      where the tensor begins in its storage, in elements: which slice of a larger tensor it is
    """

    name: str
    group: tuple[int, ...]
    dtype: str
    elements: int
    bytes_sent: int | Fraction
    peer: int | None = None
    offset: int = 0


# operator -> (name, index of the tensors that the rank brings, index of the root or peer, which bytes it sends)
_C10D = {
    "allreduce_": ("all_reduce", 0, None, "all_reduce"),
    "allreduce_coalesced_": ("all_reduce_coalesced", 0, None, "all_reduce"),
    "broadcast_": ("broadcast", 0, 2, "broadcast"),
    "reduce_": ("reduce", 0, 3, "reduce"),
    "allgather_": ("all_gather", 1, None, "all_gather"),
    "_allgather_base_": ("all_gather_single", 1, None, "all_gather"),
    "allgather_coalesced_": ("all_gather_coalesced", 1, None, "all_gather"),
    "allgather_into_tensor_coalesced_": ("all_gather_single_coalesced", 1, None, "all_gather"),
    "reduce_scatter_": ("reduce_scatter", 1, None, "reduce_scatter"),
    "_reduce_scatter_base_": ("reduce_scatter_single", 1, None, "reduce_scatter"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_single_coalesced", 1, None, "reduce_scatter"),
    "gather_": ("gather", 1, 3, "reduce"),
    "scatter_": ("scatter", 0, 3, "scatter"),
    "alltoall_": ("all_to_all", 1, None, "all_to_all"),
    "alltoall_base_": ("all_to_all_single", 1, None, "all_to_all"),
    "barrier": ("barrier", None, None, "nothing"),
    "monitored_barrier_": ("monitored_barrier", None, None, "nothing"),
    "send": ("send", 0, 2, "all"),
    "recv_": ("recv", 0, 2, "nothing"),
    "recv_any_source_": ("recv", 0, None, "nothing"),
}
_FUNCTIONAL = {
    "all_reduce": ("all_reduce", None, "all_reduce"),
    "all_reduce_": ("all_reduce", None, "all_reduce"),
    "all_reduce_coalesced": ("all_reduce_coalesced", None, "all_reduce"),
    "all_reduce_coalesced_": ("all_reduce_coalesced", None, "all_reduce"),
    "all_gather_into_tensor": ("all_gather_single", None, "all_gather"),
    "all_gather_into_tensor_out": ("all_gather_single", None, "all_gather"),
    "all_gather_into_tensor_coalesced": ("all_gather_single_coalesced", None, "all_gather"),
    "reduce_scatter_tensor": ("reduce_scatter_single", None, "reduce_scatter"),
    "reduce_scatter_tensor_out": ("reduce_scatter_single", None, "reduce_scatter"),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_single_coalesced", None, "reduce_scatter"),
    "all_to_all_single": ("all_to_all_single", None, "all_to_all"),
    "broadcast": ("broadcast", 1, "broadcast"),
    "broadcast_": ("broadcast", 1, "broadcast"),
    "isend": ("send", 1, "all"),
    "irecv": ("recv", 1, "nothing"),
}


class Recorder(TorchDispatchMode):
    """Hands each operation of this rank to ``on_call(call, work)``; ``work`` is None for functional collectives. What
    ``on_call`` returns, if anything, takes the place of the work."""

    def __init__(self, on_call):
        super().__init__()
        self._on_call = on_call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace = func.namespace
        if namespace not in ("c10d", "_c10d_functional") or _paused.get():
            return func(*args, **kwargs) if kwargs else func(*args)
        if namespace == "c10d":
            call = read_c10d(func._opname, args)
            result = func(*args, **(kwargs or {}))
            script = result[-1] if isinstance(result, tuple) and result else result
            if not isinstance(script, torch.ScriptObject):  # monitored_barrier returns nothing
                self._on_call(call, None)
                return result
            if (work := self._on_call(call, script)) is None:
                return result
            return (*result[:-1], work.boxed()) if isinstance(result, tuple) else work.boxed()
        if (call := read_functional(func, args, kwargs)) is not None:
            self._on_call(call, None)
        return func(*args, **(kwargs or {}))


def unbox(script: torch.ScriptObject) -> Work:
    """The Work behind what a c10d operator returns."""
    return Work.unbox(script)


@contextlib.contextmanager
def unrecorded():
    """Operations in this block are left out of ledgers and timelines: agreement checks, clock readings."""
    token = _paused.set(True)
    try:
        yield
    finally:
        _paused.reset(token)


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_c10d(operator: str, args: tuple) -> Call:
    """A call of ``c10d::operator``. Operators newer than this table are named, and counted as sending nothing."""
    name, brings, root, rule = _C10D.get(operator, (operator.strip("_"), None, None, "nothing"))
    group = next(ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject) and _is_group(a))
    ranks, me = _ranks(group), group.rank()
    tensors = _flat(args[brings]) if brings is not None else []
    if name == "scatter":
        tensors = _flat(args[1]) or tensors  # the root brings a tensor for each rank
    peer = None if root is None else ranks[args[root]]
    sizes = None
    if rule == "all_to_all":
        splits = args[4] if operator == "alltoall_base_" else [t.numel() for t in tensors]
        sizes = [t.numel() for t in tensors] if operator == "alltoall_" else _rows(tensors[0], splits)
    return _call(name, ranks, me, tensors, peer, rule, sizes)


def read_functional(func, args: tuple, kwargs: dict | None) -> Call | None:
    """A call of ``_c10d_functional::func``; None for what sends nothing, such as wait_tensor."""
    if (entry := _FUNCTIONAL.get(func._opname)) is None:
        return None
    name, root, rule = entry
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
    group = named["group_name"]
    group = dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group
    ranks, me = _ranks(group), group.rank()
    tensors = _flat(args[0])
    peer = None if root is None else ranks[args[root]] if name == "broadcast" else args[root]
    sizes = _rows(tensors[0], named["input_split_sizes"]) if rule == "all_to_all" else None
    return _call(name, ranks, me, tensors, peer, rule, sizes)


def _call(name, ranks, me, tensors, peer, rule, sizes) -> Call:
    elements, itemsize = sum(t.numel() for t in tensors), tensors[0].element_size() if tensors else 0
    n, brought, root = len(ranks), elements * itemsize, peer is not None and ranks[me] == peer
    match rule:
        case "all_reduce":
            sent = _divide(2 * (n - 1) * brought, n)
        case "all_gather":
            sent = (n - 1) * brought
        case "reduce_scatter":
            sent = _divide((n - 1) * brought, n)
        case "all_to_all":
            sent = (elements - sizes[me]) * itemsize if sizes else _divide((n - 1) * brought, n)
        case "broadcast":
            sent = 0 if ranks[(me + 1) % n] == peer or n == 1 else brought
        case "reduce":
            sent = 0 if root else brought
        case "scatter":
            sent = _divide((n - 1) * brought, n) if root else 0
        case "all":
            sent = brought
        case _:
            sent = 0
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
    offset = tensors[0].storage_offset() if tensors else 0
    return Call(name, ranks, dtype, elements, sent, peer, offset)


def _divide(numerator: int, denominator: int) -> int | Fraction:
    return numerator // denominator if numerator % denominator == 0 else Fraction(numerator, denominator)


def _rows(tensor, splits) -> list[int] | None:
    """Elements of each piece of an all_to_all_single; None: equal pieces."""
    if not splits:
        return None
    row = tensor.numel() // max(1, tensor.shape[0])
    return [rows * row for rows in splits]


def _flat(tensors) -> list:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [tensor for part in tensors for tensor in _flat(part)]


def _is_group(script: torch.ScriptObject) -> bool:
    return script._type().qualified_name().endswith("ProcessGroup")


def _ranks(group: ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))
