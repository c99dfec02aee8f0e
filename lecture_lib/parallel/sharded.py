"""ZeRO: data parallelism in which no rank holds everything (Rajbhandari et al. 2020, ZeRO, section 5).

The batch is split as before. In the plain form every rank also keeps all parameters, all gradients and all of the
optimizer's state, n times the same. For P parameters in fp32 and Adam, bytes held by each of n ranks:

    stage                                     parameters    gradients    optimizer    sent in a step
    0   DataParallel                             4 P           4 P          8 P        2 (n-1)/n 4 P
    1   + ShardedOptimizer                       4 P           4 P        8 P / n      3 (n-1)/n 4 P
    2   DataParallel(sharded_optimizer=...)      4 P         4 P / n      8 P / n      2 (n-1)/n 4 P
    3   FullyShardedDataParallel               4 P / n       4 P / n      8 P / n      3 (n-1)/n 4 P

Stage 1 sends more than stage 0, because here the gradients still travel to everybody; stage 2 does not. Stages 2 and 3
hold for a moment more than the table says: a bucket of gradients, the parameters of the layer at work and the next.
"""

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed import ProcessGroup, Work
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lecture_lib.parallel.agree import agree, broadcast_from_first, describe, facts_of, several_devices, unchanged
from lecture_lib.parallel.data import nobody_used, put_gradient

# ---- ZeRO-1: who updates which parameter -----------------------------------------------------------------------------


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is spread over the ranks: each updates some parameters, then they send them around.

        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

    params:         as any optimizer's: tensors, (name, tensor) pairs, or groups with options of their own; the same on
                    every rank. Every rank passes all of them, and brings the same gradients to step() unless
                    DataParallel(sharded_optimizer=...) gives each to its owner alone
    optimizer_cls:  any torch optimizer that updates each parameter on its own (all but LBFGS); ``kwargs`` go to it
    group:          the ranks that share the work; all ranks if None

    A parameter belongs to one rank as a whole, so that optimizers that look at a whole matrix work too: the largest
    first, each to the rank that has least. ``state`` is what this rank holds. ``state_dict()`` gathers all of it on
    every rank, in the form of the plain optimizer's, and ``load_state_dict()`` takes that form: from one process, or
    from any number of ranks.

    step() sends each parameter once around: (n-1)/n of their bytes, on average over the ranks.

    Raises ValueError at construction, the same on every rank, if ranks bring different parameters, or LBFGS.
    """

    def __init__(
        self, params, optimizer_cls: type[torch.optim.Optimizer], *, group: ProcessGroup | None = None, **kwargs
    ):
        if issubclass(optimizer_cls, torch.optim.LBFGS):
            raise ValueError("ShardedOptimizer: LBFGS looks at all parameters at once; it cannot be spread over ranks.")
        self._group = group
        self._ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._owner: dict[Tensor, int] = {}  # parameter -> global rank
        self._optimizer_cls, self._kwargs = optimizer_cls, kwargs
        self._mine: torch.optim.Optimizer | None = None  # updates the parameters that this rank owns
        super().__init__(params, defaults=kwargs)
        self.state = self._mine.state

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        facts = [f"parameter {i} of {describe(p)}" for i, p in enumerate(added["params"])]
        agree("ShardedOptimizer", facts, self._group)
        load = {rank: sum(p.nbytes for p, owner in self._owner.items() if owner == rank) for rank in self._ranks}
        for parameter in sorted(added["params"], key=lambda p: -p.nbytes):
            self._owner[parameter] = least = min(self._ranks, key=load.get)
            load[least] += parameter.nbytes
        mine = self._options(added) | {"params": self._owned(added)}
        if self._mine is None:
            self._mine = self._optimizer_cls([mine], **self._kwargs)
        else:
            self._mine.add_param_group(mine)
        for name, value in self._mine.param_groups[-1].items():
            added.setdefault(name, value)  # the optimizer's defaults, where learning rate schedulers look for them

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
        dist.all_gather_object(everyone, mine, group=self._group)
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


# ---- ZeRO-3: parameters that are whole only while they are used ------------------------------------------------------


class FullyShardedDataParallel(nn.Module):
    """A module of which each rank holds 1/n; a layer's parameters are whole only while the layer is at work.

        model = FullyShardedDataParallel(module)
        optimizer = torch.optim.AdamW(model.parameters())     # of this rank's shards
        loss_of(model(x), y).backward()                       # x, y: this rank's share of the batch
        model.finish_gradient_synchronization()
        optimizer.step()

    A layer is an element of a ModuleList, ModuleDict or Sequential (of the outermost ones), or, in a module without
    these, each child. All other parameters, and those that several layers share, form one more unit that stays whole
    from the beginning of forward() to the end of the backward pass. A layer has to be used by calling it.

    Within a unit the parameters lie one after the other in a flat tensor, padded to a multiple of n, and rank r holds
    the r-th n-th of it (Zhao et al. 2023, PyTorch FSDP, section 3.2: FlatParameter). ``.module.named_parameters()`` are
    the pieces in this shard: 1-dimensional, perhaps empty, under the original names, and each .grad is like its .data.
    So optimizers that update each element on its own (SGD, Adam, ...) see what they need; those that look at a whole
    matrix (Muon, Adafactor) do not.

    module:         the same on every rank; parameters and buffers take the values of the group's first rank
    compute_dtype:  e.g. torch.bfloat16: shards and their optimizer stay as they are; what is gathered, the inputs of
                    each layer, the computation and the gradients that travel are of this dtype
    group:          the ranks that share the batch; all ranks if None

    Sends, in a step, (n-1)/n bytes for each byte of a layer in the compute dtype, three times: gathered for the forward
    pass, gathered again for the backward pass, its gradient reduce-scattered. For the unit that stays whole: twice.
    Every rank must run the same layers in the same order.

    Raises ValueError at construction, the same on every rank, if ranks bring different modules or one has parameters on
    several devices; RuntimeError in forward() if the module's parameters have changed since.
    """

    def __init__(
        self, module: nn.Module, compute_dtype: torch.dtype | None = None, *, group: ProcessGroup | None = None
    ):
        super().__init__()
        self.module, self.compute_dtype, self.group = module, compute_dtype, group
        problem = several_devices([*module.named_parameters(), *module.named_buffers()])
        agree("FullyShardedDataParallel", [f"compute_dtype={compute_dtype}", *facts_of(module)], group, problem)
        broadcast_from_first([*module.parameters(), *module.buffers()], group)
        self._units = [
            Unit(layer, places, compute_dtype, group, stays=layer is module) for layer, places in units_of(module)
        ]
        for unit in self._units:
            unit.module.forward = partial(self._run, unit, unit.module.forward)
            for flat in unit.flats:
                for i, parameter in enumerate(flat.full):
                    if parameter.requires_grad:
                        parameter.register_post_accumulate_grad_hook(partial(self._gradient_ready, unit, flat, i))
        self._check_unchanged = unchanged("FullyShardedDataParallel", module)
        self._latest: Unit | None = None  # the unit that ran last in this forward pass
        self._travelling: tuple[Flat, Tensor, Work] | None = None  # the gradients that are being reduce-scattered

    def forward(self, *args, **kwargs):
        if any(unit.in_backward for unit in self._units) or self._travelling:
            raise RuntimeError(
                "call finish_gradient_synchronization() after a backward pass, before the next forward()."
            )
        for unit in self._units:
            unit.free()
        self._check_unchanged()
        self._latest = None
        output = self.module(*args, **kwargs)
        if self._latest is not None:
            self._latest.next = None
        return output

    def _run(self, unit: "Unit", forward, *args, **kwargs):
        """What calling a layer does: gather its parameters, compute, free them."""
        if unit.in_backward:  # activation recomputation
            return forward(*args, **kwargs)
        unit.follow(self._latest)
        self._latest = unit
        unit.gather()
        if unit.next is not None:  # as in the last step
            unit.next.gather()
        unit.show()
        try:
            args, kwargs = self._mark_inputs(unit, (args, kwargs))
            output = forward(*args, **kwargs)
        except BaseException:
            unit.free()
            raise
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if outputs:
            unit.expect_gradients()
            register_multi_grad_hook(outputs, lambda _: self._before_backward(unit), mode="any")
        if not (outputs and unit.stays):
            unit.free()
        return output

    def _mark_inputs(self, unit: "Unit", inputs):
        """The inputs in the compute dtype, and such that we hear when the backward pass has left the layer."""
        leaves, tree = tree_flatten(inputs)
        for i, leaf in enumerate(leaves):
            if self.compute_dtype and isinstance(leaf, Tensor) and leaf.is_floating_point():
                leaves[i] = leaf.to(self.compute_dtype)
        wanted = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if wanted and torch.is_grad_enabled():
            unit.open_calls += 1
            marked = _AfterBackward.apply(lambda: self._left(unit), *(leaves[i] for i in wanted))
            for i, leaf in zip(wanted, marked):
                leaves[i] = leaf
        return tree_unflatten(leaves, tree)

    def _before_backward(self, unit: "Unit") -> None:
        """The gradient of a layer's output is there: the layer is next."""
        if not unit.in_backward:
            unit.in_backward = True
            unit.expect_gradients()
        unit.gather()
        if unit.previous is not None:
            unit.previous.gather()
        unit.show()

    def _gradient_ready(self, unit: "Unit", flat: "Flat", i: int, parameter: nn.Parameter) -> None:
        """The backward pass has finished the gradient of a whole parameter."""
        flat.bring(i)
        if len(flat.arrived) == len(flat.full):
            self._reduce_scatter(flat)
            unit.waiting.discard(flat)
        self._free_if_done(unit)

    def _left(self, unit: "Unit") -> None:
        """The backward pass has left the layer: the gradients of its inputs are there."""
        unit.open_calls = max(0, unit.open_calls - 1)
        self._free_if_done(unit)

    def _free_if_done(self, unit: "Unit") -> None:
        # Whatever still needs a parameter's value leads to the gradient of an input or of a trained parameter.
        if unit.open_calls == 0 and not unit.waiting:
            unit.in_backward = False
            unit.free()

    def _reduce_scatter(self, flat: "Flat") -> None:
        self._collect()  # one at a time, so that at most two layers' gradients are held
        shard = flat.gradient.new_empty(flat.shard.shape)
        work = dist.reduce_scatter_single(shard, flat.complete_gradient(), group=self.group, async_op=True)
        self._travelling = flat, shard, work

    def _collect(self) -> None:
        if self._travelling is not None:
            flat, shard, work = self._travelling
            work.wait()
            flat.take_gradient(shard)
            self._travelling = None

    def finish_gradient_synchronization(self) -> None:
        """Wait until every .grad is this rank's piece of the average. Every rank calls it after a backward pass.

        A parameter that no rank used keeps .grad None. Gradients of several backward passes add up, until zero_grad().
        """
        for unit in self._units:
            for flat in unit.flats:
                if flat in unit.waiting and flat.arrived:  # some of its parameters were not used
                    self._reduce_scatter(flat)
        self._collect()
        for unit in self._units:
            unit.in_backward, unit.open_calls = False, 0
            unit.free()

    def gather_full_params(self) -> dict[str, Tensor]:
        """All parameters, whole, in their own dtype, by their original names; on every rank. Each rank must call it.

        Sends (n-1)/n of their bytes, and holds all of them.
        """
        whole = {parameter: tensor for unit in self._units for flat in unit.flats for parameter, tensor in flat.whole()}
        return {name: whole[parameter] for name, parameter in self.module.named_parameters(remove_duplicate=False)}

    def state_dict(self) -> dict[str, Tensor]:
        """The state dict of the bare module, whole, on every rank. Each rank must call it."""
        whole = self.gather_full_params()
        return {name: whole.get(name, value) for name, value in self.module.state_dict().items()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Take this rank's pieces of the bare module's state dict."""
        mine = self.module.state_dict()
        if mine.keys() != state_dict.keys():
            odd = sorted(mine.keys() ^ state_dict.keys())
            raise ValueError(f"FullyShardedDataParallel: the state dict and the module differ in {', '.join(odd[:4])}.")
        pieces = {parameter: piece for unit in self._units for flat in unit.flats for parameter, piece in flat.pieces()}
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        for name, value in state_dict.items():
            if name in parameters:
                parameters[name].copy_(value.flatten()[pieces[parameters[name]]])
            else:
                mine[name].copy_(value)


class _AfterBackward(torch.autograd.Function):
    """Hands its tensors on, and calls ``done`` when their gradients are there."""

    @staticmethod
    def forward(ctx, done, *tensors):
        ctx.done = done
        return tensors

    @staticmethod
    def backward(ctx, *gradients):
        ctx.done()
        return None, *gradients


Place = tuple[nn.Module, str, nn.Parameter]  # a module, and under which name it has which parameter


def units_of(module: nn.Module) -> list[tuple[nn.Module, list[Place]]]:
    """The layers of a module with the parameters that each has alone, after the module itself with all others."""
    layers = list(layers_of(module)) or list(module.children())
    places = {layer: [place for part in layer.modules() for place in places_of(part)] for layer in layers}
    users: dict[nn.Parameter, set[nn.Module]] = {}
    for layer in places:
        for _, _, parameter in places[layer]:
            users.setdefault(parameter, set()).add(layer)
    alone = {layer: [place for place in places[layer] if len(users[place[2]]) == 1] for layer in places}
    rest = [place for part in module.modules() for place in places_of(part) if len(users.get(place[2], ())) != 1]
    return [(layer, own) for layer, own in [(module, rest), *alone.items()] if own]


def layers_of(module: nn.Module) -> Iterator[nn.Module]:
    """The elements of the outermost ModuleLists, ModuleDicts and Sequentials."""
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
    for child in module.children():
        if is_list and not isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            yield child
        else:
            yield from layers_of(child)


def places_of(module: nn.Module) -> list[Place]:
    return [(module, name, parameter) for name, parameter in module.named_parameters(recurse=False)]


class Unit:
    """A layer whose parameters are gathered and freed together."""

    def __init__(self, module: nn.Module, places: list[Place], compute_dtype: torch.dtype | None, group, stays: bool):
        self.module = module
        self.stays = stays  # whole until the backward pass is over
        alike: dict[tuple, list[nn.Parameter]] = {}
        for parameter in dict.fromkeys(parameter for _, _, parameter in places):
            alike.setdefault((parameter.dtype, parameter.requires_grad), []).append(parameter)
        self.flats = [Flat(parameters, compute_dtype, group) for parameters in alike.values()]
        full = {sharded: whole for flat in self.flats for sharded, whole in zip(flat.sharded, flat.full)}
        self._places = [(part, name, sharded, full[sharded]) for part, name, sharded in places]
        self._shown = False  # whether the module has the whole parameters at the moment
        self.in_backward = False
        self.waiting: set[Flat] = set()  # for whose gradients the backward pass has to come
        self.open_calls = 0  # calls whose inputs wait for their gradients
        self.next: Unit | None = None
        self.previous: Unit | None = None

    def expect_gradients(self) -> None:
        self.waiting = {flat for flat in self.flats if flat.full[0].requires_grad}

    def follow(self, previous: "Unit | None") -> None:
        self.previous = previous
        if previous is not None:
            previous.next = self

    def gather(self) -> None:
        """Begin the all-gather, unless it has begun."""
        for flat in self.flats:
            flat.gather()

    def show(self) -> None:
        """Wait for the all-gather, and give the module its whole parameters."""
        for flat in self.flats:
            flat.wait()
        self._swap(True)

    def free(self) -> None:
        """Give the module its pieces back, and the memory of the whole to others."""
        self._swap(False)
        for flat in self.flats:
            flat.free()

    def _swap(self, shown: bool) -> None:
        if shown != self._shown:
            for part, name, sharded, full in self._places:
                setattr(part, name, full if shown else sharded)
            self._shown = shown


class Flat:
    """Some parameters of one dtype, one after the other in one tensor, of which rank r holds the r-th n-th.

    sharded: the module's parameters; their data are pieces of this rank's shard      (pieces of (k,), k = ceil(N / n))
    full:    parameters of the original shapes; their data are views of the whole, whose memory exists while it is used
    """

    def __init__(self, parameters: list[nn.Parameter], compute_dtype: torch.dtype | None, group: ProcessGroup | None):
        n, rank = dist.get_world_size(group), dist.get_rank(group)
        self.sharded, self._group, self._scale = parameters, group, 1 / n
        self._shapes = [parameter.shape for parameter in parameters]
        self._sizes = [parameter.numel() for parameter in parameters]
        k = -(-sum(self._sizes) // n)
        whole = parameters[0].detach().new_zeros(n * k)
        torch.cat([parameter.detach().flatten() for parameter in parameters], out=whole[: sum(self._sizes)])
        self.shard = whole[rank * k : (rank + 1) * k].clone()  # (k,)
        dtype = compute_dtype if compute_dtype and whole.is_floating_point() else whole.dtype
        self._whole = whole.new_empty(n * k, dtype=dtype)  # (n k,)
        # .data: a later all-gather into the whole is not a change that autograd has to know of.
        self.full = [nn.Parameter(v.data, requires_grad=parameters[0].requires_grad) for v in self._views(self._whole)]
        self._whole.untyped_storage().resize_(0)
        self._work: Work | None = None
        self._is_whole = False
        self.gradient: Tensor | None = None  # (n k,) in the compute dtype, while the backward pass fills it
        self.arrived: set[int] = set()  # which parameters' gradients are in it

        self._ranges, self._within = [], []  # which elements of each parameter are here, and where in the shard
        first = -rank * k  # where the parameter begins, counted from the beginning of the shard
        for parameter, size in zip(parameters, self._sizes):
            begin, end = min(max(0, -first), size), max(0, min(k - first, size))
            here = slice(first + begin, first + end) if begin < end else slice(0, 0)
            self._ranges.append(slice(begin, max(begin, end)))
            self._within.append(here)
            parameter.grad, parameter.data = None, self.shard[here]
            first += size

    def _views(self, whole: Tensor) -> list[Tensor]:
        """Each parameter within a flat tensor, in its shape."""
        parts = whole[: sum(self._sizes)].split(self._sizes)
        return [part.view(shape) for part, shape in zip(parts, self._shapes)]

    def gather(self) -> None:
        if self._work is None and not self._is_whole:
            self._whole.untyped_storage().resize_(self._whole.nbytes)
            shard = self.shard.to(self._whole.dtype)
            self._work = dist.all_gather_single(self._whole, shard, group=self._group, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work, self._is_whole = None, True

    def free(self) -> None:
        self.wait()
        self._whole.untyped_storage().resize_(0)
        self._is_whole = False

    def bring(self, i: int) -> None:
        """Copy the gradient of whole parameter i, over n, into its place in the flat gradient."""
        if self.gradient is None:
            self.gradient = torch.empty_like(self._whole)
        slot = self._views(self.gradient)[i]
        put_gradient(self.full[i].grad, slot, self._scale)
        self.full[i].grad = slot
        self.arrived.add(i)

    def complete_gradient(self) -> Tensor:
        """The flat gradient, with minus zeros for what was not used. (n k,)"""
        for i, slot in enumerate(self._views(self.gradient)):
            if i not in self.arrived:
                put_gradient(None, slot, self._scale)
            self.full[i].grad = None
        self.gradient[sum(self._sizes) :] = 0
        return self.gradient

    def take_gradient(self, shard: Tensor) -> None:
        """Add this rank's shard of the summed gradient, (k,), to the .grad of its pieces."""
        shard = shard.to(self.shard.dtype)
        for i, parameter in enumerate(self.sharded):
            gradient = shard[self._within[i]]
            if i in self.arrived or not nobody_used(gradient):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self.gradient = None
        self.arrived = set()

    def whole(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter with its whole value, gathered in its own dtype."""
        whole = self.shard.new_empty(self._whole.shape)
        dist.all_gather_single(whole, self.shard, group=self._group)
        yield from zip(self.sharded, self._views(whole))

    def pieces(self) -> Iterator[tuple[nn.Parameter, slice]]:
        """Each parameter with the range of its elements, flattened, that are here."""
        yield from zip(self.sharded, self._ranges)
