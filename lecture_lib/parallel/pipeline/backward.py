"""The backward pass in two halves: first the gradient of the stage's input, later the gradients of its weights.

A linear layer y = x A needs two products in its backward pass, from the gradient g of y: g A^T for the layer before it,
and x^T g for its own weight. Autograd does both when g comes. To put the second off, every module that has parameters
is taken out of the graph: it runs on a detached input, in a small graph of its own, and the large graph gets a node in
its place. When g comes to this node (I), the node asks the small graph for the gradient of its input only and keeps the
small graph and g. W then asks each for the gradients of the parameters.

    large graph   x ──────── node ──────── y        I goes through here, and frees it
    small graph       x' ── module ── y'            kept for W: what the module saved, and g

A module has to be called to be taken out. One whose weight another module uses stays in the large graph, and so does a
module that has both parameters and children: its own weight gradient is computed in I. That is right, only less late.

Source: Qi et al. 2023, Zero bubble pipeline parallelism, section 2.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_unflatten


class Delayed:
    """The weight gradients of one micro-batch in one stage that are still to be computed."""

    def __init__(self):
        self._small: list[tuple[_Small, tuple[Tensor, ...]]] = []

    def add(self, small: "_Small", gradients: tuple[Tensor, ...]) -> None:
        self._small.append((small, gradients))

    def compute(self) -> None:
        """W: add to every parameter's ``grad``. The small graphs have nothing in common: one walk does all."""
        if self._small:
            outputs = [edge for small, _ in self._small for edge in small.outputs]
            gradients = [gradient for _, gradients in self._small for gradient in gradients]
            parameters = {parameter: None for small, _ in self._small for parameter in small.parameters}
            torch.autograd.backward(outputs, gradients, inputs=list(parameters))
            self._small.clear()


class Splitter:
    """Takes the modules of a stage that have a weight matrix out of the graph, in forward passes inside ``delaying``.

    The gradient of a vector, such as the gain of a norm, takes no longer than that of the input: it stays in I.
    """

    def __init__(self, stage: nn.Module):
        self._delayed: Delayed | None = None
        self._outside: list[tuple[list[Tensor], list[Tensor]]] = []  # inputs of the running module: (theirs, its own)
        self._parameters: dict[nn.Module, list[nn.Parameter]] = {}
        self._hooks = []
        for module in stage.modules():
            parameters = list(module.parameters())
            if any(p.dim() > 1 and p.requires_grad for p in parameters) and not any(True for _ in module.children()):
                self._parameters[module] = parameters
                self._hooks.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
                self._hooks.append(module.register_forward_hook(self._after, with_kwargs=True))

    @contextlib.contextmanager
    def delaying(self, delayed: Delayed) -> Iterator[None]:
        """The I of a forward pass in this block will leave its weight gradients in ``delayed``."""
        self._delayed = delayed
        try:
            yield
        finally:
            self._delayed = None
            self._outside.clear()

    def remove(self) -> None:
        """Leave the modules as they were before."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: nn.Module, args: tuple, kwargs: dict):
        if self._delayed is None:
            return None
        usual = len(args) == 1 and isinstance(args[0], Tensor) and not kwargs
        leaves, form = (args, None) if usual else tree_flatten((args, kwargs))
        theirs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        own = [x.detach().requires_grad_() for x in theirs]
        self._outside.append((theirs, own))
        inside = _replaced(leaves, own)
        return (tuple(inside), kwargs) if form is None else tree_unflatten(inside, form)

    def _after(self, module: nn.Module, args: tuple, kwargs: dict, output):
        if self._delayed is None:
            return None
        theirs, own = self._outside.pop()
        leaves, form = ([output], None) if isinstance(output, Tensor) else tree_flatten(output)
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not outputs:
            return None
        parameters = [p for p in self._parameters[module] if p.requires_grad]
        small = _Small([get_gradient_edge(y) for y in outputs], own, parameters, self._delayed)
        nodes = _Node.apply(small, [y.detach() for y in outputs], _ANCHOR, *theirs)
        return nodes[0] if form is None else tree_unflatten(_replaced(leaves, nodes), form)


def _replaced(leaves: Sequence, tensors: Sequence[Tensor]) -> list:
    """The leaves with these in place of the tensors that need a gradient."""
    rest = iter(tensors)
    return [next(rest) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf for leaf in leaves]


class _Small(NamedTuple):
    """A module's own graph: from ``inputs`` to ``outputs``."""

    outputs: list[GradientEdge]
    inputs: list[Tensor]
    parameters: list[nn.Parameter]
    delayed: Delayed


_ANCHOR = torch.empty(0, requires_grad=True)  # where no input needs a gradient, g has to come to the node all the same


class _Node(torch.autograd.Function):
    """Stands in the large graph for a small one."""

    @staticmethod
    def forward(ctx, small: _Small, outputs: list[Tensor], anchor: Tensor, *inputs: Tensor):
        ctx.small = small
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        small = ctx.small
        found = ()
        if small.inputs:
            found = torch.autograd.grad(small.outputs, small.inputs, gradients, retain_graph=True, allow_unused=True)
        if small.parameters:
            small.delayed.add(small, gradients)
        return None, None, None, *found
