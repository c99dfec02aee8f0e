"""How tests of parallel models compare what ranks have with what one process has."""

import torch
from torch import Tensor, nn


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, over the largest value."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, f"{ours.shape} and {theirs.shape}"
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30)).item() if theirs.numel() else 0.0


def relative(ours: dict, theirs: dict) -> float:
    """The largest difference between two sets of tensors, over the largest value of the tensor that it is in."""
    assert ours.keys() == theirs.keys()
    missing = [name for name in ours if (ours[name] is None) != (theirs[name] is None)]
    assert not missing, f"{missing} on one side only"
    return max((difference(ours[name], b) for name, b in theirs.items() if b is not None), default=0.0)


def seeded(seed: int, make):
    torch.manual_seed(seed)
    return make()


def counts(led) -> dict:
    """{operation: (calls, bytes)}"""
    return {name: (calls, sent) for name, (calls, _, sent) in led.totals().items()}


def weights(module: nn.Module) -> dict:
    return {name: p.detach().clone() for name, p in module.named_parameters(remove_duplicate=False)}


def gradients(module: nn.Module) -> dict:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def error_of(function, *args, **kwargs) -> str | None:
    try:
        function(*args, **kwargs)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
