"""The mixture of experts against a loop over tokens, and on 1 to 4 ranks against one process; and its exact bytes."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from comparing import counts, difference, error_of, gradients, relative, seeded
from torch import nn

from lecture_lib.parallel import data, expert
from lecture_lib.parallel.context import context_parallel, shard_sequence
from lecture_lib.parallel.expert import MoE, all_to_all, average_gradients, balance_of, expert_parallel
from lecture_lib.parallel.model import Transformer, next_token_loss
from lecture_lib.parallel.tensor import gather_full_gradients, gather_full_state_dict
from lecture_lib.trace import ledger

CLOSE = 1e-5  # largest difference over largest value, float32
HIDDEN, FFN, EXPERTS = 16, 24, 12


def layer(seed=0, top_k=2, **options):
    return seeded(seed, lambda: MoE(HIDDEN, FFN, EXPERTS, top_k, **options))


def tokens_of(*shape, seed=1):
    return seeded(seed, lambda: torch.randn(*shape, HIDDEN))


def average(x, group=None):
    x = x.detach().clone()
    dist.all_reduce(x, dist.ReduceOp.AVG, group)
    return x


# ---- one process -----------------------------------------------------------------------------------------------------


def by_the_formula(moe, x):
    """What the docstrings say, one token and one expert at a time: y, balance, and how many copies each expert took."""
    p = F.linear(x, moe.router.weight).softmax(-1)
    T, E = p.shape
    best = p.argsort(-1, descending=True)[:, : moe.top_k]  # (T, k)
    capacity = T * moe.top_k
    if moe.capacity_factor is not None:
        capacity = math.ceil(moe.capacity_factor * moe.top_k * T / E)
    taken, wanted, y = [0] * E, [0] * E, list(torch.zeros_like(x))
    for choice in range(moe.top_k):
        for t in range(T):
            e = best[t, choice].item()
            wanted[e] += 1
            if taken[e] < capacity:
                taken[e] += 1
                weight = p[t, e] / (p[t, best[t]].sum() if moe.renormalize else 1)
                gate, up, down = (stack[e] for stack in (moe.experts.gate, moe.experts.up, moe.experts.down))
                y[t] = y[t] + weight * (down @ (F.silu(gate @ x[t]) * (up @ x[t])))
    f = torch.tensor(wanted) / (moe.top_k * T)
    return torch.stack(y), E * (f * p.mean(0)).sum(), wanted, taken


@pytest.mark.parametrize(
    "top_k, options",
    [
        (1, {"renormalize": False}),
        (2, {}),
        (3, {"renormalize": False}),
        (12, {}),
        (1, {"renormalize": False, "capacity_factor": 1.0}),
        (2, {"capacity_factor": 0.7}),
        (2, {"capacity_factor": 1.0}),
        (2, {"capacity_factor": 1e300}),
    ],
)
def test_one_process_is_the_formula(top_k, options):
    moe, x = layer(top_k=top_k, **options), tokens_of(20)
    theirs, balance, wanted, taken = by_the_formula(moe, x)
    (theirs.sin().sum() + balance).backward()
    expected = gradients(moe)
    moe.zero_grad(set_to_none=True)
    y = moe(x.view(5, 4, HIDDEN))
    (y.sin().sum() + moe.balance).backward()
    assert y.shape == (5, 4, HIDDEN) and difference(y.view(20, HIDDEN), theirs) < CLOSE
    assert difference(moe.balance, balance) < CLOSE and relative(gradients(moe), expected) < CLOSE
    assert moe.wanted.tolist() == wanted and moe.arrived.tolist() == [taken]
    if moe.capacity_factor is not None and moe.capacity_factor < 2:
        assert sum(taken) < sum(wanted)  # some were dropped, or this shows nothing


def test_balance_is_1_when_balanced_and_grows_when_not():
    moe = layer(top_k=1, renormalize=False)
    x = torch.eye(HIDDEN)[:EXPERTS].repeat(3, 1)
    with torch.no_grad():
        moe.router.weight.copy_(1e-4 * torch.eye(EXPERTS, HIDDEN))  # each expert has its own tokens, by a hair
        moe(x)
        assert moe.wanted.tolist() == [3] * EXPERTS and moe.balance.item() == pytest.approx(1, abs=1e-6)
        moe.router.weight.zero_()[5] = 100.0  # all want one, with all their probability
        moe(x)
        assert moe.wanted.tolist() == [0] * 5 + [36] + [0] * 6 and moe.balance.item() == pytest.approx(EXPERTS)


def test_the_balance_loss_balances():
    """Training on the load-balancing loss alone evens out a router that prefers a few experts."""
    moe, x = layer(top_k=2), tokens_of(128)
    with torch.no_grad():
        moe.router.weight[0] = moe.router.weight[0] + 0.3
        x = x + 0.5
    busiest = []
    for _ in range(25):
        moe.route(x)
        busiest.append(moe.wanted.max().item() / moe.wanted.float().mean().item())
        gradient = torch.autograd.grad(moe.balance, moe.router.weight)[0]
        with torch.no_grad():
            moe.router.weight -= gradient
    assert busiest[0] > 2.5 and busiest[-1] < 1.7, busiest


def test_autocast_routes_in_float32():
    moe, x = layer(), tokens_of(32)
    moe(x)
    wanted = moe.wanted
    with torch.autocast("cpu", torch.bfloat16):
        y = moe(x)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and moe.balance.dtype == torch.float32
    assert torch.equal(moe.wanted, wanted) and moe.router.weight.grad.dtype == torch.float32


def test_a_copy_can_be_made_after_a_forward_pass():
    moe, x = layer(), tokens_of(4)
    y = moe(x)
    assert torch.equal(copy.deepcopy(moe)(x), y)


# ---- split over ranks ------------------------------------------------------------------------------------------------


def check_split(top_k, options):
    """Experts over all ranks, other tokens on each, built from different seeds, against the layer of one process."""
    n, rank = dist.get_world_size(), dist.get_rank()
    one, x = layer(0, top_k, **options), tokens_of(12, 5)
    shares = x.chunk(n)
    theirs = one(x)
    balance, wanted = one.balance, one.wanted
    if "capacity_factor" in options:  # what is dropped depends on the rank's share, the balance does not
        theirs = torch.cat([one(share) for share in shares])
    (theirs.sin().mean() + 0.5 * balance).backward()
    ours = expert_parallel(layer(rank, top_k, **options))
    own = shares[rank].clone().requires_grad_()
    y = ours(own)
    (y.sin().mean() + 0.5 * ours.balance).backward()
    average_gradients(ours)
    assert ours.experts.gate.shape == (EXPERTS // n, FFN, HIDDEN) and ours.arrived.shape == (n, EXPERTS // n)
    total = ours.wanted.clone()
    dist.all_reduce(total)
    assert torch.equal(total, wanted) and (own.grad != 0).any()
    return {
        "y": difference(y, theirs.chunk(n)[rank]),
        "balance": difference(average(ours.balance), balance.detach()),
        "gradients": relative(gather_full_gradients(ours), gradients(one)),
        "values": relative(gather_full_state_dict(ours), one.state_dict()),
    }


@pytest.mark.parametrize(
    "top_k, options",
    [(1, {"renormalize": False}), (2, {}), (3, {"renormalize": False}), (2, {"capacity_factor": 0.8})],
)
def test_split_over_ranks_equals_one_process(sized, top_k, options):
    for found in sized.run(check_split, top_k, options):
        assert all(value < CLOSE for value in found.values()), found


def test_ranks_may_have_different_numbers_of_tokens_or_none(world):
    def step():
        rank = dist.get_rank()
        sizes = [7, 0, 3, 12]
        one, x = layer(), tokens_of(sum(sizes))
        ours = expert_parallel(layer(rank))
        own = x.split(sizes)[rank]
        y, theirs = ours(own), one(x)
        (y.sum() + ours.balance).backward()
        (theirs.sum() / 4 + one.balance).backward()  # the mean of the ranks' sums
        average_gradients(ours)
        close = torch.allclose(y, theirs.split(sizes)[rank], atol=1e-6)
        return (
            close,
            difference(average(ours.balance), one.balance.detach()),
            relative(gather_full_gradients(ours), gradients(one)),
        )

    for close, balance, grads in world.run(step):
        assert close and balance < CLOSE and grads < CLOSE


def test_a_hot_expert_makes_a_hot_rank(world):
    """All tokens want expert 4, and then 5: rank 1 of 4 has both."""

    def step():
        moe = expert_parallel(layer())
        x = tokens_of(6).abs()
        with torch.no_grad():
            moe.router.weight.zero_()
            moe.router.weight[4], moe.router.weight[5] = 2.0, 1.0
        with ledger() as led:
            moe(x)
        sent = [call.bytes_sent for call in led.calls if call.name == "all_to_all_single"]
        return moe.wanted.tolist(), moe.arrived.tolist(), sent

    row = 4 * HIDDEN
    for rank, (wanted, arrived, sent) in enumerate(world.run(step)):
        assert wanted == [0, 0, 0, 0, 6, 6] + [0] * 6
        assert arrived == ([[0, 6, 6]] * 4 if rank == 1 else [[0, 0, 0]] * 4)
        hot = rank == 1  # it sends no copies, and all the results
        assert sent == [3 * 3 * 8, 0 if hot else 12 * row, 36 * row if hot else 0]


def test_with_a_capacity_the_hot_expert_takes_no_more_than_that(world):
    def step():
        moe, x = expert_parallel(layer(capacity_factor=1.0)), tokens_of(6).abs()
        with torch.no_grad():
            moe.router.weight.zero_()
            moe.router.weight[4], moe.router.weight[5] = 2.0, 1.0
            y = moe(x)
        return moe.arrived.sum().item(), (y != 0).any(1).tolist()

    for rank, (arrived, kept) in enumerate(world.run(step)):
        assert arrived == (4 * 2 if rank == 1 else 0)  # ceil(2 x 6 / 12) = 1 of each rank for each of the two
        assert kept == [True] + [False] * 5  # the first token came first, both times


# ---- bytes -----------------------------------------------------------------------------------------------------------


def moved(balanced):
    moe = expert_parallel(layer())
    T, x = 2 * EXPERTS, tokens_of(2 * EXPERTS, seed=dist.get_rank())
    if balanced:  # token t wants experts t and t + 1
        x = torch.eye(EXPERTS, HIDDEN).repeat(2, 1)
        with torch.no_grad():
            eye = torch.eye(EXPERTS, HIDDEN)
            moe.router.weight.copy_(2 * eye + eye.roll(1, 0))
    x.requires_grad_()
    with ledger() as forward:
        y = moe(x)
    with ledger() as backward:
        y.sum().backward()
    found = [counts(led) for led in (forward, backward)]
    return T, moe.wanted, moe.arrived, found


def test_bytes_are_those_of_the_docstring(sized):
    n, E = sized.size, EXPERTS
    for T, wanted, _, (forward, backward) in sized.run(moved, True):
        if n == 1:
            assert not forward and not backward
            continue
        assert wanted.tolist() == [2 * T // E] * E
        S = 2 * T * HIDDEN * 4
        counts = (n - 1) * 8 * E // n
        assert forward == {"all_reduce": (1, 2 * counts), "all_to_all_single": (3, (n - 1) * 2 * S // n + counts)}
        assert backward == {"all_to_all_single": (2, (n - 1) * 2 * S // n)}
    for rank, (T, wanted, arrived, (forward, backward)) in enumerate(sized.run(moved, False)):
        if n == 1:
            continue
        assert wanted.sum() == 2 * T
        leave = wanted.sum() - wanted.view(n, -1)[rank].sum()
        for_others = arrived.sum() - arrived[rank].sum()
        rows = (leave + for_others).item() * HIDDEN * 4
        assert forward["all_to_all_single"] == (3, rows + (n - 1) * 8 * E // n)
        assert backward == {"all_to_all_single": (2, rows)}


def test_average_gradients_sends_only_what_all_ranks_hold(world):
    def step():
        moe = expert_parallel(layer())
        moe(tokens_of(4)).sum().backward()
        with ledger() as led:
            average_gradients(moe)
        return [(call.name, call.bytes_sent) for call in led.calls]

    assert world.run(step) == [[("all_reduce", 2 * 3 * EXPERTS * HIDDEN * 4 // 4)]] * 4


# ---- the move --------------------------------------------------------------------------------------------------------


def test_all_to_all_and_its_derivatives(sized):
    def step():
        n, rank = dist.get_world_size(), dist.get_rank()
        sends = [(rank + to) % 3 for to in range(n)]
        receives = [(at + rank) % 3 for at in range(n)]
        x = torch.arange(sum(sends), dtype=torch.float64)[:, None] + 10 * rank
        x.requires_grad_()
        y = all_to_all(x, sends, receives)
        first = [sum((at + to) % 3 for to in range(rank)) + 10 * at for at in range(n)]
        expected = [first[at] + i for at in range(n) for i in range(receives[at])]
        grad = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)[0]
        second = torch.autograd.grad(grad.sum(), x)[0]
        return y.flatten().tolist() == expected and torch.equal(grad, 3 * x**2) and torch.equal(second, 6 * x)

    assert sized.run(step) == [True] * sized.size


# ---- a whole model ---------------------------------------------------------------------------------------------------

SIZES = dict(layers=2, hidden=HIDDEN, heads=4, kv_heads=2, ffn_hidden=FFN, vocab=40)


def sparse_transformer(seed=0):
    """The transformer of every chapter, with a mixture of experts in the place of each MLP."""
    model = seeded(seed, lambda: Transformer(**SIZES))
    for i, block in enumerate(model.blocks):
        block.mlp = layer(100 * seed + i)
    return model


def batch(rows=12, seq=16):
    text = seeded(7, lambda: torch.randint(SIZES["vocab"], (rows, seq + 1)))
    return text[:, :-1], text[:, 1:]


def train(model, tokens, targets, finish, steps=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = next_token_loss(model(tokens), targets) + 0.01 * balance_of(model)
        loss.backward()
        finish(model)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def check_transformer():
    n, rank = dist.get_world_size(), dist.get_rank()
    one, (tokens, targets) = sparse_transformer(), batch()
    theirs = train(one, tokens, targets, lambda model: None)
    ours = expert_parallel(sparse_transformer(rank))
    losses = train(ours, tokens.chunk(n)[rank], targets.chunk(n)[rank], average_gradients)
    return difference(average(losses), theirs), relative(gather_full_state_dict(ours), one.state_dict())


def test_a_transformer_of_experts_trains_as_on_one_process(sized):
    for losses, parameters in sized.run(check_transformer):
        assert losses < CLOSE and parameters < 1e-4


def test_experts_and_context_over_the_same_ranks(world):
    """Each rank has a part of every sequence and a part of the experts."""

    def step():
        one, (tokens, targets) = sparse_transformer(), batch()
        theirs = train(one, tokens, targets, lambda model: None)
        ours = expert_parallel(context_parallel(sparse_transformer(dist.get_rank())))
        losses = train(ours, shard_sequence(tokens), shard_sequence(targets), average_gradients)
        return difference(average(losses), theirs), relative(gather_full_state_dict(ours), one.state_dict())

    for losses, parameters in world.run(step):
        assert losses < CLOSE and parameters < 1e-4


def test_two_groups_with_the_same_experts(world):
    """A 2 x 2 mesh: experts split within each pair, and every expert on two ranks, which sum its gradients."""

    def step():
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "expert"))
        group, replicas, rank = mesh.get_group("expert"), mesh.get_group("replica"), dist.get_rank()
        one, x = layer(), tokens_of(12, 5)
        ours = expert_parallel(layer(), group)
        one(x).sin().mean().backward()
        with ledger() as led:
            ours(x.chunk(4)[rank]).sin().mean().backward()
        assert {call.group for call in led.calls} == {tuple(dist.get_process_group_ranks(group))}
        average_gradients(ours, None, replicas)
        return relative(gather_full_gradients(ours), gradients(one))

    assert all(value < CLOSE for value in world.run(step))


# ---- bad input -------------------------------------------------------------------------------------------------------


def rank_two(right, wrong):
    return wrong if dist.get_rank() == 2 else right


def with_experts(experts):
    return nn.Sequential(MoE(HIDDEN, FFN, experts))


MISTAKES = [
    (lambda: MoE(HIDDEN, FFN, 4, 5), "MoE: a token cannot use 5 of 4 experts; top_k has to be 1 to 4."),
    (
        lambda: MoE(HIDDEN, FFN, 4, capacity_factor=0),
        "capacity_factor=0 has to be above 0, or None to drop nothing.",
    ),
    (
        lambda: expert_parallel(with_experts(10)),
        "expert_parallel: rank 0 has 10 experts in 0, which 4 ranks cannot share equally; take fewer ranks, or a "
        "multiple of 4, such as 12.",
    ),
    (
        lambda: expert_parallel(with_experts(rank_two(8, 12))),
        "expert_parallel: the ranks disagree: rank 2 brought 0.router.weight of shape (12, 16), float32; rank 0",
    ),
    (lambda: expert_parallel(layer(top_k=rank_two(2, 3))), "rank 2 brought the layer: top_k=3, renormalize=True, capa"),
    (lambda: MoE(HIDDEN, FFN, 4, 1.5), "MoE: a token cannot use 1.5 of 4 experts; top_k has to be 1 to 4."),
    (lambda: MoE(HIDDEN, FFN, 4, capacity_factor=math.nan), "capacity_factor=nan has to be above 0, or None"),
    (lambda: MoE(HIDDEN, FFN, 4, capacity_factor=math.inf), "capacity_factor=inf has to be above 0, or None"),
    (
        lambda: data.average_gradients(expert_parallel(nn.Sequential(layer()))),
        "average_gradients: every rank brought 0.experts, of which ranks 0, 1, 2, 3 hold different slices; give a "
        "group of ranks that hold the same slices, such as the data-parallel axis of a mesh (for experts use lecture_",
    ),
    (lambda: expert_parallel(nn.Linear(2, 2)), "brought a model without an MoE; there are no experts to split."),
    (lambda: expert_parallel(expert_parallel(layer())), "brought a model that is split already; start from the model"),
]


def messages_of(mistakes):
    """What each of them raised, or None. No rank may be left waiting, so all can be made one after the other."""
    return [error_of(mistake) for mistake in mistakes]


def test_a_mistake_is_one_clear_error_on_every_rank(world):
    outs = world.run(messages_of, [mistake for mistake, _ in MISTAKES])
    for (_, says), *messages in zip(MISTAKES, *outs, strict=True):
        assert messages[0] and says in messages[0] and "\n" not in messages[0], (says, messages[0])
        assert messages[0].startswith("ValueError: ") and len(set(messages)) == 1, messages


def test_a_model_that_cannot_be_split_stays_as_it_was(world):
    def step():
        model = nn.Sequential(MoE(HIDDEN, FFN, 8), MoE(HIDDEN, FFN, 10))
        before = copy.deepcopy(model.state_dict())
        try:
            expert_parallel(model)
        except ValueError as error:
            assert "10 experts in 1" in str(error)
        return all(torch.equal(before[name], value) for name, value in model.state_dict().items()) and model[0].n == 1

    assert world.run(step) == [True] * 4


def test_it_is_one_file_of_a_readable_size():
    with open(expert.__file__, encoding="utf-8") as file:
        assert len([line for line in file if line.strip()]) < 230
