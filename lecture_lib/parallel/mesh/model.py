"""A transformer on a mesh, built from the inside out by parts that each know one axis; and one step of it.

tp                        tensor_parallel splits every layer
cp                        context_parallel lets attention see the tokens of all ranks
pp                        cut makes stages of the layers, a Pipeline runs its table
dp_replicate, dp_shard    DataParallel or FullyShardedDataParallel goes around each stage
"""

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp

from lecture_lib.parallel import pipeline
from lecture_lib.parallel.agree import agree, facts_of
from lecture_lib.parallel.context import context_parallel, shard_sequence
from lecture_lib.parallel.data import DataParallel
from lecture_lib.parallel.mesh import pieces
from lecture_lib.parallel.mesh.axes import Mesh
from lecture_lib.parallel.mesh.dropout import drop, seed_of
from lecture_lib.parallel.mesh.stage import data_parallel
from lecture_lib.parallel.model import Block, Transformer, next_token_loss
from lecture_lib.parallel.recompute import recompute as recompute_in
from lecture_lib.parallel.tensor import parallel_cross_entropy, tensor_parallel
from lecture_lib.parallel.tensor.split import ranks_per_head

SCHEDULES = {
    make.__name__: make
    for make in (
        pipeline.one_f_one_b,
        pipeline.gpipe,
        pipeline.naive,
        pipeline.interleaved,
        pipeline.zero_bubble_h1,
        pipeline.zbv,
        pipeline.dualpipe_v,
    )
}


class ParallelTransformer:
    """A Transformer of lecture_lib.parallel.model on a mesh. It computes what that one computes in one process.

    model:        the same on every rank of the mesh; it is taken apart
    sequence_parallel: with tp, the activations between the tensor-parallel parts are split along the sequence
    schedule:     which table the pipeline runs: one of SCHEDULES
    micro_batches: into how many parts a rank's share of the batch is cut; without a pipeline, their gradients add up
    recompute:    "none", "selective" or "full", see lecture_lib.parallel.recompute
    dropout:      share of what attention and the MLP add that falls out in ``step``; see dropout.py
    compute_dtype: e.g. torch.bfloat16: matmuls in it (autocast); parameters, their gradients and the optimizer stay as
                  they are. What leaves a tensor-parallel part, and what a fully sharded stage gathers and
                  reduce-scatters, travels in this dtype too

    Between stages, and for every part, bytes are as its own docstring says. With m micro-batches:

        DataParallel               gradients travel once a step, whatever m: during the last backward pass, or, with a
                                   pipeline, after all of them
        FullyShardedDataParallel   everything travels m times, 3 (n-1)/n of the stage's bytes each: of a stage only the
                                   layer at work, the next one and the last unit are whole. It trades bytes for memory;
                                   to keep the bytes down, keep m low, or use dp_replicate
        both                       then the pieces' gradients are averaged over dp_replicate once a step

    Raises ValueError, the same on every rank, for arguments that differ between ranks, layers that the stages cannot
    share equally, heads or sizes that tp cannot share, an unknown schedule, and a schedule that splits the backward
    pass (zero_bubble_h1, zbv, dualpipe_v) together with dp_shard or recomputation.
    """

    def __init__(
        self,
        model: Transformer,
        mesh: Mesh,
        *,
        sequence_parallel: bool = False,
        schedule: str = "one_f_one_b",
        micro_batches: int = 1,
        recompute: str = "none",
        dropout: float = 0.0,
        compute_dtype: torch.dtype | None = None,
    ):
        self.mesh, self.micro_batches, self.sequence_parallel = mesh, micro_batches, sequence_parallel
        options = [f"{sequence_parallel=}", f"{schedule=}", f"{micro_batches=}", f"{recompute=}", f"{compute_dtype=}"]
        problem = self._problem(len(model.blocks), schedule, recompute, dropout)
        agree("ParallelTransformer", [*options, f"{dropout=}", *facts_of(model)], problem=problem)

        if mesh.size["tp"] > 1:
            attention = model.blocks[0].attention
            kv_heads = attention.key.out_features // attention.head_dim
            replicas = mesh.neighbours("tp", ranks_per_head("ParallelTransformer", kv_heads, mesh.size["tp"]))
            tensor_parallel(model, mesh.group("tp"), sequence_parallel, replicas=replicas)
        if mesh.size["cp"] > 1:
            context_parallel(model, mesh.group("cp"))
        for block in model.blocks:
            if dropout:
                drop(block, dropout)
            recompute_in(block, recompute)

        table = SCHEDULES[schedule](mesh.size["pp"], micro_batches)
        rank_of = table.rank_of if mesh.size["pp"] > 1 else (0,)  # the rank along pp that holds each stage
        # As many blocks in each; what comes before the first and after the last goes with them.
        stages = pipeline.cut(model.layers(), len(rank_of), [isinstance(layer, Block) for layer in model.layers()])
        first = {p: rank_of[number] for number, stage in reversed([*enumerate(stages)]) for p in stage.parameters()}
        self.pipe = None
        self.stages = dict(enumerate(stages))  # those of this rank, by their number
        if mesh.size["pp"] > 1:
            self.pipe = pipeline.Pipeline(stages, table, self._loss_of, group=mesh.group("pp"))
            self.stages = self.pipe.stages

        shapes = {p: p.shape for stage in self.stages.values() for p in stage.parameters()}
        owned = {p for p in shapes if first[p] == mesh.place["pp"]}  # not those that an earlier stage holds too
        for number, stage in self.stages.items():
            self.stages[number] = data_parallel(stage, mesh, compute_dtype)
        self.pieces = pieces.pieces_of(model, mesh, shapes, owned)  # by the names of the one-process model

    def _problem(self, layers: int, schedule: str, recompute: str, dropout: float) -> str | None:
        """What is wrong with the arguments, as the end of a sentence that begins with "rank 2"."""
        if schedule not in SCHEDULES:
            return f"asked for a schedule {schedule!r}; there are {', '.join(SCHEDULES)}."
        if self.micro_batches < 1:
            return f"asked for {self.micro_batches} micro-batches; there must be at least 1."
        if not 0 <= dropout < 1:
            return f"asked for dropout {dropout}; it is a share, 0 or more and less than 1."
        if (pp := self.mesh.size["pp"]) == 1:
            return None
        table = SCHEDULES[schedule](pp, self.micro_batches)
        if layers % table.stages:
            near = max(1, round(layers / table.stages)) * table.stages
            return (
                f"brought {layers} layers, which {table.stages} stages (pp={pp}, {schedule}) cannot share "
                f"equally; {near} layers would do."
            )
        splits = any(action.kind == "I" for row in table.rows for action in row)
        if splits and (self.mesh.size["dp_shard"] > 1 or recompute != "none"):
            what = "dp_shard" if self.mesh.size["dp_shard"] > 1 else f"recompute={recompute!r}"
            return f"asked for {schedule} with {what}; a backward pass in two halves needs whole layers that are kept."
        return None

    def parameters(self) -> list[nn.Parameter]:
        """This rank's pieces, for an optimizer that updates each element on its own (SGD, Adam, ...)."""
        return [piece.parameter for piece in self.pieces.values()]

    @property
    def stage_ranks(self) -> list[int]:
        """The ranks that hold a part of what this rank holds a part of: those at its place along pp."""
        return self.mesh.ranks_along("dp_replicate", "dp_shard", "cp", "tp")

    # ---- one step ----------------------------------------------------------------------------------------------------

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward: adds the gradient of the batch's mean loss to every .grad.

        tokens, targets: int64 (batch, seq), the whole batch, the same on every rank; each computes its share.
        Returns the mean loss over the batch in nats, (), on every rank.

        Raises ValueError, on every rank, for a batch that the ranks and micro-batches cannot share equally.
        """
        tokens, targets = self.share(tokens), self.share(targets)
        if self.pipe is None:
            loss = self._accumulate(tokens, targets)
        else:
            with contextlib.ExitStack() as stack:
                for stage in self._data_parallel_stages():
                    stack.enter_context(stage.no_sync())
                loss = self.pipe.step(tokens, targets)
        for stage in self._data_parallel_stages():
            stage.finish_gradient_synchronization()
        return self._mean_loss(loss)

    def _accumulate(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Without a pipeline: the micro-batches one after the other; gradients travel during the last backward pass."""
        stage, total = self.stages[0], torch.zeros((), device=tokens.device)
        parts = list(zip(tokens.chunk(self.micro_batches), targets.chunk(self.micro_batches)))
        for i, (x, y) in enumerate(parts):
            stays = isinstance(stage, DataParallel) and i < len(parts) - 1
            with stage.no_sync() if stays else contextlib.nullcontext():
                loss = self._loss_of(stage(x), y) / len(parts)
                loss.backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss alone, without dropout, otherwise as ``step``."""
        tokens, targets = self.share(tokens), self.share(targets)
        for stage in self.stages.values():
            stage.eval()
        if self.pipe is None:
            loss = self._loss_of(self.stages[0](tokens), targets)
        else:
            loss = self.pipe.evaluate(tokens, targets)
        for stage in self.stages.values():
            stage.train()
        return self._mean_loss(loss)

    def share(self, whole: Tensor) -> Tensor:
        """This rank's part of (batch, seq): some samples, along dp; of these, some tokens, along cp."""
        size, place = self.mesh.size, self.mesh.place
        parts = size["dp_replicate"] * size["dp_shard"]
        if len(whole) == 0 or len(whole) % (parts * self.micro_batches):
            raise ValueError(
                f"a batch of {len(whole)} samples cannot be shared equally by dp_replicate {size['dp_replicate']} x "
                f"dp_shard {size['dp_shard']} ranks with {self.micro_batches} micro-batches each; take a multiple of "
                f"{parts * self.micro_batches}."
            )
        samples = whole.chunk(parts)[place["dp_replicate"] * size["dp_shard"] + place["dp_shard"]]
        return samples if size["cp"] == 1 else shard_sequence(samples, group=self.mesh.group("cp"))

    def _loss_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean over this rank's tokens. logits: (batch, seq, vocab / tp)"""
        if self.mesh.size["tp"] > 1:
            return parallel_cross_entropy(logits, targets, self.mesh.group("tp"))
        return next_token_loss(logits.float(), targets)

    def _mean_loss(self, loss: Tensor | None) -> Tensor:
        """From the last stage, where each rank has the mean over its tokens, to all: their mean over the ranks that
        share the batch. Ranks along tp have the same loss; a mean over them too would be harmless, a sum would not.

        An all-reduce of 4 bytes, and a broadcast of 4 along pp.
        """
        batch = "dp_replicate", "dp_shard", "cp"
        if loss is not None:
            loss = loss.detach().float()
            if self.mesh.count(*batch) > 1:
                dist.all_reduce(loss, ReduceOp.AVG, self.mesh.group(*batch))
        if self.pipe is None:
            return loss
        loss = torch.empty((), device=self.parameters()[0].device) if loss is None else loss
        dist.broadcast(loss, group=self.mesh.group("pp"), group_src=self.pipe.schedule.rank_of[-1])
        return loss

    def _data_parallel_stages(self) -> list[DataParallel]:
        return [stage for stage in self.stages.values() if isinstance(stage, DataParallel)]

    def seed_dropout(self, *numbers: int) -> None:
        """Before a step: this rank's random numbers follow from ``numbers``, such as a seed and the step, and from its
        place in the mesh where that matters. A resumed run drops what it would have dropped."""
        torch.manual_seed(seed_of(self.mesh, self.sequence_parallel, *numbers))

    # ---- over the mesh -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their ``global_norm`` is at most ``max_norm``. The norm before, ()."""
        norm = pieces.global_norm(self.pieces.values(), self.mesh)
        torch.nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, norm)
        return norm

    def full_state_dict(self) -> dict[str, Tensor]:
        """The parameters of the one-process model, whole; see ``lecture_lib.parallel.mesh.full_state_dict``."""
        return pieces.full_state_dict(self.pieces, self.mesh)
