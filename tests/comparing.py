"""How tests of parallel models compare what ranks have with what one process has."""

from torch import nn


def relative(ours: dict, theirs: dict) -> float:
    """The largest difference between two sets of tensors, over the largest value of the tensor that it is in."""
    assert ours.keys() == theirs.keys()
    worst = 0.0
    for name, b in theirs.items():
        a = ours[name]
        assert (a is None) == (b is None), f"{name}: {a} and {b}"
        assert b is None or a.shape == b.shape, f"{name}: {a.shape} and {b.shape}"
        if b is not None and b.numel():
            worst = max(worst, ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item())
    return worst


def weights(module: nn.Module) -> dict:
    return {name: p.detach().clone() for name, p in module.named_parameters(remove_duplicate=False)}


def gradients(module: nn.Module) -> dict:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def error_of(function, *args, **kwargs) -> str | None:
    try:
        function(*args, **kwargs)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
