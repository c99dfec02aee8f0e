"""Keep activations, or compute them again: how much of a block's forward pass the backward pass repeats.

    none        everything that the backward pass needs is kept
    selective   the outputs of linear layers are kept; norms, positions, attention and SwiGLU's product are computed
                again (after Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models,
                section 5, where attention alone is)
    full        the block's input alone is kept (Chen et al. 2016, Training deep nets with sublinear memory cost)

What is computed again includes what was sent for it: a tensor-parallel block repeats the collectives of its forward
pass, and dropout drops the same numbers. A matmul inside such a collective's layer (RowParallelLinear) writes into
memory that is then summed over the ranks; its output is not kept.
"""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

KEPT = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}  # of linear layers; attention's products are bmm
WAYS = ("none", "selective", "full")


def recompute(block: nn.Module, how: str) -> None:
    """Change what the block keeps from its forward pass for its backward pass; the numbers stay the same.

    Raises ValueError for a way that does not exist.
    """
    if how not in WAYS:
        raise ValueError(f"recompute={how!r}: there are {', '.join(WAYS)}.")
    if how == "none":
        return
    options = {"use_reentrant": False}
    if how == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    block.forward = partial(checkpoint, block.forward, **options)


def _policy(context, operator, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
