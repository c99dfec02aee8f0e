"""The one primitive that all algorithms here are made of: sends and receives that happen together.

Ranks are counted within the group: 0 to n - 1, whatever the group's global ranks are.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

Part = tuple[Tensor, int]  # what, and to whom or from whom


def place(group: ProcessGroup | None) -> tuple[int, int]:
    """(n, rank): how many ranks the group has, and which of them this one is."""
    return dist.get_world_size(group), dist.get_rank(group)


def root_in(group: ProcessGroup | None, global_rank: int) -> int:
    """A global rank's number within the group."""
    return global_rank if group is None else dist.get_group_rank(group, global_rank)


def ranks_of_a_node(n: int) -> int:
    """As many as torchrun and World say, or all n in a smaller group."""
    return min(n, int(os.environ.get("LOCAL_WORLD_SIZE", n)))


def exchange(group: ProcessGroup | None, *, sends: list[Part] = (), receives: list[Part] = ()) -> None:
    """Send and receive all of these at once, and wait until all have arrived.

    At once, so that two ranks that send to each other do not wait for one another forever. An empty tensor is not sent:
    both sides know that it is empty.
    """
    transfers = [dist.P2POp(dist.isend, part, group=group, group_peer=to) for part, to in sends if part.numel()]
    transfers += [dist.P2POp(dist.irecv, part, group=group, group_peer=at) for part, at in receives if part.numel()]
    if transfers:
        for work in dist.batch_isend_irecv(transfers):
            work.wait()


def split(tensor: Tensor, n: int) -> tuple[Tensor, ...]:
    """Views of ``n`` neighbouring slices of a tensor, of equal size but for one element: n of about (count / n,)."""
    return tensor.view(-1).tensor_split(n)


def combine(a: Tensor, b: Tensor, op: ReduceOp, out: Tensor) -> None:
    """``out = a op b``. AVG adds, and ``average`` divides in the end."""
    match op:
        case ReduceOp.SUM | ReduceOp.AVG:
            torch.add(a, b, out=out)
        case ReduceOp.PRODUCT:
            torch.mul(a, b, out=out)
        case ReduceOp.MIN:
            torch.minimum(a, b, out=out)
        case ReduceOp.MAX:
            torch.maximum(a, b, out=out)


def accumulate(into: Tensor, incoming: Tensor, op: ReduceOp) -> None:
    """``into = into op incoming``"""
    combine(into, incoming, op, out=into)


def average(tensor: Tensor, op: ReduceOp, n: int) -> None:
    """The last step of an AVG: divide the sum by the number of ranks."""
    if op == ReduceOp.AVG:
        tensor.div_(n)
