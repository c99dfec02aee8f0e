"""ZeRO: data parallelism in which no rank holds everything (Rajbhandari et al. 2020, ZeRO, section 5).

The batch is split as before. In the plain form every rank also keeps all parameters, all gradients and all of the
optimizer's state, n times the same. For P parameters in fp32 and Adam, bytes held by each of n ranks:

    stage                                     parameters    gradients    optimizer    sent in a step
    0   DataParallel                             4 P           4 P          8 P        2 (n-1)/n 4 P
    1   + ShardedOptimizer                       4 P           4 P        8 P / n      3 (n-1)/n 4 P
    2   DataParallel(sharded_optimizer=...)      4 P         4 P / n      8 P / n      2 (n-1)/n 4 P
    3   FullyShardedDataParallel               4 P / n       4 P / n      8 P / n      3 (n-1)/n 4 P

Stage 1 sends more than stage 0, because here the gradients still travel to everybody; stage 2 does not. Stages 2 and 3
hold for a moment more than the table says: gradients on their way (in stage 2 the bucket that travels and those that
fill, in stage 3 those of two layers), and in stage 3 the parameters of the layer at work and the next.
"""

import weakref
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed import ProcessGroup, Work
from torch.utils._pytree import tree_leaves, tree_map_only

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


# ---- ZeRO-3: parameters that are whole only while they are used ------------------------------------------------------


class FullyShardedDataParallel(nn.Module):
    """A module of which each rank holds 1/n; a layer's parameters are whole only while the layer is at work.

        model = FullyShardedDataParallel(module)
        optimizer = torch.optim.AdamW(model.parameters())     # of this rank's shards
        loss_of(model(x), y).backward()                       # x, y: this rank's share of the batch
        model.finish_gradient_synchronization()
        optimizer.step()

    A layer is an element of a ModuleList, ModuleDict or Sequential (of the outermost ones), or, in a module without
    these, each child. All other parameters, those that several layers share, and embeddings, whose weight is often the
    head's too, form one more unit that stays whole from the beginning of forward() to the end of the backward pass. A
    layer has to be used by calling it, and what it computes leaves it as its output.

    Within a unit the parameters lie one after the other in a flat tensor, padded to a multiple of n, and rank r holds
    the r-th n-th of it (Zhao et al. 2023, PyTorch FSDP, section 3.2: FlatParameter). ``.module.named_parameters()`` are
    the pieces in this shard: 1-dimensional, perhaps empty, under the original names, and each .grad is like its .data.
    So optimizers that update each element on its own (SGD, Adam, ...) see what they need; those that look at a whole
    matrix (Muon, Adafactor) do not.

    module:         the same on every rank; parameters and buffers take the values of the group's first rank, and
                    buffers (running means of batch norm) are each rank's own from then on
    compute_dtype:  e.g. torch.bfloat16: shards and their optimizer stay as they are; what is gathered, the inputs of
                    each layer, the computation and the gradients that travel are of this dtype
    group:          the ranks that share the batch; all ranks if None

    Sends, in a step, (n-1)/n bytes for each byte of a layer in the compute dtype, three times: gathered for the forward
    pass, gathered again for the backward pass, its gradient reduce-scattered. For the unit that stays whole: twice.
    Every rank must run the same layers in the same order.

    Raises ValueError at construction, the same on every rank, if ranks bring different modules, one that is sharded
    already, or one with parameters on several devices; RuntimeError in forward() if the module's parameters have
    changed since.
    """

    def __init__(
        self, module: nn.Module, compute_dtype: torch.dtype | None = None, *, group: ProcessGroup | None = None
    ):
        super().__init__()
        self.module, self.compute_dtype, self.group = module, compute_dtype, group
        problem = several_devices([*module.named_parameters(), *module.named_buffers()])
        if any(isinstance(vars(part).get("forward"), _Gathered) for part in module.modules()):
            problem = "brought a module that is sharded already; build it anew, and wrap that."
        agree("FullyShardedDataParallel", [f"compute_dtype={compute_dtype}", *facts_of(module)], group, problem)
        broadcast_from_first([*module.parameters(), *module.buffers()], group)
        self._units = [
            Unit(layer, places, compute_dtype, group, stays=layer is module) for layer, places in units_of(module)
        ]
        for unit in self._units:
            unit.module.forward = _Gathered(self._run, unit, unit.module.forward)
        self._check_unchanged = unchanged("FullyShardedDataParallel", module)
        self._order: list[Unit] = []  # the units in the order in which this forward pass calls them
        self._last_order: list[Unit] = []  # that of the forward pass before
        self._at_work: Call | None = None  # the call that the backward pass is in
        self._travelling: tuple[Flat, set[int], Tensor, Work] | None = None  # gradients that are being reduce-scattered

    def forward(self, *args, **kwargs):
        if self._at_work is not None:
            raise RuntimeError(
                "call finish_gradient_synchronization() after a backward pass, before the next forward()."
            )
        for unit in self._units:
            unit.free()
        self._check_unchanged()
        self._last_order, self._order = self._order, []
        return self.module(*args, **kwargs)

    def _run(self, unit: "Unit", forward, *args, **kwargs):
        """What calling a layer does: gather its parameters, compute, free them."""
        before, recomputes = None, self._at_work is not None  # activations, in the backward pass
        unit.gather()
        if not recomputes:
            before = self._order[-1] if self._order else None
            self._order.append(unit)
            i = len(self._order)
            if self._last_order[i - 1 : i] == [unit] and i < len(self._last_order):
                self._last_order[i].gather()
        unit.show()
        if self.compute_dtype:
            args, kwargs = tree_map_only(Tensor, self._cast, (args, kwargs))
        outputs = []
        try:
            output = forward(*args, **kwargs)
            outputs = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        finally:
            unit.stays |= not recomputes and self._order[-1] is not unit  # others were called inside
            needed = unit in (self._at_work.unit, self._at_work.before) if recomputes else outputs and unit.stays
            if not needed:
                unit.free()
        if outputs:
            call = Call(unit, before)
            unit.calls.add(call)
            register_multi_grad_hook(outputs, lambda _: self._before_backward(call), mode="any")
        return output

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.compute_dtype) if tensor.is_floating_point() else tensor

    # The backward pass runs operations in the reverse of the order in which the forward pass made them. So when it
    # comes to the output of a layer, all later calls are behind it. At these moments, the same on every rank,
    # collectives begin: had they to wait for gradients, ranks that use different parameters would mix them up.

    def _before_backward(self, call: "Call") -> None:
        """The gradient of a layer's output is there: the layer is next."""
        unit = call.unit
        unit.calls.discard(call)
        unit.reached = True
        if self._at_work is None or not unit.stays:  # its output may be that of a layer inside, which is at work
            left, self._at_work = self._at_work, call
            if left is not None and left.unit is not unit and not left.unit.stays:
                left.unit.free()
                if not left.unit.calls:
                    self._reduce_scatter(left.unit)
        unit.gather()
        if call.before is not None:
            call.before.gather()
        unit.show()

    def _reduce_scatter(self, unit: "Unit") -> None:
        for flat in unit.flats:
            if flat.trained:
                self._collect()  # one at a time, so that at most two layers' gradients are held
                gradient, arrived = flat.complete_gradient()
                shard = gradient.new_empty(flat.shard.shape)
                work = dist.reduce_scatter_single(shard, gradient, group=self.group, async_op=True)
                self._travelling = flat, arrived, shard, work
        unit.reached = False

    def _collect(self) -> None:
        if self._travelling is not None:
            flat, arrived, shard, work = self._travelling
            work.wait()
            flat.take_gradient(shard, arrived)
            self._travelling = None

    def finish_gradient_synchronization(self) -> None:
        """Wait until every .grad is this rank's piece of the average. Every rank calls it after a backward pass.

        A parameter that no rank used keeps .grad None. Gradients of several backward passes add up, until zero_grad().
        """
        for unit in reversed(self._units):
            unit.free()
            if unit.reached or any(flat.arrived for flat in unit.flats):
                self._reduce_scatter(unit)
        self._collect()
        self._at_work = None

    def gather_full_params(self) -> dict[str, Tensor]:
        """All parameters, whole, in their own dtype, by their original names; on every rank. Each rank must call it.

        Sends (n-1)/n of their bytes, and holds all of them.
        """
        whole = {parameter: tensor for unit in self._units for flat in unit.flats for parameter, tensor in flat.whole()}
        return {name: whole[parameter] for name, parameter in self._parameters_by_name()}

    def state_dict(self) -> dict[str, Tensor]:
        """The state dict of the bare module, whole, on every rank. Each rank must call it."""
        whole = self.gather_full_params()
        return {name: whole.get(name, value) for name, value in self.module.state_dict().items()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Take this rank's pieces of the bare module's state dict. Raises ValueError if names or shapes differ."""
        mine, parameters = self.module.state_dict(), dict(self._parameters_by_name())
        if mine.keys() != state_dict.keys():
            odd = sorted(mine.keys() ^ state_dict.keys())
            raise ValueError(f"FullyShardedDataParallel: the state dict and the module differ in {', '.join(odd[:4])}.")
        pieces = {parameter: piece for unit in self._units for flat in unit.flats for parameter, piece in flat.pieces()}
        for name, value in state_dict.items():
            shape = pieces[parameters[name]][0] if name in parameters else mine[name].shape
            if value.shape != shape:
                raise ValueError(
                    f"FullyShardedDataParallel: {name} of the state dict has shape {tuple(value.shape)}, that of the "
                    f"module {tuple(shape)}."
                )
        for name, value in state_dict.items():
            if name in parameters:
                parameters[name].copy_(value.flatten()[pieces[parameters[name]][1]])
            else:
                mine[name].copy_(value)

    def _parameters_by_name(self) -> Iterator[tuple[str, nn.Parameter]]:
        for unit in self._units:
            unit.free()  # a forward pass without a backward pass leaves the unit that stays
        return self.module.named_parameters(remove_duplicate=False)


class _Gathered(partial):
    """What takes the place of a layer's forward()."""


class Call:
    """One use of a unit, for whose gradient the backward pass has yet to come. It ends with the graph that it is of."""

    def __init__(self, unit: "Unit", before: "Unit | None"):
        self.unit, self.before = unit, before  # before: the unit called before it


def tensors_of(output) -> Iterator[Tensor]:
    """The tensors in tuples, lists and dicts, and in the attributes of other objects in them."""
    for leaf in tree_leaves(output):
        inside = [leaf] if isinstance(leaf, Tensor) else tree_leaves(dict(getattr(leaf, "__dict__", {})))
        yield from (tensor for tensor in inside if isinstance(tensor, Tensor))


Place = tuple[nn.Module, str, nn.Parameter]  # a module, and under which name it has which parameter


def units_of(module: nn.Module) -> list[tuple[nn.Module, list[Place]]]:
    """The layers of a module with the parameters that each has alone, after the module itself with all others."""
    layers = list(layers_of(module))
    if not layers and not type(module).__module__.startswith("torch.nn."):  # whose insides use each other's parameters
        layers = list(module.children())
    # One without a forward(), such as a ParameterList, is not called.
    layers = [x for x in layers if type(x).forward is not nn.Module.forward and not isinstance(x, nn.Embedding)]
    places = {layer: [place for part in layer.modules() for place in places_of(part)] for layer in layers}
    inside = {part for layer in layers for part in layer.modules()}
    places[module] = [place for part in module.modules() if part not in inside for place in places_of(part)]
    users: dict[nn.Parameter, set[nn.Module]] = {}
    for user, its in places.items():
        for _, _, parameter in its:
            users.setdefault(parameter, set()).add(user)
    alone = {layer: [place for place in places[layer] if users[place[2]] == {layer}] for layer in layers}
    rest = [place for part in module.modules() for place in places_of(part)]
    rest = [place for place in rest if not any(users[place[2]] == {layer} for layer in layers)]
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
        self.calls: weakref.WeakSet[Call] = weakref.WeakSet()  # to which the backward pass has yet to come
        self.reached = False  # whether the backward pass has, and its gradients have not travelled

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
        self.trained = parameters[0].requires_grad
        self._shapes = [parameter.shape for parameter in parameters]
        self._sizes = [parameter.numel() for parameter in parameters]
        k = -(-sum(self._sizes) // n)
        whole = parameters[0].detach().new_zeros(n * k)
        torch.cat([parameter.detach().flatten() for parameter in parameters], out=whole[: sum(self._sizes)])
        self.shard = whole[rank * k : (rank + 1) * k].clone()  # (k,)
        dtype = compute_dtype if compute_dtype and whole.is_floating_point() else whole.dtype
        self._whole = whole.new_empty(n * k, dtype=dtype)  # (n k,)
        # .data: a later all-gather into the whole is not a change that autograd has to know of.
        self.full = [nn.Parameter(v.data, requires_grad=self.trained) for v in self._views(self._whole)]
        self._whole.untyped_storage().resize_(0)
        myself = weakref.ref(self)  # Python cannot see, and break, a circle through a hook
        for i, parameter in enumerate(self.full if self.trained else []):
            parameter.register_post_accumulate_grad_hook(lambda _, i=i: myself().bring(i))
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
        """The backward pass has finished the gradient of whole parameter i: copy it, over n, into the flat gradient."""
        if i in self.arrived:
            raise RuntimeError("a second backward pass; call finish_gradient_synchronization() after each.")
        if self.gradient is None:
            self.gradient = self._whole.new_empty(self._whole.shape)
        slot, gradient = self._views(self.gradient)[i], self.full[i].grad
        self.full[i].grad = slot
        put_gradient(gradient, slot, self._scale)
        self.arrived.add(i)

    def complete_gradient(self) -> tuple[Tensor, set[int]]:
        """Hand over the flat gradient, (n k,), with minus zeros for what was not used, and which parameters were."""
        gradient, arrived = self.gradient, self.arrived
        if gradient is None:
            gradient = self._whole.new_empty(self._whole.shape)
        for i, slot in enumerate(self._views(gradient)):
            if i not in arrived:
                put_gradient(None, slot, self._scale)
            self.full[i].grad = None
        gradient[sum(self._sizes) :] = 0
        self.gradient, self.arrived = None, set()
        return gradient, arrived

    def take_gradient(self, shard: Tensor, arrived: set[int]) -> None:
        """Add this rank's shard of the summed gradient, (k,), to the .grad of its pieces."""
        shard = shard.to(self.shard.dtype)
        for i, parameter in enumerate(self.sharded):
            gradient = shard[self._within[i]]
            if i in arrived or not nobody_used(gradient):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def whole(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter with its whole value, gathered in its own dtype."""
        whole = self.shard.new_empty(self._whole.shape)
        dist.all_gather_single(whole, self.shard, group=self._group)
        yield from zip(self.sharded, self._views(whole))

    def pieces(self) -> Iterator[tuple[nn.Parameter, tuple[torch.Size, slice]]]:
        """Each parameter with its whole shape, and the range of its elements, flattened, that are here."""
        yield from zip(self.sharded, zip(self._shapes, self._ranges))
