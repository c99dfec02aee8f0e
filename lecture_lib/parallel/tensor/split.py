"""A whole model over ranks, from its one-process definition, and back.

Attention is split by heads, the MLP by its inner features, embedding, head and loss by vocabulary. Each layer has two
parts that all ranks share, with one move into each and one out of it (Shoeybi et al. 2019, Megatron-LM, figure 4):

    x + leave(attention(enter(norm(x))))         enter, leave:  copy, all-reduce
    x + leave(mlp(enter(norm(x))))               with sequence parallelism:  all-gather, reduce-scatter

An all-reduce is a reduce-scatter and an all-gather. Sequence parallelism puts the norm and the residual between these
two, where each rank has only its slice of the sequence: the same bytes, and n times fewer activations there
(Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models, section 4.2.2). What the
all-gather brings is kept for the backward pass here; Megatron-LM keeps the slice, and gathers it a second time.
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lecture_lib.parallel.agree import agree, facts_of, several_devices
from lecture_lib.parallel.model import Attention, SwiGLU
from lecture_lib.parallel.tensor.linear import (
    ColumnParallelLinear,
    ColumnShard,
    RowParallelLinear,
    Values,
    from_first_rank,
    shard_of,
    share_equally,
    values_of_first_rank,
)
from lecture_lib.parallel.tensor.moves import copy_to_group, gather_from_group, gather_to_group
from lecture_lib.parallel.tensor.vocabulary import ParallelEmbedding

SEQUENCE = 1  # the dimension of (batch, seq, hidden) that sequence parallelism splits


class ParallelAttention(Attention):
    """Attention split by heads: each rank has heads / n query heads, and the key and value heads that these use.

    One move in for query, key and value together, and one out: 2(n-1)/n S forward and as much backward, S the bytes of
    x. If n is a multiple of the key and value heads, n / kv_heads neighbouring ranks hold the same one, and sum the
    gradients of its weights; ``replicas`` is their group, made here if it is not given.

    Raises ValueError, the same on every rank, if the ranks cannot share the heads, or bring layers that differ.
    """

    def __init__(
        self,
        attention: Attention,
        group: ProcessGroup | None = None,
        *,
        sequence_dim: int | None = None,
        replicas: ProcessGroup | None = None,
        values: Values | None = None,
    ):
        nn.Module.__init__(self)
        values = values or values_of_first_rank(
            "ParallelAttention", attention, Attention, group, sequence_dim=sequence_dim
        )
        heads = attention.query.out_features // attention.head_dim
        share_equally("ParallelAttention", heads, "query heads", dist.get_world_size(group))
        replicas = replicas or ranks_that_share(attention, group)
        self.group, self.sequence_dim, self.head_dim = group, sequence_dim, attention.head_dim
        self.query = ColumnShard(attention.query, group, values=values)
        self.key = ColumnShard(attention.key, group, replicas, values)
        self.value = ColumnShard(attention.value, group, replicas, values)
        self.output = RowParallelLinear(attention.output, group, sequence_dim=sequence_dim, values=values)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(enter(x, self.group, self.sequence_dim))


class ParallelSwiGLU(SwiGLU):
    """The MLP split by its inner features: one move in for gate and up together, one out.

    2(n-1)/n S forward and as much backward, for the S bytes of x.
    """

    def __init__(
        self,
        mlp: SwiGLU,
        group: ProcessGroup | None = None,
        *,
        sequence_dim: int | None = None,
        values: Values | None = None,
    ):
        nn.Module.__init__(self)
        values = values or values_of_first_rank("ParallelSwiGLU", mlp, SwiGLU, group, sequence_dim=sequence_dim)
        self.group, self.sequence_dim = group, sequence_dim
        self.gate = ColumnShard(mlp.gate, group, values=values)
        self.up = ColumnShard(mlp.up, group, values=values)
        self.down = RowParallelLinear(mlp.down, group, sequence_dim=sequence_dim, values=values)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(enter(x, self.group, self.sequence_dim))


class SequenceParallelNorm(nn.RMSNorm):
    """RMSNorm of this rank's slice of the sequence. It needs no other rank, but its weight is the same on all.

    Each rank's gradient of the weight is that of its own positions. The sum over the ranks is what ``copy_to_group``
    does on the way back: an all-reduce of ``hidden`` numbers.
    """

    def __init__(self, norm: nn.RMSNorm, group: ProcessGroup | None = None, values: Values | None = None):
        super().__init__(norm.normalized_shape, norm.eps, device="meta")
        values = values or values_of_first_rank("SequenceParallelNorm", norm, nn.RMSNorm, group)
        self.group = group
        self.weight = shard_of(norm.weight, values, 0, 1, 0)  # (hidden,) on every rank

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq / n, hidden) -> the same
        return F.rms_norm(x, self.normalized_shape, copy_to_group(self.weight, self.group), self.eps)


def enter(x: Tensor, group: ProcessGroup | None, sequence_dim: int | None) -> Tensor:
    """Into a part that the ranks share: all of x, (batch, seq, hidden), on every rank."""
    return copy_to_group(x, group) if sequence_dim is None else gather_to_group(x, sequence_dim, group)


def ranks_per_head(who: str, kv_heads: int, n: int) -> int:
    """How many neighbours of n ranks use the same key and value head. Raises ValueError if n ranks cannot share the
    heads equally."""
    if kv_heads % n and n % kv_heads:
        raise ValueError(
            f"{who}: {kv_heads} key and value heads cannot be shared equally by {n} ranks, nor can the "
            "ranks by the heads; one number must be a multiple of the other."
        )
    return max(1, n // kv_heads)


def ranks_that_share(attention: Attention, group: ProcessGroup | None = None) -> ProcessGroup | None:
    """The ranks of the group that hold the same key and value head as this one. None: each rank has its own.

    All ranks of ``group`` call this together. Raises ValueError if the heads cannot be shared.
    """
    n = dist.get_world_size(group)
    copies = ranks_per_head("ParallelAttention", attention.key.out_features // attention.head_dim, n)
    if copies in (1, n):
        return None if copies == 1 else group or dist.group.WORLD
    first = dist.get_rank(group) // copies * copies
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)[first : first + copies]
    return dist.new_group(ranks, use_local_synchronization=True)


# ---- a whole model ---------------------------------------------------------------------------------------------------


def tensor_parallel(
    model: nn.Module,
    group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    *,
    replicas: ProcessGroup | None = None,
) -> nn.Module:
    """Split a Transformer or a deep MLP of lecture_lib.parallel.model over the ranks. Changes the model and returns it.

    Names stay; each rank's parameters are its shards of those of the group's first rank, which come in one broadcast:
    all ranks but the last send the bytes of all parameters. ``gather_full_state_dict`` is the way back. An optimizer is
    made afterwards, from the new parameters.

    replicas: the neighbouring ranks that hold the same key and value head as this one, where there are more ranks than
    heads: ``Mesh.neighbours``. If it is not given, a group is made for this model, and torch keeps it to the end.

    Transformer: takes the same tokens on all ranks, int64 (batch, seq), and gives this rank's logits, (batch, seq,
    vocab / n), for ``parallel_cross_entropy``; ``gather_from_group(logits, -1)`` are all of them. With
    ``sequence_parallel`` the ranks have to share seq equally. Bytes that a rank sends in a step of L layers, S = batch
    x seq x hidden x bytes of a number:

        each layer            forward 2, backward 2      (4L + 2) x 2(n-1)/n S in all, as 4L + 2 all-reduces
        embedding             forward 1
        head                             backward 1
        parallel_cross_entropy, batch x seq targets      2(n-1)/n x 3 batch x seq x 4, as 2 all-reduces

        with sequence_parallel, the same bytes as 4L + 2 all-gathers and 4L + 2 reduce-scatters of (n-1)/n S each,
        and 2L + 1 all-reduces of the gradients of the norms: 2(n-1)/n x hidden x bytes of a number each
        if r ranks share a key and value head: 2L all-reduces, 2(r-1)/r x hidden x head_dim x bytes of a number each

    Deep MLP, an nn.Sequential of linear layers with elementwise functions between them: columns and rows in turn. Takes
    the same x on all ranks, and gives the same y. S = bytes of x, all layers as wide as x:

        row layers, L/2          forward 1        2(n-1)/n S each, as all-reduces
        column layers, L/2       backward 1       2(n-1)/n S each, as all-reduces; the first only if x needs a gradient
        with an odd L the last is a column layer; its output is all-gathered: (n-1)/n S

    Raises ValueError, the same on every rank and before the model is changed, if the ranks bring models that differ,
    cannot share a size equally, or if the model has parameters in other kinds of layers.
    """
    values = agree_on_model("tensor_parallel", model, group, f"sequence_parallel={sequence_parallel}")
    parts: dict[str, nn.Module] = {}
    if isinstance(model, nn.Sequential):
        if sequence_parallel:
            raise ValueError("tensor_parallel: an MLP has no sequence to split; leave out sequence_parallel.")
        linears = {name: part for name, part in model.named_children() if isinstance(part, nn.Linear)}
        for i, (name, linear) in enumerate(linears.items()):
            if i % 2:
                parts[name] = RowParallelLinear(linear, group, values=values)
            else:  # the last one is gathered if no row layer follows
                last = i == len(linears) - 1
                parts[name] = ColumnParallelLinear(linear, group, gather_output=last, values=values)
        return replace(model, parts, "tensor_parallel")

    dim = SEQUENCE if sequence_parallel else None
    for name, part in model.named_modules():
        if isinstance(part, nn.Embedding):
            parts[name] = ParallelEmbedding(part, group, sequence_dim=dim, values=values)
        elif isinstance(part, Attention):
            replicas = replicas or ranks_that_share(part, group)  # one group for all layers
            parts[name] = ParallelAttention(part, group, sequence_dim=dim, replicas=replicas, values=values)
        elif isinstance(part, SwiGLU):
            parts[name] = ParallelSwiGLU(part, group, sequence_dim=dim, values=values)
        elif isinstance(part, nn.RMSNorm):
            parts[name] = SequenceParallelNorm(part, group, values) if sequence_parallel else replicated(part, values)
        elif name == "head":
            parts[name] = ColumnParallelLinear(part, group, sequence_dim=dim, values=values)
    if {"embedding", "head"} <= parts.keys() and model.head.weight is model.embedding.weight:
        parts["head"].weight = parts["embedding"].weight  # tied: both have the same rows of the vocabulary
    return replace(model, parts, "tensor_parallel")


def all_gather_mlp(mlp: nn.Sequential, group: ProcessGroup | None = None) -> nn.Sequential:
    """The lecture's version of a deep MLP: every matrix split by columns, the activations brought together each time.

    L layers, all as wide as x, S bytes in x: forward L all-gathers, (n-1)/n S each. Backward L - 1 reduce-scatters, as
    much each, and an all-reduce of 2(n-1)/n S if x needs a gradient. Changes the model, and returns it. Raises
    ValueError as ``tensor_parallel`` does.
    """
    values = agree_on_model("all_gather_mlp", mlp, group)
    linears = {name: part for name, part in mlp.named_children() if isinstance(part, nn.Linear)}
    parts: dict[str, nn.Module] = {}
    for i, (name, linear) in enumerate(linears.items()):
        last = i == len(linears) - 1
        parts[name] = ColumnParallelLinear(linear, group, gather_input=i > 0, gather_output=last, values=values)
    return replace(mlp, parts, "all_gather_mlp")


def agree_on_model(who: str, model: nn.Module, group: ProcessGroup | None, *options: str) -> Values:
    """What the first rank of the group has, as ``values_of_first_rank``; of a model that is not split yet."""
    problem = several_devices(model.named_parameters())
    if any(hasattr(part, "sharded") for part in model.modules()):
        problem = "brought a model that is split already; start from the model of one process."
    agree(who, [*options, *facts_of(model)], group, problem)
    return from_first_rank(model, group)


def replicated(part: nn.Module, values: Values) -> nn.Module:
    """The same layer on all ranks, with the parameters of the first one."""
    copied = copy.deepcopy(part)
    for parameter, own in zip(copied.parameters(), part.parameters(), strict=True):
        parameter.data = values[own]
    return copied


def replace(model: nn.Module, parts: dict[str, nn.Module], who: str) -> nn.Module:
    """The model with these parts, by name. Raises ValueError if it has parameters elsewhere: they would be left."""
    for name, parameter in model.named_parameters():
        if not name.startswith(tuple(f"{part}." for part in parts)):
            raise ValueError(
                f"{who}: {name} of shape {tuple(parameter.shape)} is in a kind of layer that it cannot split; build "
                "that model from ColumnParallelLinear, RowParallelLinear and ParallelEmbedding."
            )
    for name, part in parts.items():
        model.set_submodule(name, part)
    return model


# ---- and back --------------------------------------------------------------------------------------------------------


def gather_full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """The state_dict of the model of one process, on every rank: it loads into the bare module.

    All ranks call this together. (n-1)/n S for the S bytes of all that is split.
    """
    return {name: whole(module, name, tensor.detach()) for name, tensor in module.state_dict(keep_vars=True).items()}


def gather_full_gradients(module: nn.Module) -> dict[str, Tensor]:
    """The gradients of the model of one process, by the same names, of the parameters that have one."""
    tensors = module.state_dict(keep_vars=True).items()
    return {name: whole(module, name, tensor.grad) for name, tensor in tensors if tensor.grad is not None}


def whole(module: nn.Module, name: str, own: Tensor) -> Tensor:
    """All of the parameter of that name, of which this rank has ``own``."""
    path, _, name = name.rpartition(".")
    part = module.get_submodule(path)
    if name not in getattr(part, "sharded", {}):
        return own.clone()
    return joined(own, part.sharded[name], part.group, getattr(part, "copies", 1))


def joined(own: Tensor, dim: int, group: ProcessGroup | None, copies: int = 1) -> Tensor:
    """All of a tensor, of which each rank has a slice along ``dim``, and ``copies`` neighbours have the same one."""
    slices = gather_from_group(own, dim, group).chunk(dist.get_world_size(group), dim)
    return torch.cat(slices[::copies], dim)
