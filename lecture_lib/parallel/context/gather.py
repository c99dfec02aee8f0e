"""The shortest context parallelism that is right: bring all keys and values to every rank, and attend.

Llama 3 does it so: with few key and value heads, k and v are small beside the work of attention, and a mask of any kind
(one for each document) needs nothing else (Llama Team 2024, The Llama 3 Herd of Models, section 3.3.2). But every rank
holds the keys and values of the whole sequence, and nothing is computed before they are there.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from lecture_lib.parallel.context.sequence import Layout, agreed, order, positions, zigzag
from lecture_lib.parallel.tensor.moves import gather_to_group


@agreed
def all_gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    group: ProcessGroup | None = None,
    layout: Layout = zigzag,
) -> Tensor:
    """What ``ring_attention`` computes, from the same arguments.

    Sends, S_k bytes in all ranks' k: forward (n-1)/n 2 S_k, one all-gather; backward as much, one reduce-scatter. Keeps
    2 S_k, whatever n, and the mask. With a causal mask it computes all scores, 4n blocks where ring_attention has
    2n + 1, and throws half of them away.
    """
    k, v = gather_to_group(torch.stack((k, v)), -2, group)  # (batch, kv_heads, seq, head_dim) each, in order of ranks
    mask = None
    if causal:
        mine = positions(k.shape[2], group, layout)  # (seq / n,)
        mask = (mine[:, None] >= order(k.shape[2], dist.get_world_size(group), layout)).to(q.device)
    with torch.autocast(q.device.type, enabled=False):  # in the dtype of q, k and v, as the ring
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
