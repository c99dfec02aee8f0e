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
import functools
from collections.abc import Callable
from datetime import timedelta
from fractions import Fraction
from typing import NamedTuple

import torch
import torch._C._distributed_c10d as c
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_paused = contextvars.ContextVar("paused", default=False)


class Call(NamedTuple):
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


class Operator(NamedTuple):
    """How to read an operator's arguments, and how to call it."""

    name: str
    tensors: int | None  # which argument holds the tensors that the rank brings
    group: int | str  # which argument is the process group
    root: int | None = None  # which argument is the root or the peer, as a rank of the group
    rule: str = "nothing"  # which bytes it sends
    call: Callable | None = None  # the same call as a method of the group; None: through the dispatcher


def _options(kind, args, first_common: int, **fields):
    """The options object of a ProcessGroup method; what it shares with others, async_op and timeout, comes last."""
    options = kind()
    for name, value in fields.items():
        setattr(options, name, value)
    common = args[first_common:]  # torch leaves out arguments that have their default value
    options.asyncOp = common[0] if common else True
    if len(common) > 1 and common[1] >= 0:
        options.timeout = timedelta(milliseconds=common[1])
    return options


_KINDS = dist.ReduceOp.RedOpType.__members__
_REDUCE_OPS = {int(kind): dist.ReduceOp(kind) for name, kind in _KINDS.items() if name != "PREMUL_SUM"}


# To call an operator from Python again, torch compares its arguments with a schema, which takes longer than a small
# collective. The methods of ProcessGroup end in the same operators without that. None: this call has to take the long
# way (NCCL's PREMUL_SUM carries a factor that Python cannot read).
def _all_reduce(group, a):
    if op := _REDUCE_OPS.get(a[2].op()):
        return group.allreduce(a[0], _options(c.AllreduceOptions, a, 4, reduceOp=op))


def _reduce_scatter_single(group, a):
    if op := _REDUCE_OPS.get(a[3].op()):
        return group._reduce_scatter_base(a[0], a[1], _options(c.ReduceScatterOptions, a, 4, reduceOp=op))


def _broadcast(group, a):
    return group.broadcast(a[0], _options(c.BroadcastOptions, a, 4, rootRank=a[2], rootTensor=a[3]))


def _all_gather_single(group, a):
    return group._allgather_base(a[0], a[1], _options(c.AllgatherOptions, a, 3))


def _send(group, a):
    return group.send(a[0], a[2], a[3])


def _recv(group, a):
    return group.recv(a[0], a[2], a[3])


_OPERATORS: dict[object, Operator] = {
    getattr(torch.ops.c10d, operator).default: Operator(*entry)
    for operator, entry in {
        "allreduce_": ("all_reduce", 0, 1, None, "all_reduce", _all_reduce),
        "allreduce_coalesced_": ("all_reduce_coalesced", 0, 1, None, "all_reduce"),
        "broadcast_": ("broadcast", 0, 1, 2, "broadcast", _broadcast),
        "reduce_": ("reduce", 0, 1, 3, "reduce"),
        "allgather_": ("all_gather", 1, 2, None, "all_gather"),
        "_allgather_base_": ("all_gather_single", 1, 2, None, "all_gather", _all_gather_single),
        "allgather_coalesced_": ("all_gather_coalesced", 1, 2, None, "all_gather"),
        "allgather_into_tensor_coalesced_": ("all_gather_single_coalesced", 1, 2, None, "all_gather"),
        "reduce_scatter_": ("reduce_scatter", 1, 2, None, "reduce_scatter"),
        "_reduce_scatter_base_": ("reduce_scatter_single", 1, 2, None, "reduce_scatter", _reduce_scatter_single),
        "reduce_scatter_tensor_coalesced_": ("reduce_scatter_single_coalesced", 1, 2, None, "reduce_scatter"),
        "gather_": ("gather", 1, 2, 3, "reduce"),
        "scatter_": ("scatter", 0, 2, 3, "scatter"),
        "alltoall_": ("all_to_all", 1, 2, None, "all_to_all"),
        "alltoall_base_": ("all_to_all_single", 1, 2, None, "all_to_all"),
        "barrier": ("barrier", None, 1),
        "monitored_barrier_": ("monitored_barrier", None, 1),
        "send": ("send", 0, 1, 2, "all", _send),
        "recv_": ("recv", 0, 1, 2, "nothing", _recv),
        "recv_any_source_": ("recv", 0, 1),
    }.items()
} | {
    getattr(torch.ops._c10d_functional, operator).default: Operator(*entry)
    for operator, entry in {
        "all_reduce": ("all_reduce", 0, "group_name", None, "all_reduce"),
        "all_reduce_": ("all_reduce", 0, "group_name", None, "all_reduce"),
        "all_reduce_coalesced": ("all_reduce_coalesced", 0, "group_name", None, "all_reduce"),
        "all_reduce_coalesced_": ("all_reduce_coalesced", 0, "group_name", None, "all_reduce"),
        "all_gather_into_tensor": ("all_gather_single", 0, "group_name", None, "all_gather"),
        "all_gather_into_tensor_out": ("all_gather_single", 0, "group_name", None, "all_gather"),
        "all_gather_into_tensor_coalesced": ("all_gather_single_coalesced", 0, "group_name", None, "all_gather"),
        "reduce_scatter_tensor": ("reduce_scatter_single", 0, "group_name", None, "reduce_scatter"),
        "reduce_scatter_tensor_out": ("reduce_scatter_single", 0, "group_name", None, "reduce_scatter"),
        "reduce_scatter_tensor_coalesced": ("reduce_scatter_single_coalesced", 0, "group_name", None, "reduce_scatter"),
        "all_to_all_single": ("all_to_all_single", 0, "group_name", None, "all_to_all"),
        "broadcast": ("broadcast", 0, "group_name", 1, "broadcast"),
        "broadcast_": ("broadcast", 0, "group_name", 1, "broadcast"),
        "isend": ("send", 0, "group_name", 1, "all"),
        "irecv": ("recv", 0, "group_name", 1),
    }.items()
    if hasattr(torch.ops._c10d_functional, operator)  # the newest are missing in older torch
}


_WAIT_TENSOR = torch.ops._c10d_functional.wait_tensor.default


class Recorder(TorchDispatchMode):
    """Hands each operation of this rank to ``on_call(call, work)``; ``work`` is None for functional collectives. What
    ``on_call`` returns, if anything, takes the place of the work."""

    def __init__(self, on_call, on_result=None, on_waited=None):
        super().__init__()
        self._on_call, self._on_result, self._on_waited = on_call, on_result, on_waited
        self._groups: dict[object, tuple[tuple[int, ...], int]] = {}  # group -> its global ranks, my place among them

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else each operator, a collective or not, goes through a wrapper that torch.compile needs

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if types and any(issubclass(kind, _distributed_tensor()) for kind in types):
            return NotImplemented  # DTensor's turn: the collectives that it finds necessary come here one by one
        operator = _OPERATORS.get(func)
        if operator is None or _paused.get():
            result = func(*args, **kwargs) if kwargs else func(*args)
            if self._on_waited and (types or func is _WAIT_TENSOR):
                for tensor in filter(lambda leaf: isinstance(leaf, torch.Tensor), tree_leaves((args, kwargs))):
                    self._on_waited(getattr(tensor, "elem", tensor))  # an AsyncCollectiveTensor waits where it is used
            return result
        if isinstance(operator.group, str):
            self._on_call(self._read(operator, _resolve(func, args, kwargs or {}), args, kwargs or {}), None)
            result = func(*args, **(kwargs or {}))
            if self._on_result:
                self._on_result(_flat(result))
            return result
        group = c.ProcessGroup.unbox(args[operator.group])
        call = self._read(operator, group, args, {})
        if operator.call and (work := operator.call(group, args)):
            work = self._on_call(call, work) or work
            return work.boxed() if operator.name in ("send", "recv") else (args[0], work.boxed())
        result = func(*args, **(kwargs or {}))
        last = result[-1] if isinstance(result, tuple) and result else result
        if not isinstance(last, torch.ScriptObject):  # monitored_barrier returns nothing
            self._on_call(call, None)
            return result
        work = self._on_call(call, c.Work.unbox(last))
        if work is None:
            return result
        return (*result[:-1], work.boxed()) if isinstance(result, tuple) else work.boxed()

    def _read(self, operator: Operator, group, args: tuple, kwargs: dict) -> Call:
        if group not in self._groups:
            self._groups[group] = tuple(dist.get_process_group_ranks(group)), group.rank()
        ranks, me = self._groups[group]
        tensors = [] if operator.tensors is None else _flat(args[operator.tensors])
        if operator.name == "scatter":
            tensors = _flat(args[1]) or tensors  # the root brings a tensor for each rank
        peer = None if operator.root is None else ranks[args[operator.root]]
        pieces = None
        if operator.name == "all_to_all":
            pieces = [t.numel() for t in tensors]
        elif operator.name == "all_to_all_single":
            # output_split_sizes and input_split_sizes follow the group, or stand before the group's name
            splits = args[4] if operator.group == 2 else kwargs.get("input_split_sizes", args[2])
            pieces = _elements_of_pieces(tensors[0], splits)
        return _call(operator, ranks, me, tensors, peer, pieces)


@functools.cache
def _distributed_tensor() -> type:
    from torch.distributed.tensor import DTensor  # late: it takes a while to load, and most runs have none

    return DTensor


@contextlib.contextmanager
def unrecorded():
    """Operations in this block are left out of ledgers and timelines: agreement checks, clock readings."""
    token = _paused.set(True)
    try:
        yield
    finally:
        _paused.reset(token)


# ---- reading ---------------------------------------------------------------------------------------------------------


def _call(operator: Operator, ranks, me: int, tensors: list, peer: int | None, pieces: list[int] | None) -> Call:
    if not tensors:
        return Call(operator.name, ranks, "", 0, 0)
    first = tensors[0]
    elements, itemsize = first.numel() if len(tensors) == 1 else sum(t.numel() for t in tensors), first.element_size()
    n, brought, root = len(ranks), elements * itemsize, peer is not None and ranks[me] == peer
    match operator.rule:
        case "all_reduce":
            sent = _divide(2 * (n - 1) * brought, n)
        case "all_gather":
            sent = (n - 1) * brought
        case "reduce_scatter":
            sent = _divide((n - 1) * brought, n)
        case "all_to_all":
            sent = (elements - pieces[me]) * itemsize if pieces else _divide((n - 1) * brought, n)
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
    return Call(operator.name, ranks, _NAMES[first.dtype], elements, sent, peer, first.storage_offset())


class _Names(dict):
    def __missing__(self, dtype: torch.dtype) -> str:
        self[dtype] = str(dtype).removeprefix("torch.")
        return self[dtype]


_NAMES = _Names()


def _divide(numerator: int, denominator: int) -> int | Fraction:
    return numerator // denominator if numerator % denominator == 0 else Fraction(numerator, denominator)


def _elements_of_pieces(tensor, splits) -> list[int] | None:
    """Elements of each piece of an all_to_all_single; None: equal pieces."""
    if not splits:
        return None
    row = tensor.numel() // max(1, tensor.shape[0])
    return [rows * row for rows in splits]


def _flat(tensors) -> list:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [tensor for part in tensors for tensor in _flat(part)]


def _resolve(func, args: tuple, kwargs: dict):
    """The process group of a functional collective, which gives its name."""
    name = kwargs.get("group_name")
    if name is None:
        name = args[[argument.name for argument in func._schema.arguments].index("group_name")]
    return dist.distributed_c10d._resolve_process_group(name) if isinstance(name, str) else name
