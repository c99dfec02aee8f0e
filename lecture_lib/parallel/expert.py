"""A mixture of experts, on one process, and with the experts split over ranks: the same layer and two all-to-alls.

An MLP that is E times as large need not be E times as slow, if each token uses only k of its E parts, the experts. A
router chooses which (Shazeer et al. 2017, Outrageously Large Neural Networks, section 2):

    p = softmax(x W)                                    the router's probabilities, one for each expert
    y = sum of p_e expert_e(x) over the k largest p_e

Split over n ranks, each rank has its own tokens, as in data parallelism, and E / n of the experts. So tokens travel to
their experts, and back (Lepikhin et al. 2020, GShard, section 3.2):

    route      which experts does each token want? A token is copied k times
    dispatch   all-to-all: first the counts, so that everybody knows how much will come, then the copies
    compute    each rank runs its experts on all that arrived
    combine    all-to-all, back; each token adds up its k results

    expert_parallel(model, group)                       the experts of each MoE in the model, split over the ranks
    loss = next_token_loss(model(x), y)                 x, y: this rank's share of the batch
    (loss + 0.01 * balance_of(model)).backward()
    average_gradients(model, group)
"""

import math
import numbers
from fractions import Fraction

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp

from lecture_lib.parallel.agree import agree, broadcast_from_first, facts_of, several_devices


class MoE(nn.Module):
    """A mixture of SwiGLU experts, in the place of one SwiGLU: (..., hidden) -> (..., hidden)

        block.mlp = MoE(hidden, ffn_hidden, experts=8, top_k=2)

    renormalize:      a token's k weights sum to 1 (as in GShard). With k = 1 pass False: the weight would always be 1,
                      and the router would learn from ``balance`` alone
    capacity_factor:  None drops nothing. Else an expert takes at most ceil(factor * k T / E) of the copies that a rank
                      brings for its T tokens: first choices first, and of these the earlier tokens. What is dropped
                      adds nothing to y (Fedus et al. 2021, Switch Transformer, section 2.2; rank by rank, as the local
                      groups of GShard, section 2.2: one process drops the same if it takes each rank's tokens alone)

    After each forward():  ``balance``   (), the load-balancing loss
                           ``wanted``    int64 (E,), copies of this rank's tokens by expert, dropped ones too
                           ``arrived``   int64 (n, E / n), copies for this rank's experts, by rank of origin and expert

    Bytes that a rank sends if all experts are wanted equally, S = k T hidden x bytes of a number, counts of 8 bytes:

        forward    2 (n-1)/n S, the copies and their results; (n-1)/n 8 E, their counts; 2 (n-1)/n 8 E, for ``balance``
        backward   2 (n-1)/n S

    In general, for the first S: the copies that leave this rank; for the second: those that it computed for others.

    ``torch.utils.checkpoint`` with use_reentrant=True runs forward() without gradients: ``balance`` then is a number
    that the router does not learn from. Use use_reentrant=False.

    Raises ValueError for a top_k or capacity_factor that cannot be.
    """

    def __init__(
        self,
        hidden: int,
        ffn_hidden: int,
        experts: int,
        top_k: int = 2,
        *,
        renormalize: bool = True,
        capacity_factor: float | None = None,
    ):
        super().__init__()
        if not isinstance(top_k, numbers.Integral) or not 1 <= top_k <= experts:
            raise ValueError(f"MoE: a token cannot use {top_k} of {experts} experts; top_k has to be 1 to {experts}.")
        if capacity_factor is not None and not 0 < capacity_factor < math.inf:  # nan is neither
            raise ValueError(f"MoE: capacity_factor={capacity_factor} has to be above 0, or None to drop nothing.")
        self.top_k, self.renormalize, self.capacity_factor = top_k, renormalize, capacity_factor
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = Experts(hidden, ffn_hidden, experts)
        self.group, self.n = None, 1  # one process, until expert_parallel() says which ranks, and how many

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])  # (T, hidden)
        copies, weights, counts = self.route(tokens)
        token = copies % len(tokens)  # (copies,), of which token each is one
        rows, arrived = self.dispatch(tokens[token], counts)
        rows = self.combine(self.compute(rows, arrived), arrived, counts)  # (copies, hidden)
        y = rows.new_zeros(tokens.shape).index_add(0, token, rows * weights.to(rows.dtype))  # (T, hidden)
        return y.view(x.shape)

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """tokens: (T, hidden) -> the copies that travel, by expert, (copies,); their weights, (copies, 1); how many for
        each expert, (E,). Copy number i is that of token i % T for its choice i // T."""
        with torch.autocast(tokens.device.type, enabled=False):  # in float32: Switch Transformer, section 2.4
            wide = torch.promote_types(tokens.dtype, torch.float32)
            p = F.linear(tokens.to(wide), self.router.weight.to(wide)).softmax(-1)  # (T, E)
        weights, choices = p.topk(self.top_k)  # (T, k) each, the best first
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        expert, copies = choices.T.flatten().sort(stable=True)  # (k T,) each: within an expert, first choices first
        self.wanted = counts = expert.bincount(minlength=p.shape[1])  # (E,)
        self.balance = self.balance_loss(p, counts)
        if self.capacity_factor is not None:
            capacity = math.ceil(Fraction(str(self.capacity_factor)) * len(copies) / len(counts))
            capacity = min(capacity, len(copies))  # as much as can come
            first = counts.cumsum(0) - counts  # (E,): where the queue of each expert begins
            place = torch.arange(len(copies), device=copies.device) - first[expert]  # in its queue
            copies, counts = copies[place < capacity], counts.clamp(max=capacity)
        return copies, weights.T.flatten()[copies, None], counts

    def balance_loss(self, p: Tensor, counts: Tensor) -> Tensor:
        """E sum_e f_e P_e: f_e the share of all copies that want expert e, P_e the mean of p_e over all tokens.

        1 if the router treats all alike, more if the experts that it prefers are those that it chooses (Switch
        Transformer, section 2.2, equations 4 to 6, for k = 1). It is linear in P. So only the counts have to be those
        of all ranks, and the ranks' losses, each from its own p, average to that of the whole batch.
        """
        if self.n > 1:
            counts = counts.clone()
            dist.all_reduce(counts, group=self.group)
        copies = counts.sum().clamp(min=1)  # k for each token of all ranks
        f = counts.to(p.dtype) / copies  # (E,)
        P = self.n * self.top_k * p.sum(0) / copies  # (E,); averaged over the ranks it is the mean over all tokens
        return len(f) * (f * P).sum()

    def dispatch(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """rows: (copies, hidden), by expert -> what arrives, by rank of origin and expert; and how many, (n, E/n)"""
        counts = counts.view(self.n, -1)  # (n, E/n): rank r has experts r E/n to (r+1) E/n - 1
        self.arrived = all_to_all(counts, [1] * self.n, [1] * self.n, self.group)
        return all_to_all(rows, rows_by_rank(counts), rows_by_rank(self.arrived), self.group), self.arrived

    def compute(self, rows: Tensor, arrived: Tensor) -> Tensor:
        """Each of this rank's experts on its rows, from whichever rank; the results in the order of the rows."""
        pieces = list(rows.split(arrived.flatten().tolist()))  # n x E/n of (some, hidden)
        own = arrived.shape[1]
        results = self.experts([torch.cat(pieces[e::own]) for e in range(own)])
        for e, result in enumerate(results):
            pieces[e::own] = result.split(arrived[:, e].tolist())
        return torch.cat(pieces)

    def combine(self, rows: Tensor, arrived: Tensor, counts: Tensor) -> Tensor:
        """Results go back where the rows came from, and are there in the order in which the rows had left."""
        return all_to_all(rows, rows_by_rank(arrived), rows_by_rank(counts.view(self.n, -1)), self.group)

    def __getstate__(self) -> dict:  # a copy of the layer has no last forward()
        return {name: value for name, value in vars(self).items() if name not in ("balance", "wanted", "arrived")}


class Experts(nn.Module):
    """E MLPs, down(silu(gate x) * up x), as three stacks of matrices: expert e is the e-th of each."""

    def __init__(self, hidden: int, ffn_hidden: int, experts: int):
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, ffn_hidden, hidden))
        self.up = nn.Parameter(torch.empty(experts, ffn_hidden, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, ffn_hidden))
        for stack in (self.gate, self.up, self.down):
            nn.init.uniform_(stack, -(stack.shape[-1] ** -0.5), stack.shape[-1] ** -0.5)  # as nn.Linear does

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:  # for each expert (rows, hidden) -> (rows, hidden)
        matrices = zip(inputs, self.gate, self.up, self.down, strict=True)
        return [F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down) for x, gate, up, down in matrices]


# ---- the move --------------------------------------------------------------------------------------------------------


def all_to_all(x: Tensor, sends: list[int], receives: list[int], group: ProcessGroup | None = None) -> Tensor:
    """The first sends[0] rows of x go to rank 0, the next sends[1] to rank 1, ...; receives[r] rows come from rank r.

    x: (sum(sends), ...) -> (sum(receives), ...), in the order of the ranks. Backward: all-to-all, back. Bytes: those of
    the rows for other ranks, in the backward pass of those from other ranks. sends[r] on this rank has to be what rank
    r has in its ``receives`` for this one.
    """
    return x if len(sends) == 1 else _AllToAll.apply(x, sends, receives, group)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sends, receives, group):
        ctx.back = receives, sends, group
        y = x.new_empty(sum(receives), *x.shape[1:])
        dist.all_to_all_single(y, x.contiguous(), receives, sends, group=group)
        return y

    @staticmethod
    def backward(ctx, grad):
        return _AllToAll.apply(grad, *ctx.back), None, None, None


def rows_by_rank(counts: Tensor) -> list[int]:
    return counts.sum(1).tolist()  # (n, E/n) -> n numbers


# ---- a whole model ---------------------------------------------------------------------------------------------------


def expert_parallel(model: nn.Module, group: ProcessGroup | None = None) -> nn.Module:
    """Split the experts of every MoE in the model: rank r of n keeps the r-th n-th. Changes the model and returns it.

    All else stays on every rank, with the values of the group's first rank, and so do the experts. Takes the tokens of
    this rank, of any number. An optimizer is made afterwards, from the new parameters.

    Raises ValueError, the same on every rank and before the model is changed, if the ranks bring models that differ, or
    cannot share the experts equally.
    """
    layers = {name: part for name, part in model.named_modules() if isinstance(part, MoE)}
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    problem = several_devices(model.named_parameters())
    if not layers:
        problem = "brought a model without an MoE; there are no experts to split."
    options = []
    for name, moe in layers.items():
        experts, name = len(moe.experts.gate), name or "the layer"
        options.append(f"{name}: top_k={moe.top_k}, renormalize={moe.renormalize}, capacity={moe.capacity_factor}")
        if moe.n > 1:
            problem = "brought a model that is split already; start from the model of one process."
        elif experts % n:
            problem = (
                f"has {experts} experts in {name}, which {n} ranks cannot share equally; take fewer "
                f"ranks, or a multiple of {n}, such as {experts + -experts % n}."
            )
    agree("expert_parallel", [*facts_of(model), *options], group, problem)
    broadcast_from_first([*model.parameters(), *model.buffers()], group)
    for moe in layers.values():
        moe.group, moe.n = group, n
        moe.experts.group = group
        moe.experts.sharded = {"gate": 0, "up": 0, "down": 0}  # for tensor.gather_full_state_dict, the way back
        for name, whole in list(moe.experts.named_parameters()):
            own = whole.detach().chunk(n)[rank].clone()
            setattr(moe.experts, name, nn.Parameter(own, requires_grad=whole.requires_grad))
    return model


def balance_of(model: nn.Module) -> Tensor:
    """The sum of the load-balancing losses of all MoE layers, as of the last forward(); to be scaled and added to the
    loss: 0.01 in Switch Transformer, section 2.2."""
    return sum(part.balance for part in model.modules() if isinstance(part, MoE))


def average_gradients(
    model: nn.Module, group: ProcessGroup | None = None, replicas: ProcessGroup | None = None
) -> None:
    """After the last backward() of a step: every .grad becomes that of the mean of the ranks' losses.

    What all ranks hold, and have used, is averaged over them: 2 (n-1)/n bytes for each byte. An expert is on one rank,
    and through the all-to-alls it already has the gradient of every rank's loss: their sum. Divided by n, that is the
    mean, and nothing is sent. If several groups of ranks have split the same experts, ``group`` is all of them together
    and n their number; ``replicas`` are the ranks that hold the same experts as this one, and are summed over first.
    """
    split = {p for part in model.modules() if isinstance(part, MoE) and part.n > 1 for p in part.experts.parameters()}
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        if parameter not in split:
            dist.all_reduce(parameter.grad, op=ReduceOp.AVG, group=group)
        else:
            if replicas is not None:
                dist.all_reduce(parameter.grad, group=replicas)
            parameter.grad /= dist.get_world_size(group)
