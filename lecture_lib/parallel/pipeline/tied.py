"""Parameters that stages on different ranks share, as an embedding that is also the head.

Every holder has its own copy. They stay equal if they start equal and get the same gradient: the sum over all holders.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lecture_lib.collectives.exchange import exchange


class Tied:
    """Those of this rank.

    stages:   all stages, before the rank lets go of those of other ranks
    rank_of:  the rank that holds each
    wire:     where tensors have to lie to travel; None: where they are
    """

    def __init__(
        self,
        stages: list[nn.Module],
        rank_of: tuple[int, ...],
        group: dist.ProcessGroup | None,
        wire: torch.device | None,
    ):
        self._rank, self._group, self._wire = dist.get_rank(group), group, wire
        holders: dict[nn.Parameter, list[int]] = {}
        for stage, rank in zip(stages, rank_of, strict=True):
            for parameter in stage.parameters():
                ranks = holders.setdefault(parameter, [])
                if rank not in ranks:
                    ranks.append(rank)
        shared = [(parameter, ranks) for parameter, ranks in holders.items() if len(ranks) > 1 and self._rank in ranks]
        self._start_alike(shared)
        self._trained = [(parameter, ranks) for parameter, ranks in shared if parameter.requires_grad]

    def _start_alike(self, shared: list[tuple[nn.Parameter, list[int]]]) -> None:
        """All holders take the value of the first."""
        for parameter, (first, *others) in shared:
            value = parameter.detach().to(self._wire or parameter.device)
            if self._rank == first:
                exchange(self._group, sends=[(value, rank) for rank in others])
            else:
                exchange(self._group, receives=[(value, first)])
                parameter.detach().copy_(value)

    def set_aside(self) -> list[Tensor | None]:
        """Before a step: gradients of earlier steps, which are sums over the holders already, for ``add``."""
        before = [parameter.grad for parameter, _ in self._trained]
        for parameter, _ in self._trained:
            parameter.grad = None
        return before

    def add(self, before: list[Tensor | None]) -> None:
        """After it: each holder sends its gradient to the other holders, and all add them up in the same order."""
        for (parameter, ranks), earlier in zip(self._trained, before):
            mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            mine = mine.to(self._wire or mine.device)
            others = {rank: torch.empty_like(mine) for rank in ranks if rank != self._rank}
            exchange(
                self._group,
                sends=[(mine, rank) for rank in others],
                receives=[(part, rank) for rank, part in others.items()],
            )
            parts = others | {self._rank: mine}
            total = sum(parts[rank] for rank in ranks).to(parameter.device)
            parameter.grad = total if earlier is None else earlier.add_(total)
