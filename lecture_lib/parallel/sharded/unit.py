"""Which parameters are gathered and freed together: those of a layer.

A module's layers are the elements of its lists of modules, else its children; what is in none of them, or in several,
is one more unit.
"""

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lecture_lib.parallel.sharded.flat import Flat


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
