"""One answer on every rank: what processes do together works on all of them, or raises the same error on all."""

import os
import platform
import sys

import torch.distributed as dist


def together(step, group: dist.ProcessGroup | None = None) -> list:
    """What ``step()`` returned on each rank of ``group``, by rank in the group. All of them call this.

    Where it raises on one rank, that error is raised on every rank: without this, one would stop and the others would
    wait for it in the next collective.
    """
    try:
        mine = step(), None
    except Exception as error:
        mine = None, error.with_traceback(None)
    outcomes = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, mine, group=group)
    for _, error in outcomes:
        if error is not None:
            raise error
    return [value for value, _ in outcomes]


def world_rank(rank: int, group: dist.ProcessGroup | None = None) -> int:
    """The number in the whole world of rank ``rank`` of a group: what people know it by."""
    return dist.get_global_rank(group or dist.group.WORLD, rank)


def machine() -> str:
    """The same for two processes if they run under one kernel and know each other by process id."""
    if sys.platform == "linux":
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return boot.read() + os.readlink("/proc/self/ns/pid")
    return platform.node()
