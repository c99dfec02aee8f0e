"""How a model is spread over a cluster: the axes of parallelism, the batch, and what is kept or computed again.

    dp   data          each has a part of the batch
    tp   tensor        each has a part of every matrix
    pp   pipeline      each has a part of the layers
    cp   context       each has a part of every sequence
    ep   expert        each has a part of the experts; inside dp

dp x tp x pp x cp is the number of GPUs. Neighbouring ranks are neighbours in tp first, then cp, then dp, then pp, so
that the axis that talks most stays inside a node (Narayanan et al., 2021, section 3; Llama 3, section 3.3.2).
"""

import functools
from dataclasses import dataclass, replace

from lecture_lib.planner.cluster import Cluster
from lecture_lib.planner.model import Transformer
from lecture_lib.planner.numbers import missing, whole

RECOMPUTE = ("none", "selective", "full")
PRECISIONS = ("bf16", "fp16", "fp8")
ATTENTION = ("unfused", "flash", "flash2")
LOGITS = ("float32", "bf16")


@dataclass(frozen=True)
class Layout:
    """Axes, batch and policies. What is None is chosen by ``complete``.

    dp: what the other axes leave.
    virtual_stages: parts of the model that each pipeline stage holds, interleaved; the fastest, if None.
    micro_batch: sequences that go through the model together; the fastest that fits, if None.
    global_batch: sequences of one step, of all ranks; if None, one micro-batch for each data-parallel rank and stage.
    zero_stage: 0 everything replicated over dp x cp, 1 the optimizer's states sharded, 2 gradients too, 3 parameters
        too (FSDP). With a pipeline, 3 gathers parameters once a step and keeps them and gradients whole until its end,
        or every micro-batch would pay for both: in time and memory it is then as 1. So do torchtitan and Llama 3.
    shard: among how many of the dp x cp ranks ZeRO shards, neighbours first; all, if None. Groups of so many hold the
        same, and sum their gradients once a step: hybrid sharding, HSDP (Zhao et al., PyTorch FSDP, 2023,
        https://arxiv.org/abs/2304.11277, section 3.2.2).
    recompute: what the backward pass computes again: "none", "selective" or "full", see memory.py.
    precision: of the matmuls in the layers: "bf16", "fp16" or "fp8".
    overlap: whether data-parallel traffic runs beside the computation.
    attention: the kernel: "unfused" (scores go to memory), "flash" (FlashAttention of 2022), "flash2" (of 2023). If
        None, what runs of this kind used when they were published: "flash2" with a gated MLP (Llama and later); else
        "flash" under ZeRO 3 (MosaicML), and without it "unfused" on an A100 (Megatron-LM of 2021 and 2022).
    logits: what the loss is computed in: "float32" (a copy, as in torchtitan and Megatron-LM) or "bf16", which takes
        less memory; if None, "bf16" with "flash" attention (MosaicML).
    sequence_parallel: norms and residuals are split over tp as well. If None: with tp > 1; but Megatron-LM had it only
        together with selective recomputation, so not with unfused attention and "full".

    Raises ValueError for sizes that are not whole and positive and for policies that do not exist.
    """

    dp: int | None = None
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    virtual_stages: int | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    zero_stage: int = 0
    shard: int | None = None
    recompute: str = "none"
    precision: str = "bf16"
    overlap: bool = True
    attention: str | None = None
    logits: str | None = None
    sequence_parallel: bool | None = None

    def __post_init__(self):
        put = functools.partial(object.__setattr__, self)
        for name in ("dp", "shard", "virtual_stages", "micro_batch", "global_batch"):
            value = getattr(self, name)
            put(name, None if missing(value) else whole(name, value))
        for name in ("tp", "pp", "cp", "ep"):
            put(name, whole(name, getattr(self, name)))
        put("zero_stage", whole("zero_stage", self.zero_stage, least=0))
        if self.zero_stage > 3:
            raise ValueError(f"zero_stage must be 0, 1, 2 or 3, and is {self.zero_stage}.")
        for name in ("attention", "logits"):
            put(name, None if missing(getattr(self, name)) else getattr(self, name))
        policies = {"recompute": RECOMPUTE, "precision": PRECISIONS}
        policies |= {"attention": (*ATTENTION, None), "logits": (*LOGITS, None)}
        for name, known in policies.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(filter(None, known))}; got {getattr(self, name)!r}."
                )

    def with_(self, **changes) -> "Layout":
        """The same with some changes."""
        return replace(self, **changes)

    def _chosen(self, virtual_stages: int, micro_batch: int) -> "Layout":
        """The same with these, which are whole already: a search makes thousands."""
        copy = object.__new__(Layout)
        copy.__dict__.update(self.__dict__, virtual_stages=virtual_stages, micro_batch=micro_batch)
        return copy

    @property
    def gathers_layers(self) -> bool:
        """Whether parameters are gathered layer by layer, and thrown away after use."""
        return self.zero_stage == 3 and self.pp == 1

    @property
    def shards(self) -> int:
        """How many pieces ZeRO makes of what it shards."""
        return self.shard or self.dp * self.cp

    @property
    def replicas(self) -> int:
        """How many groups hold the same shards."""
        return self.dp * self.cp // self.shards

    @property
    def ranks(self) -> int:
        """dp tp pp cp"""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def micro_batches(self) -> int:
        """That go through each pipeline in one step."""
        return self.global_batch // (self.dp * self.micro_batch)

    def axes(self) -> str:
        """ "dp 128, tp 8, pp 16", without axes of 1; and the batch and the policies."""
        axes = [f"{name} {n}" for name in ("dp", "tp", "pp", "cp", "ep") if (n := getattr(self, name)) not in (1, None)]
        axes += [f"virtual stages {self.virtual_stages}"] * (self.pp > 1 and self.virtual_stages is not None)
        axes += [f"micro-batch {self.micro_batch}"] * (self.micro_batch is not None)
        zero = f"ZeRO {self.zero_stage}" + (f" in groups of {self.shard}" if self.shard else "")
        return ", ".join([*axes, zero, f"recompute {self.recompute}", self.precision])


@functools.cache
def layers_of_a_stage(model: Transformer, pp: int, virtual_stages: int) -> int | None:
    """Layers of the fullest stage, or None if they cannot be dealt out.

    Either they divide evenly, or two more would; then the first part of the model has the embedding, and the last the
    head, in place of a layer: Llama 3 has 126 layers for 16 stages of 8 parts (section 3.3.2).
    """
    if model.layers % (pp * virtual_stages) == 0:
        return model.layers // pp
    if pp > 1 and (model.layers + 2) % (pp * virtual_stages) == 0:
        return (model.layers + 2) // pp
    return None


@functools.cache
def virtual_stages(model: Transformer, pp: int) -> tuple[int, ...]:
    """How many parts a stage can hold, all possibilities; empty if there are none."""
    most = (model.layers + 2) // pp
    return tuple(v for v in range(1, most + 1) if layers_of_a_stage(model, pp, v)) if pp > 1 else (1,)


def parameters_of_a_rank(model: Transformer, layout: Layout) -> tuple[float, float, float]:
    """Before anything is sharded over data: of one layer without its experts, of its experts, of embedding or head."""
    experts = model.experts * model.mlp_parameters / layout.tp if model.experts > 1 else 0.0
    dense = model.layer_parameters / layout.tp - experts
    return dense, experts / layout.ep, model.vocab * model.hidden / layout.tp


def attention_kernel(model: Transformer, cluster: Cluster, layout: Layout) -> str:
    """What ``Layout.attention`` None stands for."""
    if model.gated:
        return "flash2"
    if layout.zero_stage == 3:
        return "flash"
    return "unfused" if cluster.accelerator.name == "A100" else "flash2"


def check(model: Transformer, cluster: Cluster, layout: Layout) -> None:
    """Raises ValueError for a layout that cannot run: one sentence with the numbers."""
    if layout.ranks != cluster.gpus:
        raise ValueError(
            f"dp x tp x pp x cp = {layout.dp} x {layout.tp} x {layout.pp} x {layout.cp} is {layout.ranks}, and the "
            f"cluster has {cluster.gpus} GPUs."
        )
    pieces = (
        ("heads", model.heads, "tp", layout.tp),
        ("ffn_hidden", model.ffn_hidden, "tp", layout.tp),
        ("seq", model.seq, "cp", layout.cp),
        ("experts", model.experts, "ep", layout.ep),
        ("dp", layout.dp, "ep", layout.ep),
    )
    for what, size, axis, n in pieces:
        if size % n:
            raise ValueError(f"{what} must be a multiple of {axis}, and {size} is none of {n}.")
    if layout.shard and (layout.dp * layout.cp) % layout.shard:
        raise ValueError(
            f"dp x cp must be a multiple of shard, and {layout.dp} x {layout.cp} is none of {layout.shard}."
        )
    if layout.shard and (layout.zero_stage == 0 or layout.ep > 1):
        with_what = "zero_stage 0 shards nothing" if layout.zero_stage == 0 else "experts are sharded over all of dp"
        raise ValueError(f"shard {layout.shard} has no meaning here: {with_what}.")
    if model.kv_heads % layout.tp and layout.tp % model.kv_heads:
        raise ValueError(
            f"{model.kv_heads} key/value heads can neither be split nor copied evenly over tp {layout.tp}."
        )
    if not virtual_stages(model, layout.pp):
        raise ValueError(
            f"{model.layers} layers do not divide over {layout.pp} pipeline stages, nor do they with two more for "
            f"embedding and head; choose pp so that one of the two does."
        )
    if layout.virtual_stages is not None and not layers_of_a_stage(model, layout.pp, layout.virtual_stages):
        raise ValueError(
            f"{model.layers} layers do not divide over {layout.pp} stages of {layout.virtual_stages} parts each; "
            f"virtual_stages can be {', '.join(map(str, virtual_stages(model, layout.pp)))}."
        )
    if layout.global_batch is not None and layout.global_batch % (layout.dp * (layout.micro_batch or 1)):
        raise ValueError(
            f"global_batch must be a multiple of dp x micro_batch = {layout.dp} x {layout.micro_batch or 1}, and "
            f"{layout.global_batch} is none of {layout.dp * (layout.micro_batch or 1)}."
        )
    try:
        cluster.accelerator.peak(layout.precision)
    except ValueError as error:
        raise ValueError(f"precision {layout.precision}: {error}") from None


def complete(model: Transformer, cluster: Cluster, layout: Layout) -> list[Layout]:
    """The layouts that ``layout`` can mean: one, unless it leaves virtual_stages or micro_batch open.

    Raises ValueError for a layout that cannot run.
    """
    changes = {}
    if layout.dp is None:
        others = layout.tp * layout.pp * layout.cp
        if cluster.gpus % others:
            raise ValueError(
                f"tp x pp x cp = {layout.tp} x {layout.pp} x {layout.cp} = {others} does not divide the cluster's "
                f"{cluster.gpus} GPUs."
            )
        changes["dp"] = cluster.gpus // others
    if layout.attention is None:
        changes["attention"] = attention_kernel(model, cluster, layout)
    kernel = changes.get("attention", layout.attention)
    if layout.logits is None:
        changes["logits"] = "bf16" if kernel == "flash" else "float32"
    if layout.sequence_parallel is None:
        changes["sequence_parallel"] = layout.tp > 1 and not (kernel == "unfused" and layout.recompute == "full")
    layout = layout.with_(**changes) if changes else layout
    check(model, cluster, layout)
    if layout.global_batch is None:
        layout = layout.with_(micro_batch=layout.micro_batch or 1)
        layout = layout.with_(global_batch=layout.dp * layout.pp * layout.micro_batch)
    parts, batches = (layout.virtual_stages,), (layout.micro_batch,)
    if layout.virtual_stages is None:
        parts = virtual_stages(model, layout.pp)
    if layout.micro_batch is None:
        each = layout.global_batch // layout.dp
        batches = tuple(b for b in (1, 2, 4, 8, 16, 32, 64) if each % b == 0)
    return [layout._chosen(v, b) for v in parts for b in batches]
