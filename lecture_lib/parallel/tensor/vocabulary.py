"""The two ends of a language model, split by vocabulary: the embedding, and the loss over the logits.

Both have one row of weights for each token, and both can be used without bringing the rows, or the logits, together
(Shoeybi et al. 2019, Megatron-LM, section 3). The loss needs three numbers a token from other ranks, not ``vocab``.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lecture_lib.parallel.tensor.linear import Values, shard_of, share_equally, values_of_first_rank
from lecture_lib.parallel.tensor.moves import reduce_from_group, reduce_scatter_from_group


class ParallelEmbedding(nn.Module):
    """An embedding split by vocabulary: each rank looks up the tokens whose rows it has, zeros for the others, and the
    sum over the ranks is the embedding.

    int64 (...,), the same on all ranks -> (..., hidden), S bytes: all of it on every rank, 2(n-1)/n S forward, nothing
    backward; or, with sequence_dim, this rank's slice along that dimension, (n-1)/n S forward, as much backward.

    Raises ValueError, the same on every rank, if the ranks cannot share the vocabulary equally, bring embeddings that
    differ, or one with padding_idx, max_norm, scale_grad_by_freq or sparse.
    """

    sharded = {"weight": 0}

    def __init__(
        self,
        embedding: nn.Embedding,
        group: ProcessGroup | None = None,
        *,
        sequence_dim: int | None = None,
        values: Values | None = None,
    ):
        super().__init__()
        values = values or values_of_first_rank(
            "ParallelEmbedding", embedding, nn.Embedding, group, sequence_dim=sequence_dim
        )
        for option in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse"):
            if (value := getattr(embedding, option)) is not None and value is not False:
                raise ValueError(f"ParallelEmbedding: {option} of nn.Embedding is not supported; make one without.")
        n, rank = dist.get_world_size(group), dist.get_rank(group)
        share_equally("ParallelEmbedding", embedding.num_embeddings, "rows of the vocabulary", n)
        self.group, self.sequence_dim = group, sequence_dim
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.weight = shard_of(embedding.weight, values, 0, n, rank)  # (vocab / n, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        index, elsewhere = own_rows("ParallelEmbedding", tokens, self.weight.shape[0], self.group)
        rows = F.embedding(index, self.weight).masked_fill(elsewhere[..., None], 0)  # (..., hidden)
        if self.sequence_dim is None:
            return reduce_from_group(rows, self.group)
        return reduce_scatter_from_group(rows, self.sequence_dim, self.group)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]} of {self.num_embeddings} tokens, {self.embedding_dim}"


def parallel_cross_entropy(
    logits: Tensor, targets: Tensor, group: ProcessGroup | None = None, ignore_index: int = -100
) -> Tensor:
    """``F.cross_entropy`` in nats, mean over the targets that are not ``ignore_index``, of logits split by vocabulary.

    logits: (..., vocab / n), this rank's; targets: int64 (...,), the same on all ranks -> (), the same on all ranks.
    16-bit logits are computed in float32, as autocast does.

        loss = log sum_j exp(l_j - m) - (l_target - m),    m = max_j l_j

    Two all-reduces, whatever the vocabulary: the maximum, and the sum with the target's logit. For T targets that is
    2(n-1)/n of 3 T numbers forward and nothing backward: each rank has the gradient of its own logits. To gather the
    logits would take (n-1)/n of vocab T. Raises ValueError for a target outside the vocabulary.
    """
    kept = targets != ignore_index
    index, elsewhere = own_rows("parallel_cross_entropy", targets.masked_fill(~kept, 0), logits.shape[-1], group)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    with torch.no_grad():  # the loss does not depend on what is subtracted
        highest = logits.amax(-1)  # (...,)
        if dist.get_world_size(group) > 1:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group)
    logits = logits - highest[..., None]  # no exp can overflow
    target = logits.gather(-1, index[..., None]).squeeze(-1).masked_fill(elsewhere, 0)  # (...,)
    total, target = reduce_from_group(torch.stack((logits.exp().sum(-1), target)), group)  # (2, ...)
    return (total.log() - target).masked_fill(~kept, 0).sum() / kept.sum()


def own_rows(who: str, tokens: Tensor, rows: int, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Where each token is in this rank's ``rows`` of the vocabulary, and which tokens are not there (they say 0).

    A token that no rank has raises ValueError on a CPU. On a GPU, looking would stop the program until the GPU is done;
    there the index stays outside this rank's rows, and the GPU reports it when it is used.
    """
    vocab = rows * dist.get_world_size(group)
    exists = (tokens >= 0) & (tokens < vocab)
    if tokens.device.type == "cpu" and not exists.all():
        raise ValueError(f"{who}: token {tokens[~exists][0]} is not in the vocabulary, 0 to {vocab - 1}.")
    index = tokens - rows * dist.get_rank(group)
    elsewhere = (index < 0) | (index >= rows)
    return index.masked_fill(elsewhere & exists, 0), elsewhere
