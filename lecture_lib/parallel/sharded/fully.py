"""ZeRO-3: parameters that are whole only while they are used."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed import ProcessGroup, Work
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map_only

from lecture_lib.parallel.agree import agree, broadcast_from_first, facts_of, several_devices, split_among, unchanged
from lecture_lib.parallel.data import clip_to_norm
from lecture_lib.parallel.sharded.flat import Flat
from lecture_lib.parallel.sharded.unit import Call, Unit, tensors_of, units_of


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
                    each layer, the computation and the gradients that travel are of this dtype. Not torch.autocast:
                    it keeps its casts of every layer's parameters until the backward pass. Batch norm, whose running
                    means stay as they are, cannot compute in another dtype
    group:          the ranks that share the batch; all ranks if None

    Sends, in a step, (n-1)/n bytes for each byte of a layer in the compute dtype, three times: gathered for the forward
    pass, gathered again for the backward pass, its gradient reduce-scattered. For the unit that stays whole: twice.
    Every rank must run the same layers in the same order, forward, and backward too: a rank whose loss leaves out a
    layer that the others' need does not gather it, and they wait.

    To clip gradients use ``clip_gradients()``. ``torch.nn.utils.clip_grad_norm_`` sees only this rank's pieces: every
    rank would clip by a norm of its own, and nothing would say so.

    Raises ValueError at construction, the same on every rank, if ranks bring different modules, one that is sharded
    already, different slices of one that is split over these ranks, one with parameters on several devices, or batch
    norm with another compute_dtype; RuntimeError in forward() if the module's parameters have changed since.
    """

    def __init__(
        self, module: nn.Module, compute_dtype: torch.dtype | None = None, *, group: ProcessGroup | None = None
    ):
        super().__init__()
        self.module, self.compute_dtype, self.group = module, compute_dtype, group
        problem = several_devices([*module.named_parameters(), *module.named_buffers()]) or split_among(module, group)
        problem = problem or running_means_in_another_dtype(module, compute_dtype)
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

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm, that of all parameters together, is at most ``max_norm``. Returns the
        norm before, (), on every rank. After finish_gradient_synchronization(); every rank calls it.

        An all-reduce of 8 bytes. Raises ValueError for a module that is split over other ranks.
        """
        for unit in self._units:
            unit.free()  # a forward pass without a backward pass leaves the unit that stays
        return clip_to_norm(self.module, max_norm, self.group, gradients_are_split=True)

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


def running_means_in_another_dtype(module: nn.Module, compute_dtype: torch.dtype | None) -> str | None:
    """The problem, for ``agree``, of a batch norm that would have its weight in one dtype, its means in another."""
    for name, part in module.named_modules():
        if compute_dtype and isinstance(part, _NormBase) and part.affine and part.running_mean is not None:
            if part.running_mean.dtype != compute_dtype:
                return (
                    f"brought {name or 'the module'}, a {type(part).__name__} with running means in "
                    f"{part.running_mean.dtype}, and compute_dtype={compute_dtype}; it cannot compute with both. Use "
                    "LayerNorm or GroupNorm, or no compute_dtype."
                )
    return None


class _Gathered(partial):
    """What takes the place of a layer's forward()."""
