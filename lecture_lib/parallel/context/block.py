"""One block of attention: some queries, some keys, and what has to be kept so that blocks can be put together.

A softmax over keys that come one block after the other, the online softmax (Milakov and Gimelshein 2018, Online
normalizer calculation for softmax, section 3; with values, Dao et al. 2022, FlashAttention, section 3.1). A block gives
its own output o and the logarithm L of its sum of exponentials. With s = q k^T / sqrt(d) its scores, s_ij that of query
i and key j:

    L_i = log sum_j exp(s_ij)          o_i = sum_j exp(s_ij - L_i) v_j

Two blocks a and b of keys for the same queries are as one:

    L = log(exp(L_a) + exp(L_b))       o = exp(L_a - L) o_a + exp(L_b - L) o_b

On the way back, L of all keys gives the probabilities of each block again, p = exp(s - L), from its q and k alone. With
g the gradient of o, and D_i the sum over the features of g_i o_i:

    dv = p^T g          ds = p (g v^T - D) / sqrt(d)          dq = ds k          dk = ds^T q
"""

import math

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, diagonal: bool = False) -> tuple[Tensor, Tensor]:
    """o and L of one block, by the formulas above.

    q: (batch, heads, queries, head_dim), k and v: (batch, kv_heads, keys, head_dim) -> as q, (batch, heads, queries).
    ``diagonal``: queries and keys are the same tokens, and a query sees no later key.
    """
    s = scores(q, k, diagonal)
    m = s.amax(-1, keepdim=True)
    p = s.sub_(m).exp_()  # exp(s - m) cannot overflow
    sums = p.sum(-1, keepdim=True)
    o = torch.einsum("bkhij,bkjd->bkhid", p, v.to(p.dtype)).div_(sums)
    return o.flatten(1, 2), (m + sums.log()).squeeze(-1).flatten(1, 2)


def merge(o: Tensor, L: Tensor, o_block: Tensor, L_block: Tensor) -> None:
    """o and L become those of what they were of and of one more block, in place."""
    both = torch.logaddexp(L, L_block)
    o.mul_((L - both).exp().unsqueeze(-1)).add_(o_block * (L_block - both).exp().unsqueeze(-1))
    L.copy_(both)


def gradients(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, L: Tensor, diagonal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """What one block adds to the gradients of q, k and v, by the formulas above. g, o and L are those of all keys."""
    p = scores(q, k, diagonal).sub_(by_kv_head(L, k).unsqueeze(-1)).exp_()
    q, k, v, g, o = (x.to(p.dtype) for x in (by_kv_head(q, k), k, v, by_kv_head(g, k), by_kv_head(o, k)))
    dv = torch.einsum("bkhij,bkhid->bkjd", p, g)
    D = (g * o).sum(-1, keepdim=True)
    ds = torch.einsum("bkhid,bkjd->bkhij", g, v).sub_(D).mul_(p).mul_(q.shape[-1] ** -0.5)
    return torch.einsum("bkhij,bkjd->bkhid", ds, k).flatten(1, 2), torch.einsum("bkhij,bkhid->bkjd", ds, q), dv


def scores(q: Tensor, k: Tensor, diagonal: bool) -> Tensor:
    """q k^T / sqrt(head_dim), in float32 at least: (batch, kv_heads, heads / kv_heads, queries, keys)"""
    q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (by_kv_head(q, k), k))
    s = torch.einsum("bkhid,bkjd->bkhij", q * q.shape[-1] ** -0.5, k)
    if diagonal:
        s.masked_fill_(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu_(1), -math.inf)
    return s


def by_kv_head(x: Tensor, k: Tensor) -> Tensor:
    """(batch, heads, ...) -> (batch, kv_heads, heads / kv_heads, ...): query heads by the key head that they share."""
    return x.unflatten(1, (k.shape[1], -1))


# ---- the same from torch's flash attention for the CPU, which never holds the scores ---------------------------------

# The features of a head have to be neighbours in memory: the kernel does not ask, and would read others.


def flash_attend(q: Tensor, k: Tensor, v: Tensor, diagonal: bool = False) -> tuple[Tensor, Tensor]:
    o, L = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, diagonal)
    unknown = (0 * q).sum(-1)  # nan where a query has one, else 0: to a few keys the kernel would answer 0
    return o.add_(unknown.unsqueeze(-1)), L.add_(unknown)


def flash_gradients(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, L: Tensor, diagonal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(g, q, k, v, o, L, 0.0, diagonal)
