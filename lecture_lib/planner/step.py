"""The time of one step, as a sum of named parts, on the slowest pipeline stage.

For one micro-batch, T = b s / cp tokens on a rank, and one layer (tp = t):

    matmul          2 T n k / (share x peak) + traffic x 2 bytes x (T n + T k + n k) / memory rate
                    A roofline with a sum in place of the maximum: the second term is small if all sides are long,
                    so that one constant bends the curve for every shape. Backward is twice forward.
    attention       fused: 4 (d + softmax) FLOP for each pair of query and key that a causal mask leaves, at a share of
                    the peak; backward 2.5 times (it computes the scores again). Unfused: all pairs, and the scores go
                    to memory and back, 13 bytes each forward and 17 backward.
    element-wise    norms, residuals, the MLP's activation, fp8 casts: bytes / memory rate
    tensor          an all-gather and a reduce-scatter of T h numbers around attention, and around the MLP; exposed
    context         all-gather of keys and values, which runs beside attention
    expert          an all-to-all to the experts and one back; exposed

and around the layers:

    head            its matmul, and 24 bytes of memory traffic for each logit: to float32, log-softmax, gradient, back
    pipeline        bubble (pp - 1) / (m v) of the time of m micro-batches, more if m < pp; sends, exposed
    data            ZeRO 3: parameters gathered twice and gradients scattered once for each micro-batch, beside the
                    computation; else, and with a pipeline, once a step, beside the last backward pass. With groups of
                    shards (HSDP) all that among a group, and an all-reduce of each shard across the groups, once a step
    optimizer       44 bytes of memory traffic for each parameter held: Adam in float32, clipping, the bf16 copy
    stragglers      a share for each doubling of the nodes

Collectives take alpha x steps + bytes x beta (lecture_lib.collectives.cost): among n ranks, r in a node, a ring in each
node and one across take r - 1 + n / r - 1 steps, and (n - 1) / n of the tensor's bytes cross the slowest link.

Sources: Narayanan et al., 2021, https://arxiv.org/abs/2104.04473 (pipeline, sends); Korthikanti et al., 2022,
https://arxiv.org/abs/2205.05198 (sequence parallelism, selective recomputation); Dao, 2022 and 2023,
https://arxiv.org/abs/2205.14135, https://arxiv.org/abs/2307.08691; Rajbhandari et al., 2019, ZeRO.
"""

import math
from typing import NamedTuple

from lecture_lib.planner.cluster import Cluster, accelerator
from lecture_lib.planner.constants import CALL, LINK_HOP, MEMORY_SHARE
from lecture_lib.planner.layout import Layout, layers_of_a_stage, parameters_of_a_rank
from lecture_lib.planner.model import Transformer

LOGIT_TRAFFIC, OPTIMIZER_TRAFFIC = 24, 44  # bytes


class Rates(NamedTuple):
    """FLOP/s in a layer's matmuls, the head's and attention; bytes/s of the memory."""

    layers: float
    head: float
    attention: float
    memory: float


def gather_seconds(cluster: Cluster, constants: dict, n: int, apart: int, nbytes: float) -> float:
    """An all-gather or a reduce-scatter of ``nbytes`` in all, among n ranks so far ``apart``. An all-reduce is two."""
    if n == 1:
        return 0.0
    inside, rate, hops = cluster.ranks_in_a_node(n, apart), cluster.link * constants["link"], 0
    if cluster.crosses_nodes(n, apart):
        across = inside * cluster.network * constants["network"]
        rate = min(rate, across) if inside > 1 else across
        hops = n // inside - 1
    alpha = CALL + (inside - 1) * LINK_HOP + hops * constants["hop seconds"]
    return alpha + (n - 1) / n * nbytes / rate


def all_to_all_seconds(cluster: Cluster, constants: dict, n: int, apart: int, nbytes: float) -> float:
    """Each of n ranks has ``nbytes`` and sends as many to each; across nodes every rank has its own adapter only."""
    if n == 1:
        return 0.0
    inside = cluster.ranks_in_a_node(n, apart)
    link, network = cluster.link * constants["link"], cluster.network * constants["network"]
    alpha = CALL + (inside - 1) * LINK_HOP + (n - inside) * constants["hop seconds"]
    return alpha + nbytes / n * ((inside - 1) / link + (n - inside) / network)


def recomputed(model: Transformer, layout: Layout) -> tuple[float, float]:
    """How much of a layer's forward pass the backward pass repeats: of the matmuls, of attention (1 is all).

    With fused attention, "selective" keeps the result of every second matmul, counted in their order, as torchtitan
    does: key, output and the MLP's second are repeated. With unfused attention it repeats attention only.
    """
    if layout.recompute == "full":
        return 1.0, 1.0
    if layout.recompute == "none":
        return 0.0, 0.0
    if layout.attention == "unfused":
        return 0.0, 1.0
    q, kv, f = model.query_width, model.kv_width, model.ffn_hidden * model.active_experts
    return (kv + q + f) / (2 * q + 2 * kv + model.mlp_matrices * f), 0.0


def bubble(pp: int, virtual_stages: int, micro_batches: int) -> float:
    """Idle time of a pipeline, as a share of its busy time: (p - 1) / (v m) for GPipe, 1F1B and interleaved 1F1B.

    With fewer micro-batches than stages, m < p, a rank also waits in each further of its v rounds until the first
    micro-batch is back: (p - 1 + (v - 1) (p - m)) / (v m). Both are what parallel.pipeline.simulate finds.
    """
    waits = pp - 1 + (virtual_stages - 1) * max(0, pp - micro_batches)
    return waits / (virtual_stages * micro_batches)


def rates(cluster: Cluster, layout: Layout, constants: dict) -> Rates:
    """What of the datasheet's peaks is reached. GPUs newer than an H100 are taken to reach the same shares as one."""
    gpu = cluster.accelerator
    family = "A100" if gpu.name == "A100" else "H100"
    usual = accelerator(gpu.name).power_watts
    slower = (gpu.power_watts / usual) ** constants["power"] if usual else 1.0
    fp8 = layout.precision == "fp8"
    half = gpu.peak("bf16" if fp8 else layout.precision) * slower
    matmul = constants[f"matmul {family} bf16"] * half
    return Rates(
        layers=constants["matmul H100 fp8"] * slower * gpu.fp8 if fp8 else matmul,
        head=matmul,
        attention=constants[f"attention {family}"]
        * (constants["flash2"] if layout.attention == "flash2" else 1)
        * half,
        memory=gpu.memory_bandwidth * MEMORY_SHARE,
    )


def matmul_seconds(m: float, matrices: float, k: float, n: float, rate: float, memory: float, traffic: float) -> float:
    """(m, k) times (k, n), the m rows spread over as many different matrices; 2 bytes for each number."""
    return 2 * m * k * n / rate + traffic * 2 * (m * k + m * n + matrices * k * n) / memory


def layer_seconds(
    model: Transformer, cluster: Cluster, layout: Layout, constants: dict, rate: Rates
) -> dict[str, float]:
    """One layer and one micro-batch, forward, backward and what is recomputed; by part."""
    h, q, kv, f, d = model.hidden, model.query_width, model.kv_width, model.ffn_hidden, model.head_dim
    t, cp, ep = layout.tp, layout.cp, layout.ep
    shared = t if layout.sequence_parallel else 1
    tokens = layout.micro_batch * model.seq / cp
    routed = tokens * model.active_experts  # tokens, once for each expert that they visit
    experts = model.experts / ep  # on this rank
    ups = model.mlp_matrices - 1  # matrices that widen
    more, more_attention = recomputed(model, layout)
    again = layout.recompute == "full"

    traffic = constants["matmul traffic"]
    matmuls = matmul_seconds(tokens, 1, h, (q + 2 * kv) / t, rate.layers, rate.memory, traffic)
    matmuls += matmul_seconds(tokens, 1, q / t, h, rate.layers, rate.memory, traffic)
    matmuls += matmul_seconds(routed, experts, h, ups * f / t, rate.layers, rate.memory, traffic)
    matmuls += matmul_seconds(routed, experts, f / t, h, rate.layers, rate.memory, traffic)

    queries = tokens * model.heads / t
    if layout.attention == "unfused":
        attention = queries * model.seq * 4 * d * (3 + more_attention) / rate.layers
        attention += queries * model.seq * (13 * (1 + more_attention) + 17) / rate.memory
    else:
        keys = model.seq / 2 + 64  # blocks of 128 on the diagonal are computed whole
        attention = queries * keys * 4 * (d + constants["softmax"]) * (3.5 + more_attention) / rate.attention

    # two norms (2 h read and 2 h written), two residuals (6 h); query, key and value split and rotated; the activation
    moved = tokens * (10 * h / shared + 2 * (q + 2 * kv) / t) + routed * (ups + 1) * f / t
    elements = constants["element-wise"] * 2 * moved * (3 + (more > 0)) / rate.memory
    if (
        layout.precision == "fp8"
    ):  # operands and gradients read and written in 8 bits, twice, the second time transposed
        numbers = tokens * (3 * h + (2 * q + 2 * kv) / t) + routed * (2 * h + (ups + 1) * f / t)
        elements += 6 * (numbers + (2 * q + 2 * kv) * h / t + experts * (ups + 1) * f * h / t) / rate.memory

    keys_values = gather_seconds(cluster, constants, cp, t, 4 * layout.micro_batch * model.seq * kv / t)
    return {
        "matmuls": matmuls * (3 + more),
        "attention": attention,
        "element-wise": elements,
        "launches": constants["layer seconds"] * (3 + more),
        "tensor parallel": 4 * (2 + again) * gather_seconds(cluster, constants, t, 1, 2 * tokens * h),
        "context parallel": beside((3 + more_attention) * keys_values, attention, layout, constants),
        "expert parallel": 2
        * (2 + again)
        * all_to_all_seconds(cluster, constants, ep, t * cp, 2 * routed * h / shared),
    }


def head_seconds(model: Transformer, layout: Layout, constants: dict, rate: Rates) -> tuple[float, float]:
    """The head's matmul, and the loss; one micro-batch, forward and backward."""
    tokens, vocab = layout.micro_batch * model.seq / layout.cp, model.vocab / layout.tp
    matmul = matmul_seconds(tokens, 1, model.hidden, vocab, rate.head, rate.memory, constants["matmul traffic"])
    return 3 * matmul, LOGIT_TRAFFIC * tokens * vocab / rate.memory


def data_seconds(
    model: Transformer, cluster: Cluster, layout: Layout, constants: dict, layers: int, layer: float, head: float
) -> float:
    """Data-parallel traffic of a step, as far as it is not hidden, of a stage with so many ``layers``. ``layer`` and
    ``head``: seconds that each computes for a micro-batch."""
    shards, replicas = layout.shards, layout.replicas
    if shards * replicas == 1:
        return 0.0
    dense, experts, end = parameters_of_a_rank(model, layout)

    def gather(nbytes: float, layers: int, ends: int) -> float:
        """Of so many bytes a parameter, among the shards; an expert's parameters are alike on shards / ep ranks."""
        apart = layout.tp
        seconds = gather_seconds(cluster, constants, shards, apart, nbytes * (layers * dense + ends * end))
        if experts and layers:
            apart *= layout.ep
            seconds += gather_seconds(cluster, constants, shards // layout.ep, apart, nbytes * layers * experts)
        return seconds

    def replicate(nbytes: float, layers: int, ends: int) -> float:
        """An all-reduce of what a rank has after it: its shard of the gradients, among the groups (HSDP)."""
        held = nbytes * (layers * dense + ends * end) / shards
        return 2 * gather_seconds(cluster, constants, replicas, layout.tp * shards, held)

    if layout.gathers_layers:
        forward = layer / (3 + recomputed(model, layout)[0])
        backward = layer - forward
        one, last = gather(2, 1, 0), gather(2, 0, 1)
        each = beside(one, forward, layout, constants) + beside(2 * one, backward, layout, constants)
        # The first gather of a micro-batch has nothing to hide behind.
        each = layers * each + last + beside(2 * last, head * 2 / 3, layout, constants)
        # What hides the gathers of the last micro-batch's backward pass hides the sums across groups too.
        sums, room = replicate(2, layers, 1), layers * max(0.0, backward - 2 * one)
        return layout.micro_batches * each + beside(sums, room, layout, constants)
    scatter, back = gather(4, layers, 1), gather(2 if layout.zero_stage else 4, layers, 1)
    sums = replicate(4, layers, 1)
    behind = (layers * layer + head) * 2 / 3  # the backward pass of one micro-batch
    seconds = beside(scatter + sums + back, behind, layout, constants)
    if layout.zero_stage == 2:  # gradients leave after each micro-batch
        seconds += (layout.micro_batches - 1) * beside(scatter, behind, layout, constants)
    return seconds


def step_seconds(model: Transformer, cluster: Cluster, layout: Layout, constants: dict) -> dict[str, float]:
    """Seconds of a step by part; their sum is the step. ``layout`` is complete (layout.py)."""
    rate = rates(cluster, layout, constants)
    parts = layer_seconds(model, cluster, layout, constants, rate)
    layer = sum(parts.values())
    head, loss = head_seconds(model, layout, constants, rate)
    pp, v, m = layout.pp, layout.virtual_stages, layout.micro_batches
    layers = layers_of_a_stage(model, pp, v)
    idle = layers * layer * bubble(pp, v, m)
    if layers * pp > model.layers:  # the last stage has the head in place of a layer: which is slower?
        if head + loss <= layer:
            head = loss = 0.0
        else:
            layers -= 1
    data = data_seconds(model, cluster, layout, constants, layers, layer, head + loss)

    dense, experts, end = parameters_of_a_rank(model, layout)
    held = layers * (dense + experts) + end
    if layout.zero_stage:
        held = (layers * (dense + experts * layout.ep) + end) / layout.shards

    parts = {name: m * layers * seconds for name, seconds in parts.items()}
    parts["matmuls"] += m * head
    parts["element-wise"] += m * loss
    parts["pipeline bubble"] = m * idle
    parts["pipeline sends"] = m * send_seconds(model, cluster, layout, constants)
    parts["data parallel"] = data
    parts["optimizer"] = OPTIMIZER_TRAFFIC * held / rate.memory
    parts["stragglers"] = constants["stragglers"] * math.log2(cluster.nodes) * sum(parts.values())
    return parts


def send_seconds(model: Transformer, cluster: Cluster, layout: Layout, constants: dict) -> float:
    """What a stage sends for one micro-batch: each of its parts hidden numbers a token to the next stage, and as many
    back. Each rank of tp sends its share; without sequence parallelism they are put together again within the node
    (Narayanan et al., 2021, section 4.1)."""
    if layout.pp == 1:
        return 0.0
    crosses = cluster.crosses_nodes(layout.pp, layout.tp * layout.cp * layout.dp)
    alpha = constants["hop seconds"] if crosses else LINK_HOP
    rate = cluster.network * constants["network"] if crosses else cluster.link * constants["link"]
    nbytes = 2 * layout.micro_batch * model.seq / layout.cp * model.hidden
    there = alpha + nbytes / layout.tp / rate
    if not layout.sequence_parallel:
        there += gather_seconds(cluster, constants, layout.tp, 1, nbytes)
    return 2 * layout.virtual_stages * there


def beside(traffic: float, work: float, layout: Layout, constants: dict) -> float:
    """Seconds that ``traffic`` adds to ``work`` that runs at the same time: what is longer than the work, and of what
    is hidden the share that is paid anyway."""
    return traffic - (1 - constants["not hidden"]) * min(traffic, work) if layout.overlap else traffic
