"""The mesh: ranks numbered along axes, so that "the ranks that share a matrix with me" has a name.

    axis           what its ranks share            what they send                                  how often
    pp             the layers                      activations and their gradients, to a neighbour each micro-batch
    dp_replicate   the samples                     gradients                                       each step
    dp_shard       the samples, and the copy       parameters, twice, and gradients                each micro-batch
    cp             the sequence                    keys and values                                 each layer
    tp             every matrix                    activations, four times                         each layer

The last axis changes fastest, so its ranks are neighbours: it is the one that sends most, and a node's fast links are
between neighbours. (Llama Team 2024, The Llama 3 Herd of Models, section 3.3.2, says so too; there dp is outermost, for
a sharded model can fetch its parameters ahead.) For pp=2, dp_replicate=2, tp=2:

    rank            0  1  2  3  4  5  6  7
    pp              0  0  0  0  1  1  1  1
    dp_replicate    0  0  1  1  0  0  1  1
    tp              0  1  0  1  0  1  0  1
"""

import math
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lecture_lib.parallel.agree import agree
from lecture_lib.trace import Call

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
JOINED = (("dp_shard", "cp"), ("dp_replicate", "dp_shard", "cp"))  # who shares a copy; who shares the batch


class Mesh:
    """All ranks along these axes, and a process group for each axis and for each of ``JOINED``.

    size:    how many ranks an axis has
    place:   where along it this rank stands
    ranks:   int64 (pp, dp_replicate, dp_shard, cp, tp), which rank stands where

    Every rank makes it. Raises ValueError, the same on every rank, if the sizes do not multiply to the world size.
    """

    def __init__(self, *, pp: int = 1, dp_replicate: int = 1, dp_shard: int = 1, cp: int = 1, tp: int = 1):
        sizes, world, problem = (pp, dp_replicate, dp_shard, cp, tp), dist.get_world_size(), None
        asked = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, sizes))
        if min(sizes) < 1:
            problem = f"asked for {asked}; every axis has at least 1 rank."
        elif math.prod(sizes) != world:
            problem = (
                f"asked for {asked}: {math.prod(sizes)} ranks, and there are {world}; choose axes of {world} ranks."
            )
        agree("Mesh", [asked], problem=problem)
        self.ranks = np.arange(world).reshape(sizes)
        self.size = dict(zip(AXES, sizes))
        self.place = self._place_of(dist.get_rank())
        self._groups = {axes: self._make_group(axes, self.count(*axes)) for axes in self._sets()}

    def count(self, *axes: str) -> int:
        """How many ranks differ from this one in these axes only, with this one."""
        return math.prod(self.size[axis] for axis in axes)

    def ranks_along(self, *axes: str) -> list[int]:
        """These ranks, in order."""
        here = tuple(slice(None) if axis in axes else self.place[axis] for axis in AXES)
        return self.ranks[here].flatten().tolist()

    def group(self, *axes: str) -> ProcessGroup:
        """These ranks as a process group: of one axis, or of one of ``JOINED``. KeyError if they are one rank alone."""
        return self._groups[self._large(axes)]

    def neighbours(self, axis: str, count: int) -> ProcessGroup | None:
        """The ``count`` ranks next to each other along an axis of which this one is one; None if it is alone.

        Every rank of the mesh calls this together. The group is made once, and kept until ``close``.
        """
        if count in (1, self.size[axis]):
            return None if count == 1 else self.group(axis)
        if (axis, count) not in self._groups:
            self._groups[axis, count] = self._make_group((axis,), count)
        return self._groups[axis, count]

    def close(self) -> None:
        """Give back the groups, with their connections and threads. Nothing may use them any more."""
        for group in self._groups.values():
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        self._groups.clear()

    # ---- of a ledger's calls -----------------------------------------------------------------------------------------

    def axes_of(self, ranks: Iterable[int]) -> str:
        """In which axes these ranks differ: "tp", or "dp_replicate+cp". For ``group`` of a ledger's calls."""
        places = [self._place_of(rank) for rank in ranks]
        return "+".join(axis for axis in AXES if len({place[axis] for place in places}) > 1)

    def bytes_by_axis(self, calls: Iterable[Call]) -> dict[str, int | Fraction]:
        """What this rank sent along each axis, of a ledger's calls; axes in the order of ``AXES``."""
        sent: dict[str, int | Fraction] = {}
        for call in calls:
            axis = self.axes_of(call.group)
            sent[axis] = sent.get(axis, 0) + call.bytes_sent
        return dict(sorted(sent.items(), key=lambda item: AXES.index(item[0].split("+")[0]) if item[0] else -1))

    # ---- making it ---------------------------------------------------------------------------------------------------

    def _place_of(self, rank: int) -> dict[str, int]:
        return dict(zip(AXES, map(int, np.unravel_index(rank, self.ranks.shape))))

    def _large(self, axes: Iterable[str]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if self.size[axis] > 1)

    def _sets(self) -> list[tuple[str, ...]]:
        """Which axes get a group: together they have more than one rank."""
        wanted = [self._large(axes) for axes in (*((axis,) for axis in AXES), *JOINED)]
        return [axes for axes in dict.fromkeys(wanted) if axes]

    def _make_group(self, axes: tuple[str, ...], count: int) -> ProcessGroup:
        """``count`` neighbours along these axes. Every rank makes its own; all of them together cover the world."""
        if count == self.ranks.size:
            return dist.group.WORLD
        numbers = [AXES.index(axis) for axis in axes]
        rows = np.moveaxis(self.ranks, numbers, range(-len(axes), 0)).reshape(-1, count)
        return dist.new_subgroups_by_enumeration(rows.tolist())[0]
