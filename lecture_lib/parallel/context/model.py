"""A whole transformer on sequences that are split over ranks.

Attention is the only part in which one token needs another. So all else stays as it is, on fewer tokens; attention is
one of the three, and its rotary positions are those of the tokens that the rank really holds. To the parameters the
ranks are what they are in data parallelism: each has some of the tokens, and the gradients are averaged.

    model = context_parallel(Transformer(), group)
    x, y = shard_sequence(tokens, group=group), shard_sequence(targets, group=group)    # (batch, seq / n) each
    next_token_loss(model(x), y).backward()
    average_gradients(model, group)               # of lecture_lib.parallel.data; or a DataParallel around the model

The loss of a rank is the mean over its tokens. All ranks hold as many, so the mean over all tokens is the average over
the ranks. Targets are made before the sequence is cut: the token after a chunk's last one is on another rank.
"""

from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lecture_lib.parallel.agree import agree, broadcast_from_first, describe, facts_of, name_of, several_devices
from lecture_lib.parallel.context.ring import ring_attention
from lecture_lib.parallel.context.sequence import Layout, not_two_chunks, positions, wrong_layout, zigzag
from lecture_lib.parallel.model import Attention, rotate


def attend_to_all(
    q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup | None = None, attend=ring_attention, layout: Layout = zigzag
) -> Tensor:
    """What takes the place of ``Attention.attend``: this rank's queries, rotated by their positions, on all keys.

    Raises ValueError, the same on every rank, if the ranks bring different numbers of tokens, or an odd one.
    """
    agree("context_parallel", [f"q of {describe(q)}"], group, not_two_chunks(q))  # before one of them raises alone
    at = positions(q.shape[2] * dist.get_world_size(group), group, layout)
    return attend(rotate(q, positions=at), rotate(k, positions=at), v, group=group, layout=layout)


def context_parallel(
    model: nn.Module, group: ProcessGroup | None = None, attend=ring_attention, layout: Layout = zigzag
) -> nn.Module:
    """Let each Attention of the model, split by heads or not, attend to the tokens of all ranks. Changes the model, and
    returns it.

    It takes this rank's tokens, int64 (batch, seq / n), and gives their logits, (batch, seq / n, vocab). The parameters
    stay whole on every rank, with the values of the group's first rank.

    Raises ValueError, the same on every rank and before the model is changed, if the ranks bring models that differ.
    """
    layers = {name: part for name, part in model.named_modules() if isinstance(part, Attention)}
    problem = several_devices(model.named_parameters())
    if not layers or any("attend" in vars(layer) for layer in layers.values()):
        kinds = "attention that is split by the sequence already" if layers else "no Attention"
        problem = f"brought a model with {kinds}; start from the Transformer of one process."
    facts = [f"attend={name_of(attend)}, layout={name_of(layout)}", *facts_of(model)]
    agree("context_parallel", facts, group, problem or wrong_layout(layout, group))
    broadcast_from_first([*model.parameters(), *model.buffers()], group)
    for layer in layers.values():
        layer.attend = partial(attend_to_all, group=group, attend=attend, layout=layout)
    return model
