"""Attention over a split sequence, and experts over ranks, beside their peers: in one run on one machine, taking turns.

python -m tests.bench.parallel_context

Peers. torch.distributed.tensor.experimental.context_parallel finds no ring for the CPU ("does not have a sharding
strategy registered"). So attention is timed beside the ring inside it, ``_templated_ring_attention``, called with
torch's flash kernel for the CPU; and beside the short form, all keys and values gathered. Experts over ranks are timed
beside the same layer with every expert on every rank, where no token travels and all gradients do.
"""

import functools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

from lecture_lib import World
from lecture_lib.parallel import data, expert
from lecture_lib.parallel.context import (
    all_gather_attention,
    all_to_all_attention,
    contiguous,
    positions,
    ring_attention,
    zigzag,
)
from tests.bench import show, take_turns

REPETITIONS = 11
SHAPES = dict(batch=1, heads=8, kv_heads=4, head_dim=64)
HIDDEN, FFN, EXPERTS, TOKENS = 256, 512, 16, 1024  # tokens of each rank


class TorchsRing(torch.autograd.Function):
    """The ring of context_parallel on zig-zag shards: its loops, torch's kernel for the CPU."""

    @staticmethod
    def forward(ctx, q, k, v):
        from torch._ops import ops  # torch.ops itself cannot travel to the ranks
        from torch.distributed.tensor.experimental._attention import _templated_ring_attention

        kernel = ops.aten._scaled_dot_product_flash_attention_for_cpu
        o, lse = _templated_ring_attention(dist.group.WORLD, 2, kernel, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, g):
        from torch._ops import ops
        from torch.distributed.tensor.experimental._context_parallel._attention import (
            _templated_ring_attention_backward,
        )

        q, k, v, o, lse = ctx.saved_tensors
        kernel = functools.partial(ops.aten._scaled_dot_product_flash_attention_for_cpu_backward, dropout_p=0.0)
        return _templated_ring_attention_backward(
            dist.group.WORLD, 2, kernel, g.contiguous(), "grad_out", q, k, v, o, lse, is_causal=True
        )


def torchs_ring(q, k, v):
    return TorchsRing.apply(q, *(x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v)))


def attention_steps(seq: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of forward and backward, and the largest difference of the output from full attention."""
    torch.manual_seed(0)
    batch, heads, kv_heads, head_dim = SHAPES.values()
    whole = [torch.randn(batch, h, seq, head_dim) for h in (heads, kv_heads, kv_heads)]
    full = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    attentions = {
        "torch's ring": (torchs_ring, zigzag),
        "ring_attention": (ring_attention, zigzag),
        "ring_attention, contiguous": (functools.partial(ring_attention, layout=contiguous), contiguous),
        "all_to_all_attention": (all_to_all_attention, zigzag),
        "all_gather_attention": (all_gather_attention, zigzag),
    }
    steps, differences = {}, {}
    for name, (attention, layout) in attentions.items():
        at = positions(seq, layout=layout)
        leaves = [x[:, :, at].requires_grad_() for x in whole]
        differences[name] = (attention(*leaves) - full[:, :, at]).abs().max().item()
        steps[name] = functools.partial(
            lambda attention, leaves: attention(*leaves).sum().backward(), attention, leaves
        )
    return take_turns(steps, REPETITIONS), differences


def expert_steps() -> dict[str, list[float]]:
    torch.manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN)
    layers = {name: expert.MoE(HIDDEN, FFN, EXPERTS) for name in ("experts on every rank", "expert_parallel")}
    expert.expert_parallel(layers["expert_parallel"])

    def step(layer: expert.MoE, average) -> None:
        layer.zero_grad()
        (layer(x).square().mean() + 0.01 * layer.balance).backward()
        average(layer)

    averages = (data.average_gradients, expert.average_gradients)
    steps = {name: functools.partial(step, layers[name], average) for name, average in zip(layers, averages)}
    return take_turns(steps, REPETITIONS)


def main() -> None:
    print(
        f"context and experts: {os.cpu_count()} cores, 4 ranks, float32, medians of {REPETITIONS} steps, taking turns\n"
    )
    with World(4, timeout=300) as world:
        for seq in (2048, 4096):
            times, differences = world.run(attention_steps, seq)[0]
            assert max(differences.values()) < 1e-5, differences
            show(f"attention, {seq:,} tokens", times, {"ring_attention": "to reach: 1.00"})
        show(f"{EXPERTS} experts, {TOKENS:,} tokens a rank", world.run(expert_steps)[0])


if __name__ == "__main__":
    main()
