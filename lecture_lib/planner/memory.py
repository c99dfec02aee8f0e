"""Bytes on the fullest rank: what a step keeps, by part.

    weights        the copy that computes, 2 bytes each; with ZeRO 3 only what is gathered: two layers and one end
                   (with a pipeline, ZeRO 3 keeps what ZeRO 1 keeps: see layout.py)
    master weights 4 bytes each, sharded from ZeRO 1 on
    gradients      4 bytes each, sharded from ZeRO 2 on
    optimizer      Adam: 8 bytes each, sharded from ZeRO 1 on
    activations    of every micro-batch that has gone forward and not yet backward
    one layer      what recomputation makes anew of one layer; with tp, inputs gathered whole and their gradients
    logits         bf16, log-softmax, its gradient: 6 bytes each; 14, if a float32 copy is taken first
    fragmentation  what the allocator holds and cannot use: a share of all that comes and goes

Activations of one layer, bytes for each token (t = tp, [t] if sequence parallel):

    inputs and outputs of both norms          8 h / [t]
    query, key, value; attention's result     2 (a + 2 g) d / t + 2 a d / t
    MLP: after the first matrix               2 f / t, twice if gated
    MLP: after the activation                 2 f / t, if not gated: SwiGLU kernels multiply their inputs again
    unfused attention: softmax, its dropout, the mask    5 a s / t

"full" recomputation keeps 2 h / [t], the layer's input. "selective" drops the scores, where attention is unfused; where
it is fused, it keeps the layer's input and the results of attention and of every second matrix.

Sources: Korthikanti et al., 2022, https://arxiv.org/abs/2205.05198, section 4 (activations; no dropout but in scores);
Rajbhandari et al., ZeRO, 2019, https://arxiv.org/abs/1910.02054, section 3.1, with float32 gradients as Megatron-LM and
FSDP keep them.
"""

from lecture_lib.hardware.specs import GIB
from lecture_lib.planner.constants import FRAGMENTATION
from lecture_lib.planner.layout import Layout, layers_of_a_stage, parameters_of_a_rank
from lecture_lib.planner.model import Transformer

LOGIT_BYTES = {"bf16": 2 + 2 + 2, "float32": 2 + 4 + 4 + 4}
OUTSIDE = 2 * GIB  # CUDA's context and NCCL's buffers, which PyTorch's allocator does not count


def activation_bytes(model: Transformer, layout: Layout, recompute: str | None = None) -> dict[str, float]:
    """Bytes that one layer keeps for the backward pass, for each token of a rank, by part.

    ``recompute``: in place of the layout's.
    """
    h, q, kv, t = model.hidden, model.query_width, model.kv_width, layout.tp
    f = model.ffn_hidden * model.active_experts
    shared = t if layout.sequence_parallel else 1
    recompute = recompute or layout.recompute
    if recompute == "full":
        return {"input": 2 * h / shared}
    if recompute == "selective" and layout.attention != "unfused":
        return {"input": 2 * h / shared, "attention": (4 * q + 2 * kv) / t, "mlp": 2 * f / t + 2 * h / shared}
    stored = layout.attention == "unfused" and recompute == "none"
    return {
        "norms": 8 * h / shared,
        "attention": 4 * (q + kv) / t,
        "scores": 5 * model.heads * model.seq / t if stored else 0.0,
        "mlp": 4 * f / t,
    }


def in_flight(stage: int, pp: int, virtual_stages: int, micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds at once, never more than there are.

    1F1B          pp - stage
    interleaved   pp + (pp - 1 - 2 stage) / v      (Narayanan et al., 2021, section 2.2: 2 (pp - stage - 1) + (v - 1) pp
                                                   parts go forward before the first goes backward, and one with it)
    """
    if virtual_stages == 1:
        return min(micro_batches, pp - stage)
    return min(micro_batches, pp + (pp - 1 - 2 * stage) / virtual_stages)


def memory_bytes(model: Transformer, layout: Layout) -> dict[str, float]:
    """By part, of the fullest pipeline stage: the first, with most activations, the second, if the first has the
    embedding in place of a layer, or the last, with the logits. ``layout`` is complete (layout.py)."""
    pp = layout.pp
    stages = {0, pp - 1}
    if pp > 1 and model.layers % pp:
        stages.add(1)
    return max((_stage(model, layout, stage) for stage in stages), key=lambda parts: sum(parts.values()))


def _stage(model: Transformer, layout: Layout, stage: int) -> dict[str, float]:
    t, pp = layout.tp, layout.pp
    zero = 1 if layout.zero_stage == 3 and not layout.gathers_layers else layout.zero_stage
    first, last = stage == 0, stage == pp - 1
    layers = layers_of_a_stage(model, pp, layout.virtual_stages)
    if layers * pp > model.layers:  # embedding and head stand in place of a layer
        layers -= first + last
    dense, experts, end = parameters_of_a_rank(model, layout)
    ends = end * (1 if pp == 1 and model.tied else first + last)
    held = layers * (dense + experts) + ends
    sharded = (layers * (dense + experts * layout.ep) + ends) / layout.shards
    gathered = min(held, 2 * (dense + experts) + end)

    tokens = layout.micro_batch * model.seq / layout.cp
    kept = sum(activation_bytes(model, layout).values())
    flying = in_flight(stage, pp, layout.virtual_stages, layout.micro_batches)
    anew = sum(activation_bytes(model, layout, "none").values()) if layout.recompute != "none" else 0.0
    if layout.sequence_parallel:
        anew += 8 * model.hidden  # inputs of attention and MLP, whole, and their gradients
    parts = {
        "weights": 2.0 * (gathered if zero == 3 and layout.shards > 1 else held),
        "master weights": 4.0 * (sharded if zero >= 1 else held),
        "gradients": 4.0 * (sharded if zero >= 2 else held),
        "optimizer": 8.0 * (sharded if zero >= 1 else held),
        "activations": tokens * kept * layers * flying,
        "one layer": tokens * anew,
        "logits": tokens * LOGIT_BYTES[layout.logits] * model.vocab / t if last else 0.0,
    }
    parts["fragmentation"] = FRAGMENTATION * (parts["activations"] + parts["one layer"] + parts["logits"])
    return parts
