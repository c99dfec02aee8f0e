"""The planner: exact counts against PyTorch's own, time and memory that move the right way, search, bad input."""

import itertools
import json
import math
import random
import re
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from lecture_lib.collectives.cost import cost
from lecture_lib.hardware import specs
from lecture_lib.parallel.pipeline.schedules import gpipe, interleaved, one_f_one_b
from lecture_lib.parallel.pipeline.simulate import Cost, simulate
from lecture_lib.planner import (
    PRESETS,
    Cluster,
    Layout,
    Transformer,
    best,
    estimate,
    grow,
    preset,
    reliability,
    two_sites,
)
from lecture_lib.planner.__main__ import main
from lecture_lib.planner.cluster import accelerator
from lecture_lib.planner.constants import CALL, LINK_HOP, calibrated
from lecture_lib.planner.failures import LLAMA3
from lecture_lib.planner.layout import complete, layers_of_a_stage
from lecture_lib.planner.memory import activation_bytes, in_flight
from lecture_lib.planner.step import all_to_all_seconds, bubble, gather_seconds

LLAMA_405B = Layout(dp=128, tp=8, pp=16, virtual_stages=8, micro_batch=1, global_batch=2048, zero_stage=1)
COMMUNICATION = ("tensor parallel", "context parallel", "expert parallel", "pipeline bubble", "pipeline sends")
COMMUNICATION += ("data parallel", "stragglers")


# ---- a transformer, against PyTorch ----------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """A layer as model.py describes it; the scores of attention as two matmuls, so that they are counted."""

    def __init__(self, m: Transformer):
        super().__init__()
        self.m, q, kv, h, f = m, m.query_width, m.kv_width, m.hidden, m.ffn_hidden
        self.norm1, self.norm2 = (torch.nn.LayerNorm(h, bias=m.bias) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(h, q + 2 * kv, m.bias), torch.nn.Linear(q, h, m.bias)
        self.up, self.down = torch.nn.Linear(h, f, m.bias), torch.nn.Linear(f, h, m.bias)
        self.gate = torch.nn.Linear(h, f, m.bias) if m.gated else None

    def forward(self, x, fused=False):  # (batch, seq, hidden)
        m, (b, s, _) = self.m, x.shape
        widths = (m.query_width, m.kv_width, m.kv_width)
        q, k, v = (y.view(b, s, -1, m.head_dim).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(widths, dim=-1))
        if fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=m.heads > m.kv_heads)
        else:
            k, v = (y.repeat_interleave(m.heads // m.kv_heads, dim=1) for y in (k, v))
            y = (q @ k.transpose(2, 3)).softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).reshape(b, s, -1))
        y = self.norm2(x)
        y = F.silu(self.gate(y)) * self.up(y) if self.gate else F.gelu(self.up(y))
        return x + self.down(y)


class Model(torch.nn.Module):
    def __init__(self, m: Transformer):
        super().__init__()
        self.embedding = torch.nn.Embedding(m.vocab, m.hidden)
        self.positions = torch.nn.Embedding(m.positions, m.hidden) if m.positions else None
        self.layers = torch.nn.ModuleList(Layer(m) for _ in range(m.layers))
        self.norm = torch.nn.LayerNorm(m.hidden, bias=m.bias)
        self.head = torch.nn.Linear(m.hidden, m.vocab, bias=False)
        if m.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):  # (batch, seq)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


SMALL = (
    Transformer(3, 64, 4, vocab=96, seq=32),
    Transformer(2, 96, 6, kv_heads=2, ffn_hidden=160, gated=True, vocab=64, seq=16),
    Transformer(2, 64, 4, vocab=80, seq=16, tied=True, bias=True, positions=16),
    Transformer(1, 64, 4, head_dim=32, vocab=50, seq=8),
)


@pytest.mark.parametrize("m", SMALL, ids=range(len(SMALL)))
def test_parameters_and_flops_are_those_that_pytorch_counts(m):
    with torch.device("meta"):
        model = Model(m)
        tokens = torch.zeros(2, m.seq, dtype=torch.long)
    assert m.parameters == sum(p.numel() for p in model.parameters())
    with FlopCounterMode(display=False) as counted:
        loss = model(tokens).sum()
    forward = counted.get_total_flops()
    assert forward == 2 * m.seq * sum(m.forward_flops("full").values())
    with FlopCounterMode(display=False) as counted:
        loss.backward()
    # Nothing asks for the gradient of the embedding's input: all else is twice the forward pass.
    assert counted.get_total_flops() == 2 * forward
    assert m.flops_per_token() * 2 * m.seq == 3 * forward


def test_causal_attention_counts_half_the_scores_and_nothing_else():
    full, causal = (SMALL[0].forward_flops(attention) for attention in ("full", "causal"))
    assert causal.pop("attention scores") * 2 == full.pop("attention scores")
    assert causal == full


@pytest.mark.parametrize("m", (SMALL[0], SMALL[1].with_(gated=False)), ids=("all heads", "grouped"))
def test_activations_are_those_that_autograd_saves(m):
    saved = {}

    def pack(tensor):
        if not isinstance(tensor, torch.nn.Parameter) and tensor.dtype == torch.bfloat16:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    layer, x = Layer(m).bfloat16(), torch.randn(2, m.seq, m.hidden, dtype=torch.bfloat16, requires_grad=True)
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x, fused=True)
    found = sum(nbytes for where, nbytes in saved.items() if where not in weights)
    assert y.shape == x.shape
    layout = Layout(attention="flash2", micro_batch=1, sequence_parallel=False)
    statistics = 2 * 2 * 2  # mean and reciprocal deviation of both norms, which the planner leaves out
    assert found == 2 * m.seq * (sum(activation_bytes(m, layout).values()) + statistics)


@pytest.mark.parametrize(
    "name, parameters",
    [  # as counted in the published checkpoints
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("mpt-7b", 6_649_286_656),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_presets_have_the_parameters_of_the_checkpoints(name, parameters):
    assert preset(name).parameters == parameters


def test_gpt3_has_175_billion_parameters_and_mixtral_uses_13():
    assert round(preset("gpt3-175b").parameters / 1e9) == 175
    assert round(preset("mixtral-8x7b").active_parameters / 1e9) == 13


# ---- time ------------------------------------------------------------------------------------------------------------


@st.composite
def jobs(draw, one_gpu=False):
    """A model, a cluster and a layout that can run."""
    heads = draw(st.sampled_from((8, 16, 64)))
    m = Transformer(
        layers=draw(st.sampled_from((8, 16, 30, 48))),
        hidden=128 * heads,
        heads=heads,
        kv_heads=draw(st.sampled_from((8, heads))),
        ffn_hidden=draw(st.sampled_from((2, 4))) * 128 * heads,
        gated=draw(st.booleans()),
        vocab=draw(st.sampled_from((32000, 128256))),
        seq=draw(st.sampled_from((512, 8192))),
        experts=(experts := draw(st.sampled_from((1, 1, 8)))),
        active_experts=min(experts, 2),
    )
    gpu = draw(st.sampled_from(("A100-40GB", "A100", "H100", "H100-96GB-500W", "B200")))
    if one_gpu:
        axes = dict(dp=1)
    else:
        sizes = {axis: draw(st.sampled_from(n)) for axis, n in dict(dp=(1, 2, 8, 64), tp=(1, 2, 8), cp=(1, 2)).items()}
        pps = [p for p in (1, 2, 4, 8) if layers_of_a_stage(m, p, 1)]
        ep = draw(st.sampled_from([e for e in (1, 2, 8) if sizes["dp"] % e == 0 and m.experts % e == 0]))
        axes = sizes | dict(pp=draw(st.sampled_from(pps)), ep=ep)
    gpus = math.prod(n for axis, n in axes.items() if axis != "ep")
    micro_batch, several = draw(st.sampled_from((1, 4))), draw(st.sampled_from((1, 8)))
    zero, ranks = draw(st.integers(0, 3)), axes["dp"] * axes.get("cp", 1)
    groups = [n for n in (2, 8, 64) if ranks % n == 0] if zero and axes.get("ep", 1) == 1 else []
    layout = Layout(
        **axes,
        micro_batch=micro_batch,
        global_batch=axes["dp"] * micro_batch * several,
        zero_stage=zero,
        shard=draw(st.sampled_from([None, *groups])),
        recompute=draw(st.sampled_from(("none", "selective", "full"))),
        precision=draw(st.sampled_from(("bf16", "fp16") if gpu.startswith("A100") else ("bf16", "fp8"))),
        overlap=draw(st.booleans()),
    )
    return m, Cluster(gpu, gpus, gpus_per_node=min(8, gpus)), layout


@given(jobs())
@settings(deadline=None, max_examples=50)
def test_parts_are_not_negative_and_add_up(job):
    e = estimate(*job)
    assert min(e.seconds.values()) >= 0 and min(e.bytes.values()) >= 0
    assert e.step_seconds == pytest.approx(sum(e.seconds.values()))
    assert e.memory_gib == pytest.approx(sum(e.bytes.values()) / 2**30)
    assert e.tokens_per_second_per_gpu * e.step_seconds * e.cluster.gpus == pytest.approx(e.tokens_per_step)
    assert 0 < e.model_tflops_per_gpu <= e.hardware_tflops_per_gpu
    assert e.mfu == pytest.approx(e.model_tflops_per_gpu * 1e12 / e.cluster.accelerator.peak(e.layout.precision))
    assert 0 < e.mfu < 1 and all(name in e.table() for name, part in e.seconds.items() if part)


@given(jobs(one_gpu=True))
@settings(deadline=None, max_examples=50)
def test_one_gpu_does_not_communicate(job):
    seconds = estimate(*job).seconds
    assert {name: seconds[name] for name in COMMUNICATION} == dict.fromkeys(COMMUNICATION, 0.0)


@given(jobs(), st.sampled_from(("network", "link", "oversubscription")), st.sampled_from((1.1, 4.0, 100.0)))
@settings(deadline=None, max_examples=50)
def test_more_bandwidth_is_never_slower(job, what, times):
    m, cluster, layout = job
    if what == "oversubscription":
        slow, fast = (estimate(m, replace(cluster, oversubscription=n), layout) for n in (times, 1))
    else:
        field = dict(network="internode_gbps_per_gpu", link="link_gbps_per_gpu")[what]
        gbps = getattr(cluster, what) * 8e-9
        slow = estimate(m, replace(cluster, **{field: gbps}), layout)
        fast = estimate(m, replace(cluster, **{field: gbps * times}), layout)
    assert fast.step_seconds <= slow.step_seconds * (1 + 1e-12)


@given(jobs())
@settings(deadline=None, max_examples=50)
def test_doubling_all_batches_doubles_the_work_and_at_most_the_time(job):
    m, cluster, layout = job
    once = estimate(m, cluster, layout)
    layout = once.layout
    twice = estimate(m, cluster, layout.with_(micro_batch=2 * layout.micro_batch, global_batch=2 * layout.global_batch))
    assert twice.tokens_per_step == 2 * once.tokens_per_step
    assert once.step_seconds < twice.step_seconds <= 2 * once.step_seconds * (1 + 1e-12)
    longer = estimate(m, cluster, layout.with_(global_batch=2 * layout.global_batch))
    assert longer.seconds["matmuls"] == pytest.approx(2 * once.seconds["matmuls"])
    assert longer.step_seconds <= 2 * once.step_seconds * (1 + 1e-12)


@given(jobs())
@settings(deadline=None, max_examples=50)
def test_more_sharding_and_more_recomputation_never_need_more_memory(job):
    m, cluster, layout = job
    layout = layout.with_(attention="flash2", shard=None)
    zero = [estimate(m, cluster, layout.with_(zero_stage=z)).memory_gib for z in range(4)]
    assert zero[:3] == sorted(zero[:3], reverse=True)
    assert zero[3] == zero[1] if layout.pp > 1 else zero[3] <= zero[2]
    again = [
        sum(activation_bytes(m, estimate(m, cluster, layout.with_(recompute=r)).layout).values())
        for r in ("none", "full")
    ]
    assert again[1] < again[0]


@given(jobs())
@settings(deadline=None, max_examples=50)
def test_overlap_is_never_slower(job):
    m, cluster, layout = job
    beside, after = (estimate(m, cluster, layout.with_(overlap=overlap)).step_seconds for overlap in (True, False))
    assert beside <= after


PUBLIC = [  # shapes of the sources' tables, and some between and beyond them
    (layers, hidden, heads, seq, gpus)
    for layers, hidden, heads in ((12, 768, 12), (24, 2048, 16), (32, 4096, 32), (48, 7168, 56), (80, 8192, 64))
    for seq in (512, 2048, 8192, 65536)
    for gpus in (8, 64, 512)
]


@pytest.mark.parametrize("gpu", ["A100-40GB", "A100-80GB", "H100-80GB", "H100-96GB-500W", "H200"])
def test_whatever_a_table_may_hold_gives_a_plausible_speed(gpu):
    for precision in ("bf16", "fp8")[: 1 if gpu.startswith("A100") else 2]:
        for layers, hidden, heads, seq, gpus in PUBLIC:
            for recompute in ("none", "full"):
                m = Transformer(layers, hidden, heads, vocab=50368, seq=seq)
                b = max(1, 16384 // seq)  # such tables are of micro-batches that keep a GPU busy
                layout = Layout(micro_batch=b, global_batch=2 * b * gpus, zero_stage=3, recompute=recompute)
                e = estimate(m, Cluster(gpu, gpus), layout.with_(precision=precision))
                assert 0.05 < e.mfu < 0.75, (m, gpus, precision, recompute)


LONGER = {  # what is changed, from where, in small steps
    "seq": [1024 + 64 * i for i in range(60)],
    "micro_batch": list(range(1, 40)),
    "layers": list(range(8, 60)),
    "ffn_hidden": [4096 + 512 * i for i in range(40)],
    "vocab": [8192 + 4096 * i for i in range(40)],
}


@pytest.mark.parametrize("what", LONGER)
@pytest.mark.parametrize(
    "layout",
    [Layout(zero_stage=3), Layout(zero_stage=1), Layout(tp=4, zero_stage=1), Layout(cp=2, zero_stage=3)],
    ids=("ZeRO 3", "ZeRO 1", "tp", "cp"),
)
def test_more_work_takes_longer_and_without_jumps(what, layout):
    """Steps in proportion to the change: between once (what does not grow) and its square (attention)."""
    found = []
    for value in LONGER[what]:
        m = Transformer(32, 4096, 32, 8, 14336, gated=True, vocab=32000, seq=4096)
        m = m.with_(**{what: value}) if what != "micro_batch" else m
        b = value if what == "micro_batch" else 2
        e = estimate(m, Cluster("H100", 64), layout.with_(micro_batch=b, global_batch=64 * b, recompute="full"))
        found.append((value, e.step_seconds * e.tokens_per_step / (64 * b * m.seq), e.memory_gib))
    for (x, seconds, gib), (larger, more_seconds, more_gib) in itertools.pairwise(found):
        power = 2 if what == "seq" else 1
        assert seconds <= more_seconds <= seconds * (larger / x) ** power * (1 + 1e-9), (what, larger)
        assert gib <= more_gib <= gib * (larger / x) * (1 + 1e-9)


@pytest.mark.parametrize("shard", [None, 8])
def test_more_nodes_with_the_same_for_each_gpu_are_never_faster(shard):
    m = preset("llama3-8b")
    seconds = []
    for gpus in (64, 128, 256, 512, 1024, 4096, 16384, 131072):
        layout = Layout(micro_batch=1, global_batch=gpus, zero_stage=3, recompute="selective", shard=shard)
        seconds.append(estimate(m, Cluster("H100", gpus), layout).step_seconds)
    assert seconds == sorted(seconds)
    assert all(b < 1.6 * a for a, b in itertools.pairwise(seconds[:6]))


# ---- hybrid sharding -------------------------------------------------------------------------------------------------


@given(jobs())
@settings(deadline=None, max_examples=50)
def test_one_group_of_shards_is_plain_zero(job):
    m, cluster, layout = job
    if layout.zero_stage and layout.ep == 1:
        plain, one = (estimate(m, cluster, layout.with_(shard=n)) for n in (None, layout.dp * layout.cp))
        assert plain.seconds == one.seconds and plain.bytes == one.bytes


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_larger_groups_of_shards_never_need_more_memory(zero):
    m, cluster = preset("llama3-8b"), Cluster("H100", 512)
    layouts = [Layout(micro_batch=1, global_batch=512, zero_stage=zero, shard=n) for n in (1, 8, 64, 512)]
    gib = [estimate(m, cluster, layout).memory_gib for layout in layouts]
    assert gib == sorted(gib, reverse=True)
    held = m.parameters - m.hidden
    e = estimate(m, cluster, layouts[1])
    sharded = {"master weights": 4, "optimizer": 8} | ({"gradients": 4} if zero > 1 else {})
    assert {name: e.bytes[name] for name in sharded} == {name: n * held / 8 for name, n in sharded.items()}


def test_groups_of_a_node_gather_inside_it_and_sum_across():
    m, constants = preset("llama3-8b"), calibrated()
    layout = Layout(micro_batch=1, global_batch=512, zero_stage=3, shard=8, overlap=False)
    cluster = Cluster("H100", 512)
    e = estimate(m, cluster, layout)
    layer, end = m.layer_parameters, m.vocab * m.hidden
    inside = 3 * m.layers * gather_seconds(cluster, constants, 8, 1, 2 * layer)
    inside += 3 * gather_seconds(cluster, constants, 8, 1, 2 * end)
    across = 2 * gather_seconds(cluster, constants, 64, 8, 2 * (m.layers * layer + end) / 8)
    assert e.seconds["data parallel"] == pytest.approx(inside + across)
    # Only what is summed leaves a node: with a slower network the gathers take as long as before.
    slow = estimate(m, replace(cluster, internode_gbps_per_gpu=100), layout).seconds["data parallel"]
    assert inside < slow and slow - inside == pytest.approx(4 * across, rel=0.1)


def test_hybrid_sharding_pays_where_rings_are_long():
    m = preset("llama3-8b")
    layout = Layout(micro_batch=1, zero_stage=3, recompute="selective")
    for gpus, better in ((64, False), (4096, True)):
        whole, groups = (
            estimate(m, Cluster("H100", gpus), layout.with_(global_batch=gpus, shard=n)).step_seconds for n in (None, 8)
        )
        assert (groups < whole) == better
    assert "ZeRO 3 in groups of 8" in layout.with_(shard=8).axes()


@pytest.mark.parametrize("n, per_node", [(8, 8), (16, 8), (64, 8), (32, 4)])
def test_collectives_cost_what_the_collectives_chapter_says(n, per_node):
    constants, cluster = calibrated(), Cluster("H100", n, gpus_per_node=per_node)
    theirs = cost("hierarchical_all_reduce", n, per_node)
    empty = 2 * (gather_seconds(cluster, constants, n, 1, 0) - CALL)
    nodes = n // per_node
    assert theirs.steps == 2 * (per_node - 1 + nodes - 1)
    assert empty == pytest.approx(2 * ((per_node - 1) * LINK_HOP + (nodes - 1) * constants["hop seconds"]))
    rate = cluster.link * constants["link"]
    if nodes > 1:
        rate = min(rate, per_node * cluster.network * constants["network"])
    full = 2 * (gather_seconds(cluster, constants, n, 1, 1e9) - CALL)
    assert (full - empty) * rate / 1e9 == pytest.approx(theirs.share)


def test_an_all_to_all_sends_each_rank_its_part_over_the_link_that_leads_there():
    constants, cluster = calibrated(), Cluster("H100", 16)
    there = all_to_all_seconds(cluster, constants, 16, 1, 16e9) - all_to_all_seconds(cluster, constants, 16, 1, 0)
    inside, across = 7e9 / cluster.link / constants["link"], 8e9 / cluster.network / constants["network"]
    assert there == pytest.approx(inside + across)
    assert cost("pairwise_all_to_all", 16).share == 15 / 16


@pytest.mark.parametrize("p", range(2, 9))
def test_the_bubble_is_that_of_the_schedules_of_the_pipeline_chapter(p):
    for m in (*range(1, 18), 24, 32, 63, 64):
        for table in (gpipe(p, m), one_f_one_b(p, m)):
            assert float(simulate(table).bubble_over_work) == pytest.approx(bubble(p, 1, m), rel=1e-12)
        for v in (2, 3, 4, 8):
            run = simulate(interleaved(p, m, v), Cost(F=1, I=2, W=1))
            exact = Fraction(p - 1 + (v - 1) * max(0, p - m), v * m)
            assert bubble(p, v, m) == pytest.approx(float(exact), rel=1e-12)
            if m <= p or m % p == 0:
                assert run.bubble_over_work == exact
            else:  # the paper asks for whole rounds of p; others can take longer
                assert exact <= run.bubble_over_work <= exact * Fraction(3, 2)


def test_bubble_is_the_formula_of_the_papers():
    assert bubble(1, 1, 8) == 0 and bubble(4, 1, 8) == 3 / 8 and bubble(4, 2, 8) == 3 / 16
    e = estimate(preset("llama3-405b"), Cluster("H100", 16384), LLAMA_405B)
    work = sum(part for name, part in e.seconds.items() if name not in ("pipeline bubble", "pipeline sends"))
    work -= sum(e.seconds[name] for name in ("data parallel", "optimizer", "stragglers"))
    assert e.seconds["pipeline bubble"] / work == pytest.approx(15 / (8 * 16))


def test_what_the_layout_leaves_open_is_chosen():
    m, cluster = preset("llama3-8b"), Cluster("H100", 64)
    e = estimate(m, cluster, Layout(tp=2, pp=2, global_batch=256, zero_stage=1))
    assert e.layout.dp == 16 and e.layout.sequence_parallel and e.layout.attention == "flash2" and e.fits
    for v, b in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16)):
        other = estimate(
            m, cluster, Layout(tp=2, pp=2, global_batch=256, zero_stage=1, virtual_stages=v, micro_batch=b)
        )
        assert e.step_seconds <= other.step_seconds or not other.fits


def test_recomputation_counts_as_hardware_flops_only():
    m, cluster = Transformer(8, 1024, 8, vocab=1000, seq=512), Cluster("A100", 8)
    for kernel, policy, more in (
        ("flash", "none", 0),
        ("flash", "full", 2 * 12 * 1024**2 + 4 * 1024 * 512),
        ("unfused", "selective", 4 * 1024 * 512),
        ("flash", "selective", 2 * (2 * 1024**2 + 4 * 1024**2)),  # key, output; the second of the MLP
    ):
        e = estimate(m, cluster, Layout(recompute=policy, attention=kernel, global_batch=8))
        ratio = e.hardware_tflops_per_gpu / e.model_tflops_per_gpu
        assert ratio == pytest.approx(1 + 8 * more / m.flops_per_token())
        assert e.tflops_per_gpu("causal") < e.model_tflops_per_gpu


def test_a_power_limit_slows_and_newer_gpus_are_faster():
    m, layout = preset("llama3-8b"), Layout(zero_stage=3, micro_batch=1, global_batch=8)
    seconds = [estimate(m, Cluster(gpu), layout).step_seconds for gpu in ("H100-500W", "H100", "H200", "B200", "GB200")]
    assert seconds == sorted(seconds, reverse=True)


def test_energy_and_price_follow_from_the_time():
    tokens, layout = 1e12, Layout(zero_stage=3, micro_batch=1, global_batch=8)
    e = estimate(preset("llama3-8b"), Cluster("H100", 8, price_per_gpu_hour=2.0), layout)
    hours = tokens / e.tokens_per_second_per_gpu / 3600  # of GPUs
    assert e.days(tokens) == pytest.approx(hours / 8 / 24)
    assert e.price(tokens) == pytest.approx(2 * hours)
    assert e.megawatt_hours(tokens) == pytest.approx(hours * 700 / 1e6)
    assert estimate(e.model, Cluster("H100"), layout).price(tokens) is None


def test_llama_3_took_as_many_gpu_hours_as_predicted():
    e = estimate(preset("llama3-405b"), Cluster("H100", 16384), LLAMA_405B)
    hours = 15.6e12 / e.tokens_per_second_per_gpu / 3600 / reliability(16384).goodput
    # "30.84M", https://huggingface.co/meta-llama/Llama-3.1-405B; it is in no row of the published runs.
    assert hours == pytest.approx(30.84e6, rel=0.10)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_a_stage_holds_the_micro_batches_that_its_schedule_starts_with():
    def held(stage, p, v, m):
        """Walk through 1F1B as Megatron-LM has it: parts that have gone forward and not yet backward, at most."""
        parts = v * m
        warmup = min(parts, p - 1 - stage if v == 1 else 2 * (p - 1 - stage) + (v - 1) * p)
        return min(parts, warmup + 1) / v

    for p, v, m in itertools.product((2, 4, 8), (1, 2, 4), (8, 16, 32)):
        for stage in range(p):
            assert in_flight(stage, p, v, m) == held(stage, p, v, m)


def test_states_are_16_bytes_a_parameter_and_sharded_as_zero_says():
    m = Transformer(8, 1024, 8, vocab=1024, seq=128)
    held = m.parameters - m.hidden  # the last norm is not counted
    for zero, each in ((0, 18), (1, 2 + 4 + 12 / 8), (2, 2 + 16 / 8)):
        e = estimate(m, Cluster("H100", 8), Layout(zero_stage=zero, attention="flash2", global_batch=8))
        states = sum(e.bytes[name] for name in ("weights", "master weights", "gradients", "optimizer"))
        assert states == each * held
    e = estimate(m, Cluster("H100", 8), Layout(zero_stage=3, global_batch=8))
    assert sum(e.bytes[name] for name in ("master weights", "gradients", "optimizer")) == 16 / 8 * held


def test_llama_3_fits_where_it_ran_and_not_on_half_the_stages():
    m = preset("llama3-405b")
    assert estimate(m, Cluster("H100", 16384), LLAMA_405B).fits
    assert not estimate(m, Cluster("H100", 16384), LLAMA_405B.with_(pp=8, dp=256)).fits
    assert not estimate(m, Cluster("H100", 8), Layout(zero_stage=3)).fits


# ---- search ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plans():
    return best(preset("llama3-8b"), Cluster("H100", 16), 64)


def test_search_finds_what_trying_all_finds(plans):
    m, cluster = preset("llama3-8b"), Cluster("H100", 16)
    fastest = math.inf
    for t, p, c in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4)):
        for zero, again, v, b in itertools.product(
            (1, 2, 3), ("none", "selective", "full"), (1, 2, 4, 8), (1, 2, 4, 8)
        ):
            layout = Layout(
                tp=t, pp=p, cp=c, zero_stage=zero, recompute=again, virtual_stages=v, micro_batch=b, global_batch=64
            )
            try:
                e = estimate(m, cluster, layout)
            except ValueError:
                continue
            if (v == 1 or p > 1) and e.fits:
                fastest = min(fastest, e.step_seconds)
    assert plans[0].step_seconds == fastest


def test_plans_are_sorted_fit_and_account_for_all_that_was_tried(plans):
    seconds = [e.step_seconds for e in plans]
    assert seconds == sorted(seconds) and all(e.fits for e in plans)
    assert plans.tried == len(plans) + len(plans.rejected) and plans.rejected
    assert all(why.endswith(".") for _, why in plans.rejected)
    assert plans.rank(**{name: getattr(plans[3].layout, name) for name in vars(plans[3].layout)}) == 4
    assert plans.rank(tp=7) is None and plans.table(3).count("\n") == 4


def test_reasons_are_grouped_by_all_but_their_numbers(plans):
    reasons = plans.reasons()
    assert sum(reason.times for reason in reasons) == len(plans.rejected)
    assert [r.times for r in reasons] == sorted((r.times for r in reasons), reverse=True)
    kinds = {reason.kind: reason for reason in reasons}
    assert len(kinds) == len(reasons)
    why = kinds["it needs N GiB of N, most of it for activations."]
    assert why.example in {said for _, said in plans.rejected} and re.fullmatch(
        r"it needs \d+\.\d GiB of 80, most of it for activations\.", why.example
    )
    assert why.times == sum("for activations" in said for _, said in plans.rejected)


def test_pareto_front_is_what_nothing_beats(plans):
    front = plans.pareto()
    assert plans[0].step_seconds == front[-1].step_seconds
    assert min(e.memory_gib for e in plans) == front[0].memory_gib
    for e in plans:
        beaten = [f for f in front if f.memory_gib <= e.memory_gib and f.step_seconds <= e.step_seconds]
        assert beaten and (e not in front or beaten == [e])


def test_layouts_that_do_not_fit_do_not_fit(plans):
    out = [(layout, why) for layout, why in plans.rejected if "GiB" in why]
    for layout, why in out[:: max(1, len(out) // 20)]:
        e = estimate(preset("llama3-8b"), Cluster("H100", 16), layout)
        assert not e.fits and f"{e.memory_gib + 2:.1f} GiB of 80" in why


@given(st.sampled_from((20, 39, 40, 79, 80, 141)), st.sampled_from((1.0, 1.01, 2.0)))
@settings(deadline=None, max_examples=10)
def test_more_memory_never_allows_fewer_layouts(gib, times):
    less, more = (
        {e.layout for e in best(preset("llama2-7b"), Cluster("A100", 8, memory_gib=g), 64)} for g in (gib, gib * times)
    )
    assert less <= more


def test_a_search_tries_in_proportion_to_what_it_is_asked():
    m, cluster = preset("llama2-7b"), Cluster("A100", 8, memory_gib=1e6)
    once = best(m, cluster, 64, zero_stages=(1,), recompute=("none",))
    twice = best(m, cluster, 64, zero_stages=(1, 2), recompute=("none",))
    assert len(twice) == 2 * len(once)


def test_a_search_compares_layouts_with_the_same_kernels():
    plans = best(
        preset("gpt3-13b"), Cluster("A100", 16), 64, zero_stages=iter((1, 3)), recompute=iter(("none", "full"))
    )
    assert {(e.layout.attention, e.layout.logits) for e in plans} == {("flash2", "float32")}
    assert {(e.layout.zero_stage, e.layout.recompute) for e in plans} >= {(1, "full"), (3, "full")}


def test_llama_3_on_16384_gpus():
    plans = best(preset("llama3-405b"), Cluster("H100", 16384), 2048)
    place = plans.rank(tp=8, pp=16, cp=1, dp=128)
    assert place is not None and place <= len(plans) / 100
    theirs = plans[place - 1]
    assert theirs.step_seconds < 1.1 * plans[0].step_seconds


# ---- failures, growth ------------------------------------------------------------------------------------------------


def test_goodput_is_what_a_simulation_finds():
    rng = random.Random(0)
    r = reliability(1000, mtbf_hours=3000, checkpoint_seconds=60, restart_seconds=600)
    mean, useful, clock, wanted = r.seconds_between_failures, 0.0, 0.0, 4000
    assert mean == 3 * 3600
    for _ in range(wanted):  # intervals, each tried until it and its checkpoint are through
        waiting = r.interval + 60
        while (failure := rng.expovariate(1 / mean)) < waiting:
            clock, waiting = clock + failure, r.interval + 60 + 600
        clock, useful = clock + waiting, useful + r.interval
    # Daly restarts each interval with the restart included; so does the loop.
    assert useful / clock == pytest.approx(r.goodput, rel=0.02)
    assert r.goodput + r.lost_to_checkpoints + r.lost_to_failures == pytest.approx(1)


def test_interruptions_are_those_of_llama_3_and_near_those_of_another_run():
    r = reliability(16384)
    assert r.interruptions(54) == pytest.approx(419) and LLAMA3["interruptions"] == 466
    assert r.goodput > 0.9  # "higher than 90% effective training time", section 3.3.4
    # OPT-175B, https://arxiv.org/abs/2205.01068, section 2.5: 992 A100s, two months, "at least 35 manual restarts".
    assert 35 / 1.5 < reliability(992).interruptions(61) < 35 * 1.5


def test_the_best_interval_is_the_best_and_more_gpus_are_useful_for_less():
    r = reliability(16384)
    for times in (0.5, 2):
        assert reliability(16384, interval=times * r.interval).goodput < r.goodput
    for c, gpus in itertools.product((1, 10, 60, 300), (1, 1000, 16384, 131_072, 1_000_000)):  # C / M: 6e-9 to 1.6
        r = reliability(gpus, checkpoint_seconds=c)
        tried = [reliability(gpus, checkpoint_seconds=c, interval=r.interval * k / 100).goodput for k in range(25, 401)]
        assert max(tried) < 1.001 * r.goodput, (c, gpus)
    m = r.seconds_between_failures  # from C = 2 M on, M itself
    assert reliability(1_000_000, checkpoint_seconds=2.1 * m).interval == m
    goodput = [reliability(n).goodput for n in (1, 1000, 10_000, 100_000, 10_000_000)]
    assert goodput == sorted(goodput, reverse=True) and goodput[-1] == pytest.approx(0, abs=1e-3)


def test_growth_of_the_same_batch_is_less_efficient_than_of_a_growing_one():
    m, cluster = preset("llama3-405b"), Cluster("H100", 8192)
    gpus = [8192, 16384, 32768, 65536]
    layout = LLAMA_405B.with_(dp=64)
    same, grown = (grow(m, cluster, layout, gpus, same_batch=same) for same in (True, False))
    assert [s.estimate.layout.dp for s in same] == [64, 128, 256, 512]
    assert [s.estimate.layout.global_batch for s in grown] == [2048, 4096, 8192, 16384]
    efficiency = [s.efficiency for s in same]
    assert efficiency[0] == 1 and efficiency == sorted(efficiency, reverse=True)
    assert all(a.efficiency < b.efficiency for a, b in zip(same[1:], grown[1:]))


def test_growth_starts_where_estimate_is_and_keeps_what_was_not_given():
    m, cluster = preset("llama3-8b"), Cluster("H100", 32)
    for layout in (Layout(tp=4, pp=2, zero_stage=1), Layout(tp=4, pp=2, zero_stage=1, micro_batch=2)):
        alone = estimate(m, cluster, layout)
        batch = alone.layout.global_batch
        same, grown = (grow(m, cluster, layout, [32, "64"], same_batch=same) for same in (True, False))
        assert same[0] == grown[0] and same[0].estimate == alone
        assert [s.estimate.layout.global_batch for s in same] == [batch, batch]
        assert [s.estimate.layout.global_batch for s in grown] == [batch, 2 * batch]
        assert [s.reliability.gpus for s in grown] == [s.estimate.cluster.gpus for s in same] == [32, 64]


def test_two_sites_exchange_four_bytes_a_parameter():
    e = estimate(preset("llama3-405b"), Cluster("H100", 16384), LLAMA_405B)
    s = two_sites(e, gbps=800, round_trip_ms=0)
    assert s.exchange_seconds == pytest.approx(4 * e.model.parameters / 100e9)
    assert s.step_seconds == pytest.approx(e.step_seconds + s.exchange_seconds)
    for loss in (0.01, 0.05, 0.5):
        n = two_sites(e, 800, loss=loss).enough
        assert two_sites(e, 800, every=n).slowdown <= 1 + loss < two_sites(e, 800, every=n - 1).slowdown
    assert two_sites(e, gbps="800", round_trip_ms="50") == two_sites(e, 800)
    assert two_sites(e, gbps=1e6, hidden=True).slowdown == 1


# ---- bad input -------------------------------------------------------------------------------------------------------

M = dict(layers=32, hidden=4096, heads=32, vocab=32000, seq=4096)


def planned(model=None, cluster=None, **layout):
    return estimate(
        Transformer(**M | (model or {})), Cluster(**dict(gpu="H100", gpus=8) | (cluster or {})), Layout(**layout)
    )


@pytest.mark.parametrize(
    "wrong, says",
    [
        (dict(model=dict(layers=0)), "layers must be a whole number of at least 1, and is 0."),
        (dict(model=dict(hidden=-4096)), "hidden must be a whole number of at least 1, and is -4096."),
        (dict(model=dict(seq=2048.5)), "seq must be a whole number of at least 1, and is 2048.5."),
        (dict(model=dict(vocab="many")), "vocab must be a whole number of at least 1, and is 'many'."),
        (dict(model=dict(heads=48)), "hidden must be a multiple of heads, and 4096 is none of 48"),
        (dict(model=dict(kv_heads=5)), "heads must be a multiple of kv_heads, and 32 is none of 5."),
        (dict(model=dict(experts=2, active_experts=3)), "a token cannot visit 3 experts of 2."),
        (dict(cluster=dict(gpu="V100")), "no figures for 'V100'; known are A100, H100"),
        (
            dict(cluster=dict(gpu="H100-40GB")),
            "no figures for a H100 with 40 GB; known are H100-80GB, H100-94GB, H100-96GB.",
        ),
        (dict(cluster=dict(gpu="h100_pcie_80gb")), "'h100_pcie_80gb' is another version than the one listed"),
        (
            dict(cluster=dict(gpu=None)),
            "no figures for None; known are A100, H100, H200, B200, GB200, MI300X, TPU v5p.",
        ),
        (dict(cluster=dict(gpu="TPU v5p 300W")), "no power limit of a TPU v5p is published"),
        (dict(cluster=dict(gpu="H100-900W")), "a H100 cannot be limited to 900 W: its own limit is 700 W."),
        (dict(cluster=dict(gpus=12)), "12 GPUs do not fill nodes of 8"),
        (dict(cluster=dict(gpus=0)), "gpus must be a whole number of at least 1, and is 0."),
        (dict(cluster=dict(oversubscription=0.5)), "oversubscription must be at least 1, and is 0.5."),
        (dict(cluster=dict(internode_gbps_per_gpu=-1)), "internode_gbps_per_gpu must be a number above 0, and is -1."),
        (dict(dp=4, tp=4), "dp x tp x pp x cp = 4 x 4 x 1 x 1 is 16, and the cluster has 8 GPUs."),
        (dict(tp=3), "tp x pp x cp = 3 x 1 x 1 = 3 does not divide the cluster's 8 GPUs."),
        (dict(tp=0), "tp must be a whole number of at least 1, and is 0."),
        (dict(model=dict(heads=4, head_dim=128), tp=8), "heads must be a multiple of tp, and 4 is none of 8."),
        (dict(model=dict(layers=31), pp=8), "31 layers do not divide over 8 pipeline stages"),
        (
            dict(pp=8, virtual_stages=3),
            "32 layers do not divide over 8 stages of 3 parts each; virtual_stages can be 1, 2",
        ),
        (dict(model=dict(seq=4095), cp=2), "seq must be a multiple of cp, and 4095 is none of 2."),
        (dict(ep=2), "experts must be a multiple of ep, and 1 is none of 2."),
        (
            dict(micro_batch=3, global_batch=64),
            "global_batch must be a multiple of dp x micro_batch = 8 x 3, and 64 is none",
        ),
        (dict(dp=4, cp=2, shard=3, zero_stage=3), "dp x cp must be a multiple of shard, and 4 x 2 is none of 3."),
        (dict(shard=4), "shard 4 has no meaning here: zero_stage 0 shards nothing."),
        (
            dict(model=dict(experts=8), ep=8, shard=4, zero_stage=3),
            "shard 4 has no meaning here: experts are sharded over all of dp.",
        ),
        (dict(zero_stage=4), "zero_stage must be 0, 1, 2 or 3, and is 4."),
        (dict(recompute="some"), "recompute must be one of none, selective, full; got 'some'."),
        (dict(precision="fp4"), "precision must be one of bf16, fp16, fp8; got 'fp4'."),
        (dict(attention="fast"), "attention must be one of unfused, flash, flash2; got 'fast'."),
        (dict(cluster=dict(gpu="A100"), precision="fp8"), "precision fp8: no fp8 peak is published for A100"),
    ],
)
def test_bad_input_is_one_sentence_with_the_numbers(wrong, says):
    with pytest.raises(ValueError) as error:
        planned(**wrong)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_other_bad_input():
    with pytest.raises(ValueError, match="there is no model 'gpt5'; known are"):
        preset("gpt5")
    with pytest.raises(ValueError, match="attention is counted full or causal, and not 'half'"):
        preset("llama3-8b").forward_flops("half")
    with pytest.raises(ValueError, match="precision fp8: no fp8 peak is published for A100"):
        best(preset("llama3-8b"), Cluster("A100", 8), 8, precision="fp8")
    with pytest.raises(ValueError, match="gbps must be a number above 0, and is 0"):
        two_sites(planned(), gbps=0)
    with pytest.raises(ValueError, match="mtbf_hours must be a number above 0"):
        reliability(8, mtbf_hours=-1)
    with pytest.raises(ValueError, match="24 GPUs are no multiple of tp x pp x cp = 8 x 2"):
        grow(preset("llama3-8b"), Cluster("H100", 16), Layout(tp=8, pp=2), [24])
    with pytest.raises(ValueError, match="gpus must be a whole number of at least 1, and is 'many'"):
        grow(preset("llama3-8b"), Cluster("H100", 16), Layout(tp=8, pp=2), ["many"])
    with pytest.raises(ValueError, match="32 GPUs do no useful work: one of them fails every 0.11 seconds"):
        grow(preset("llama3-8b"), Cluster("H100", 16), Layout(tp=8, pp=2), [32], mtbf_hours=0.001)


@pytest.mark.parametrize(
    "wrong, says",
    [
        (dict(gbps=0), "gbps must be a number above 0, and is 0."),
        (dict(round_trip_ms=-1e6), "round_trip_ms must be a number of at least 0, and is -1000000.0."),
        (dict(round_trip_ms=math.nan), "round_trip_ms must be a number of at least 0, and is nan."),
        (dict(round_trip_ms="soon"), "round_trip_ms must be a number of at least 0, and is 'soon'."),
        (dict(loss=2), "loss must be a number above 0 and below 1, and is 2."),
        (dict(loss=0), "loss must be a number above 0 and below 1, and is 0."),
        (dict(every=0.5), "every must be a whole number of at least 1, and is 0.5."),
        (dict(one=planned(tp=8)), "each of two sites has half of the data-parallel ranks, and dp 1 is odd."),
    ],
)
def test_two_sites_refuse_what_makes_no_sense(wrong, says):
    with pytest.raises(ValueError) as error:
        two_sites(**{"one": planned(), "gbps": 800} | wrong)
    assert str(error.value) == says


def test_cells_of_a_table_may_be_strings_floats_and_empty():
    as_ints = planned(dict(kv_heads=8, gated=True), dict(gpus_per_node=8), micro_batch=1, global_batch=8, zero_stage=3)
    as_cells = planned(
        dict(kv_heads="8", gated="1", ffn_hidden=""),
        dict(gpus="8", gpus_per_node=8.0, internode_gbps_per_gpu=math.nan),
        micro_batch=1.0,
        global_batch="8",
        zero_stage="3",
        virtual_stages=math.nan,
        dp="8",
    )
    assert as_ints.step_seconds == as_cells.step_seconds and as_ints.memory_gib == as_cells.memory_gib


@pytest.mark.parametrize(
    "name, gib, bandwidth, watts",
    [
        ("A100-40GB", 40, 1.555e12, 400),
        ("a100_40gb", 40, 1.555e12, 400),
        ("A100 40", 40, 1.555e12, 400),
        ("A100-80", 80, 2.039e12, 400),
        ("NVIDIA A100-SXM4-80GB", 80, 2.039e12, 400),
        ("NVIDIA A100-SXM4-40GB", 40, 1.555e12, 400),
        ("H100-SXM", 80, 3.35e12, 700),
        ("h100 80gb", 80, 3.35e12, 700),
        ("NVIDIA H100 80GB HBM3", 80, 3.35e12, 700),
        ("H100 (96 GiB, 500 watts)", 96, 2.4e12, 500),
        ("H100-94GB", 94, 2.4e12, 700),
        ("H200-141GB", 141, 4.8e12, 700),
        ("DGX B200", 180, 7.7e12, 1000),
        ("h100", 80, 3.35e12, 700),
        ("H100-80GB", 80, 3.35e12, 700),
        ("H100-96GB-500W", 96, 2.4e12, 500),
        ("H200 600W", 141, 4.8e12, 600),
        ("GB200", 186, 8e12, 1200),
    ],
)
def test_gpus_by_the_names_that_people_write(name, gib, bandwidth, watts):
    gpu = accelerator(name)
    assert (gpu.memory_bytes / 2**30, gpu.memory_bandwidth, gpu.power_watts) == (gib, bandwidth, watts)


def test_other_memories_have_a_source_and_are_no_second_figure_for_a_chip():
    for memory in specs.MEMORIES:
        assert memory.source and memory.gigabytes * specs.GIB != specs.get(memory.accelerator).memory_bytes
        found = accelerator(f"{memory.accelerator}-{memory.gigabytes}GB")
        assert (found.memory_bytes, found.memory_bandwidth) == (memory.gigabytes * specs.GIB, memory.bandwidth)
        assert found.bf16 == specs.get(memory.accelerator).bf16


def test_nodes_are_the_makers_unless_said_otherwise():
    assert Cluster("GB200", 144).nodes == 2 and Cluster("H100", 144).nodes == 18 and Cluster("H100", 4).nodes == 1
    assert Cluster("A100", 16).network == 25e9 and Cluster("H100", 16, oversubscription=2).network == 25e9


# ---- from outside ----------------------------------------------------------------------------------------------------


def test_the_command_line_prints_what_the_library_finds(capsys):
    words = "--model llama3-405b --gpu h100 --gpus 16384 --tp 8 --pp 16 --seq 8192 --global-batch 2048".split()
    assert main(words) == 0
    layout = Layout(tp=8, pp=16, global_batch=2048, zero_stage=1)
    e = estimate(preset("llama3-405b"), Cluster("h100", 16384), layout)
    assert capsys.readouterr().out == e.table() + "\n"
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_seconds"] == e.step_seconds and found["layout"]["dp"] == 128
    assert sum(found["seconds"].values()) == pytest.approx(found["step_seconds"])


def test_the_command_line_searches_and_says_what_is_wrong(capsys):
    assert main("--model llama2-7b --gpus 8 --global-batch 64 --best".split()) == 0
    out = capsys.readouterr().out
    assert "layouts tried" in out and " 10  " in out
    assert re.search(r"\d+ x it needs \d+\.\d GiB of 80, most of it for \w+\.", out)
    assert main("--model llama3-8b --gpus 64 --zero-stage 3 --shard 8".split()) == 0
    assert "ZeRO 3 in groups of 8" in capsys.readouterr().out
    assert main("--model llama2-7b --gpus 8 --global-batch 64 --best --json".split()) == 0
    assert len(json.loads(capsys.readouterr().out)["best"]) == 10
    assert main("--model llama2-7b --best".split()) == 2
    assert "--best needs --global-batch" in capsys.readouterr().err
    assert main("--gpu V100".split()) == 2
    assert capsys.readouterr().err.startswith("no figures for 'V100'")


@pytest.mark.parametrize(
    "told, wanted",
    [
        ("--tp 4 --recompute full", dict(tp=4, recompute="full")),
        ("--pp 4 --virtual-stages 2 --micro-batch 2", dict(pp=4, virtual_stages=2, micro_batch=2)),
        ("--cp 2 --zero-stage 2", dict(cp=2, zero_stage=2)),
        ("--pp 2 --zero-stage 3", dict(pp=2, zero_stage=3)),
        ("--zero-stage 0 --attention unfused", dict(zero_stage=0, attention="unfused")),
        ("--model mixtral-8x7b --ep 8 --precision fp8", dict(ep=8, precision="fp8")),
    ],
)
def test_a_search_from_the_command_line_keeps_what_it_is_told(told, wanted, capsys):
    assert main(f"--gpus 16 --global-batch 64 --best --json {told}".split()) == 0
    found = json.loads(capsys.readouterr().out)["best"]
    assert found and all(e["layout"] | wanted == e["layout"] for e in found)


def test_a_search_is_the_librarys_and_says_why_nothing_is_left(capsys):
    assert main("--gpus 8 --global-batch 48 --best --tp 4 --micro-batch 3 --recompute full".split()) == 0
    plans = best(preset("llama3-8b"), Cluster("H100", 8), 48, tp=[4], micro_batches=[3], recompute=["full"])
    assert plans and capsys.readouterr().out.startswith(plans.table() + "\n")
    for told, why in (
        ("--pp 1 --virtual-stages 2", "without a pipeline there are no virtual stages, and 2 are asked for."),
        ("--pp 8 --virtual-stages 3", "32 layers do not divide over 8 stages of 3 parts each; virtual_stages can be 1"),
        ("--tp 1 --pp 1 --cp 1 --micro-batch 3", "global_batch must be a multiple of dp x micro_batch = 8 x 3"),
        ("--tp 3", "tp x pp x cp = 3 x 1 x 1 = 3 does not divide the cluster's 8 GPUs."),
    ):
        assert main(f"--gpus 8 --global-batch 64 --best {told}".split()) == 0
        out = capsys.readouterr().out
        assert " 0 fit" in out and f" x {why}" in out
    for told, why in (
        ("--dp 2", "--best takes no --dp: it is what tp, pp and cp leave"),
        ("--shard 2", "--best takes no --shard: groups of shards are not searched"),
        ("--tp x", "tp must be a whole number of at least 1, and is 'x'."),
        ("--zero-stage 4", "zero_stage must be 0, 1, 2 or 3, and is 4."),
    ):
        assert main(f"--gpus 8 --global-batch 64 --best {told}".split()) == 2
        assert capsys.readouterr().err.startswith(why)


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGPIPE")
def test_a_reader_that_has_enough_ends_it_in_silence():
    words = [sys.executable, "-m", "lecture_lib.planner", "--gpus", "8", "--global-batch", "64", "--best"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()  # long before the first line
        assert process.stderr.read() == b"" and process.wait(timeout=60) != 0


def test_planning_loads_neither_torch_nor_scipy():
    code = (
        "import sys, lecture_lib.planner as p; p.estimate(p.preset('llama3-8b'), p.Cluster(), p.Layout(zero_stage=3));"
    )
    code += "print(sorted({'torch', 'jax', 'scipy', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_every_preset_can_be_planned_on_every_gpu():
    for model, gpu in itertools.product(
        PRESETS.values(), ("A100", "H100", "H200", "B200", "GB200", "MI300X", "TPU v5p")
    ):
        e = estimate(model, Cluster(gpu, 8, gpus_per_node=8), Layout(zero_stage=3))
        assert 0.05 < e.mfu < 0.9 and len(complete(model, e.cluster, e.layout)) == 1
