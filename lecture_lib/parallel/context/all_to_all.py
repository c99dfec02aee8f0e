"""All-to-all attention: outside of attention each rank has all heads of some tokens, inside some heads of all tokens.

No head needs another head, so attention can be split by heads; and nothing else in a transformer needs another token,
so all else can be split by the sequence. An all-to-all turns one into the other (Jacobs et al. 2023, DeepSpeed Ulysses,
section 3.1). What a rank sends falls with n, where the ring sends about the same for any n. But there have to be as
many heads as ranks.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from lecture_lib.parallel.context.sequence import Layout, agreed, order, zigzag
from lecture_lib.parallel.expert import all_to_all
from lecture_lib.parallel.tensor.split import ranks_per_head


@agreed
def all_to_all_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    group: ProcessGroup | None = None,
    layout: Layout = zigzag,
) -> Tensor:
    """What ``ring_attention`` computes, from the same arguments. Every rank has seq x heads / n to attend to: balanced
    in any layout.

    Sends, S_q and S_k bytes in all ranks' q and k: forward (n-1)/n^2 (2 S_q + 2 S_k), four all-to-alls, of q, k, v and
    the output; backward as much. With fewer key and value heads than ranks, n / kv_heads ranks need the same one: S_k
    counts n heads then.

    Raises ValueError, the same on every rank, if n does not divide the query heads, or neither divides nor is a
    multiple of the key and value heads; and for shapes that do not fit, or that differ between ranks.
    """
    n, heads = dist.get_world_size(group), q.shape[1]
    if heads % n:
        raise ValueError(
            f"all_to_all_attention: {heads} query heads cannot be shared equally by {n} ranks; take fewer ranks, or "
            "ring_attention, which splits no heads."
        )
    copies = ranks_per_head("all_to_all_attention", k.shape[1], n)
    if copies > 1:
        k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
    q, k, v = (heads_of_all_tokens(x, group, layout) for x in (q, k, v))
    with torch.autocast(q.device.type, enabled=False):  # in the dtype of q, k and v, as the ring
        o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return tokens_of_all_heads(o, group, layout)


def heads_of_all_tokens(x: Tensor, group: ProcessGroup | None = None, layout: Layout = zigzag) -> Tensor:
    """(batch, heads, seq / n, head_dim), this rank's tokens -> (batch, heads / n, seq, head_dim), this rank's heads."""
    n = dist.get_world_size(group)
    pieces = x.unflatten(1, (n, -1)).movedim(1, 0)  # (n, batch, heads / n, seq / n, head_dim): one for each rank
    pieces = all_to_all(pieces, [1] * n, [1] * n, group)  # one from each rank
    by_rank = order(x.shape[2] * n, n, layout).to(x.device)
    return pieces.movedim(0, 2).flatten(2, 3).index_select(2, by_rank.argsort())


def tokens_of_all_heads(x: Tensor, group: ProcessGroup | None = None, layout: Layout = zigzag) -> Tensor:
    """The way back: (batch, heads / n, seq, head_dim) -> (batch, heads, seq / n, head_dim)"""
    n = dist.get_world_size(group)
    by_rank = order(x.shape[2], n, layout).to(x.device)
    pieces = x.index_select(2, by_rank).unflatten(2, (n, -1)).movedim(2, 0)  # one for each rank
    return all_to_all(pieces, [1] * n, [1] * n, group).movedim(0, 1).flatten(1, 2)
