"""ZeRO-1 and 2: who updates which parameter."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map_only

from lecture_lib.parallel.agree import agree, describe, several_devices


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is spread over the ranks: each updates some parameters, then they send them around.

        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

    params:         as any optimizer's: tensors, (name, tensor) pairs, or groups with options of their own; the same on
                    every rank. Every rank passes all of them, and brings the same gradients to step() unless
                    DataParallel(sharded_optimizer=...) gives each to its owner alone
    optimizer_cls:  any torch optimizer that updates each parameter on its own (all but LBFGS); ``kwargs`` go to it
    group:          the ranks that share the work; all ranks if None

    A parameter belongs to one rank as a whole, so that optimizers that look at a whole matrix work too: the largest
    first, each to the rank that has least. ``state`` is what this rank holds. ``state_dict()`` gathers all of it in the
    main memory of every rank, in the form of the plain optimizer's, and ``load_state_dict()`` takes that form: from one
    process, or from any number of ranks.

    step() sends each parameter once around: (n-1)/n of their bytes, on average over the ranks.

    Raises ValueError at construction, the same on every rank, if ranks bring different parameters or options, or if the
    optimizer refuses them.
    """

    def __init__(
        self, params, optimizer_cls: type[torch.optim.Optimizer], *, group: ProcessGroup | None = None, **kwargs
    ):
        params, problem = list(params), None
        if issubclass(optimizer_cls, torch.optim.LBFGS):
            problem = "asked for LBFGS, which looks at all parameters at once; it cannot be spread over ranks."
        agree("ShardedOptimizer", [f"{optimizer_cls.__name__} of {len(params)} parameters or groups"], group, problem)
        self._group = group
        self._ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._owner: dict[Tensor, int] = {}  # parameter -> global rank
        self._optimizer_cls, self._kwargs = optimizer_cls, kwargs
        self._mine: torch.optim.Optimizer | None = None  # updates the parameters that this rank owns
        super().__init__(params, defaults=kwargs)
        self._give(self.param_groups)
        self.defaults, self.state = self._mine.defaults, self._mine.state

    def add_param_group(self, param_group: dict) -> None:
        """As of any optimizer; every rank must call it."""
        super().add_param_group(param_group)
        load = {rank: sum(p.nbytes for p, owner in self._owner.items() if owner == rank) for rank in self._ranks}
        for parameter in sorted(self.param_groups[-1]["params"], key=lambda p: -p.nbytes):
            self._owner[parameter] = least = min(self._ranks, key=load.get)
            load[least] += parameter.nbytes
        if self._mine is not None:
            self._give(self.param_groups[-1:])

    def _give(self, groups: list[dict]) -> None:
        """Let this rank's optimizer have what the rank owns of these groups."""
        facts = [f"{name}={value}" for g in groups for name, value in self._options(g).items() if not callable(value)]
        named = [(f"parameter {i} of group {k}", p) for k, g in enumerate(groups) for i, p in enumerate(g["params"])]
        problem = several_devices(named)
        mine = [self._options(group) | {"params": self._owned(group)} for group in groups]
        try:
            if self._mine is None:
                self._mine = self._optimizer_cls(mine, **self._kwargs)
            else:
                self._mine.add_param_group(*mine)
        except (TypeError, ValueError) as error:  # such as Muon's, which only the owner of the parameter sees
            problem = f"could not give its parameters to {self._optimizer_cls.__name__}: {error}"
        agree("ShardedOptimizer", [*(f"{name} of {describe(p)}" for name, p in named), *facts], self._group, problem)
        for group, given in zip(groups, self._mine.param_groups[-len(groups) :]):
            for name, value in given.items():
                group.setdefault(name, value)  # the optimizer's defaults, where learning rate schedulers look for them

    def owner_of(self, parameter: Tensor) -> int | None:
        """The global rank that updates this parameter; None if this optimizer does not have it."""
        return self._owner.get(parameter)

    def _owned(self, group: dict) -> list[Tensor]:
        return [p for p in group["params"] if self._owner[p] == dist.get_rank()]

    @staticmethod
    def _options(group: dict) -> dict:
        return {name: value for name, value in group.items() if name not in ("params", "param_names")}

    @torch.no_grad()
    def step(self, closure=None):
        """Update the parameters that this rank owns, and get all others from their owners."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, mine in zip(self.param_groups, self._mine.param_groups):
            mine.update(self._options(group))  # a scheduler may have changed them
        self._mine.step()
        arriving = [
            dist.broadcast(p.detach(), src=owner, group=self._group, async_op=True) for p, owner in self._owner.items()
        ]
        for work in arriving:
            work.wait()
        return loss

    def state_dict(self) -> dict:
        """The state of all parameters, on every rank; each rank must call it."""
        numbers = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        mine = {numbers[p]: state for p, state in self.state.items()}
        everyone: list = [None] * len(self._ranks)
        dist.all_gather_object(everyone, tree_map_only(Tensor, Tensor.cpu, mine), group=self._group)
        groups, first = [], 0
        for group in self.param_groups:
            indices = list(range(first, first := first + len(group["params"])))
            groups.append({name: value for name, value in group.items() if name != "params"} | {"params": indices})
        return {"state": dict(sorted(item for part in everyone for item in part.items())), "param_groups": groups}

    def load_state_dict(self, state_dict: dict) -> None:
        """Each rank takes the state of what it owns. Raises ValueError if the groups do not match."""
        sizes = [len(group["params"]) for group in self.param_groups]
        given = [len(group["params"]) for group in state_dict["param_groups"]]
        if sizes != given:
            raise ValueError(
                f"ShardedOptimizer has groups of {sizes} parameters, and the state is of {given}; build it alike."
            )
        groups, state, local = [], {}, 0
        for group, saved in zip(self.param_groups, state_dict["param_groups"]):
            group.update(self._options(saved))
            indices = []
            for parameter, number in zip(group["params"], saved["params"]):
                if self._owner[parameter] == dist.get_rank():
                    if number in state_dict["state"]:
                        state[local] = state_dict["state"][number]
                    indices.append(local)
                    local += 1
            groups.append(self._options(saved) | {"params": indices})
        self._mine.load_state_dict({"state": state, "param_groups": groups})
        self.state = self._mine.state
