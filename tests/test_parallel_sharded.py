"""ZeRO 1 to 3 against one process, against fully_shard, and against the formulas for bytes and memory."""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from comparing import error_of, relative, weights
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from lecture_lib.parallel.data import DataParallel
from lecture_lib.parallel.model import Transformer, deep_mlp, next_token_loss
from lecture_lib.parallel.sharded import FullyShardedDataParallel, ShardedOptimizer
from lecture_lib.parallel.tensor import gather_full_state_dict, tensor_parallel
from lecture_lib.trace import ledger, memory

SIZES = (1, 2, 3, 4)
WIDTH, ROWS = 8, 12  # 1 to 4 ranks share 12 rows equally


def batch(rows=ROWS):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


# ---- ZeRO-1 ----------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A tied weight, matrices, vectors, a scalar, and a parameter that nobody uses."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH))
        self.again = nn.Linear(WIDTH, 12)
        self.again.weight = self.layers[0].weight
        self.scale, self.unused = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.layers(x) + self.scale * self.again(x)[:, :WIDTH]


OPTIMIZERS = {
    "SGD": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)),
    "Adam": (torch.optim.Adam, dict(lr=0.01, amsgrad=True)),
    "AdamW": (torch.optim.AdamW, dict(lr=0.01)),
    "fused AdamW": (torch.optim.AdamW, dict(lr=0.01, fused=True)),
    "Adagrad": (torch.optim.Adagrad, dict(lr=0.01, initial_accumulator_value=0.1)),
    "RMSprop": (torch.optim.RMSprop, dict(lr=0.01, momentum=0.9, centered=True)),
    "NAdam": (torch.optim.NAdam, dict(lr=0.01)),
    "Adafactor": (torch.optim.Adafactor, dict(lr=0.01)),
    "Rprop": (torch.optim.Rprop, dict(lr=0.01)),
}


def flat_state(state_dict):
    """A state dict of an optimizer with each tensor as a list, to be compared with ==."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.tolist, state_dict)


def groups_of(module):
    """Two groups to begin with, one to add later; with names, and learning rates of their own."""
    return [
        {"params": list(module.layers.named_parameters())},
        {"params": [("scale", module.scale), ("unused", module.unused)], "lr": 0.02},
    ], {"params": [("bias", module.again.bias)], "lr": 0.005}


def train_with_closures(steps, trained):
    """Losses of the pairs of a module and its optimizer, whose learning rate falls."""
    x, y = batch()
    losses = []
    for module, optimizer in trained:
        rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

        def closure(module=module, optimizer=optimizer):
            optimizer.zero_grad()
            loss = (module(x) - y).square().mean()
            loss.backward()
            return loss

        for _ in range(steps):
            losses.append(optimizer.step(closure).item())
            rate.step()
    return losses


def check_optimizers(names):
    """Weights and state dicts equal those of the plain optimizer, to the last bit, since each parameter's update is the
    same arithmetic wherever it is done. Groups, options, schedulers, closures, names, reloading."""
    wrong = []
    for name in names:
        optimizer_cls, options = OPTIMIZERS[name]
        torch.manual_seed(3)
        alone = Mixed()
        model = copy.deepcopy(alone)
        (groups, later), (our_groups, our_later) = groups_of(alone), groups_of(model)
        theirs = optimizer_cls(groups, **options)
        ours = ShardedOptimizer(our_groups, optimizer_cls, **options)
        losses = train_with_closures(2, [(model, ours), (alone, theirs)])
        theirs.add_param_group(later)
        ours.add_param_group(our_later)
        losses += train_with_closures(2, [(model, ours), (alone, theirs)])
        state = ours.state_dict()
        if flat_state(state) != flat_state(theirs.state_dict()):
            wrong.append((name, "state_dict"))
        # Into fresh ones, crosswise: the plain optimizer's state into a sharded one, and back.
        (groups, later), (our_groups, our_later) = groups_of(alone), groups_of(model)
        fresh = ShardedOptimizer([*our_groups, our_later], optimizer_cls, **options)
        fresh.load_state_dict(copy.deepcopy(theirs.state_dict()))
        theirs = optimizer_cls([*groups, later], **options)
        theirs.load_state_dict(copy.deepcopy(state))
        losses += train_with_closures(2, [(model, fresh), (alone, theirs)])
        if losses[0:2] + losses[4:6] + losses[8:10] != losses[2:4] + losses[6:8] + losses[10:12]:
            wrong.append((name, "losses", losses))
        if any(not torch.equal(p, q) for p, q in zip(model.parameters(), alone.parameters())):
            wrong.append((name, "weights"))
        if flat_state(fresh.state_dict()) != flat_state(theirs.state_dict()):
            wrong.append((name, "state_dict after loading"))
        if any(fresh.owner_of(p) != dist.get_rank() for p in fresh.state):
            wrong.append((name, "holds the state of others"))
    return wrong


def test_any_optimizer_gives_the_plain_ones_weights_and_state(worlds):
    assert worlds[3].run(check_optimizers, list(OPTIMIZERS)) == [[]] * 3


@pytest.mark.parametrize("n", [1, 2, 4])
def test_so_do_those_of_each_kind_of_state_on_other_numbers_of_ranks(worlds, n):
    """Without a count of steps, with one, there before the first step, and not of the parameter's shape."""
    assert worlds[n].run(check_optimizers, ["SGD", "AdamW", "Adagrad", "Adafactor"]) == [[]] * n


def test_muon_sees_whole_matrices(worlds):
    def step():
        torch.manual_seed(3)
        alone = deep_mlp(WIDTH, 3)
        model = copy.deepcopy(alone)
        theirs = torch.optim.Muon(alone.parameters(), lr=0.1)
        ours = ShardedOptimizer(model.parameters(), torch.optim.Muon, lr=0.1)
        for _ in range(3):
            for module, optimizer in ((alone, theirs), (model, ours)):
                optimizer.zero_grad()
                module(batch()[0]).square().sum().backward()
                optimizer.step()
        error = error_of(ShardedOptimizer, Mixed().parameters(), torch.optim.Muon)
        return all(torch.equal(p, q) for p, q in zip(model.parameters(), alone.parameters())), error

    for n in (2, 4):  # with 4, one rank has no parameter
        (first, error), *others = worlds[n].run(step)
        assert first and others == [(True, error)] * (n - 1)
        assert "could not give its parameters to Muon: Muon only supports 2D parameters" in error


def test_state_goes_on_at_another_world_size(worlds):
    def train(state, weights_before):
        model = Mixed()
        model.load_state_dict(weights_before)
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        if state:
            optimizer.load_state_dict(state)
        for _ in range(3):
            optimizer.zero_grad()
            model(batch()[0]).square().mean().backward()
            optimizer.step()
        return optimizer.state_dict(), model.state_dict()

    torch.manual_seed(3)
    begin = Mixed().state_dict()
    straight = worlds[1].run(train, *worlds[1].run(train, None, begin)[0])[0]
    for first, second in ((4, 3), (3, 1), (1, 4)):
        state = worlds[first].run(train, None, begin)[0]
        for out in worlds[second].run(train, *state):
            assert flat_state(out) == flat_state(straight)


def test_schedulers_find_the_optimizers_defaults(worlds):
    def step():
        model = nn.Linear(2, 2)
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.Adam)
        rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
        rates = []
        for _ in range(4):
            rates.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]))
            optimizer.step()
            if len(rates) < 4:
                rate.step()
        plain = torch.optim.Adam(model.parameters())
        rate, expected = torch.optim.lr_scheduler.OneCycleLR(plain, max_lr=0.1, total_steps=4), []
        for _ in range(4):
            expected.append((plain.param_groups[0]["lr"], plain.param_groups[0]["betas"]))
            plain.step()
            if len(expected) < 4:
                rate.step()
        return rates == expected

    assert worlds[2].run(step) == [True, True]


def test_who_owns_what(worlds):
    def step(widths):
        parameters = [nn.Parameter(torch.ones(width)) for width in widths]
        optimizer = ShardedOptimizer(parameters, torch.optim.Adam)
        for p in parameters:
            p.grad = torch.ones_like(p)
        with ledger() as led:
            optimizer.step()
        state = sum(s["exp_avg"].nbytes for s in optimizer.state.values())
        stranger = optimizer.owner_of(torch.ones(1))
        return [optimizer.owner_of(p) for p in parameters], state, led, stranger

    for n in SIZES:
        outs = worlds[n].run(step, list(range(1, 33)))
        owners, _, _, stranger = outs[0]
        assert all(out[0] == owners for out in outs) and stranger is None
        load = [sum(4 * (i + 1) for i, owner in enumerate(owners) if owner == rank) for rank in range(n)]
        assert [out[1] for out in outs] == load and max(load) - min(load) <= 4 * 32 / n
        assert sum(out[2].bytes_sent for out in outs) == (n - 1) * 4 * sum(range(1, 33))
    owners, state, _, _ = worlds[4].run(step, [5])[3]  # more ranks than parameters
    assert owners == [0] and state == 0


def test_a_parameter_that_is_not_contiguous(worlds):
    def step():
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(4, 6).t())
        optimizer = ShardedOptimizer([weight], torch.optim.SGD, lr=1.0)
        weight.grad = torch.ones(6, 4)
        before = weight.detach().clone()
        optimizer.step()
        return torch.equal(weight, before - 1)

    assert worlds[2].run(step) == [True, True]


def sharded_optimizer_of(kind):
    odd = dist.get_rank() == 1
    a, b = (nn.Parameter(torch.ones(2, 3)) for _ in range(2))
    sgd, adam = torch.optim.SGD, torch.optim.Adam
    match kind:
        case "more":
            return error_of(ShardedOptimizer, [a, b] if odd else [a], sgd)
        case "none":
            return error_of(ShardedOptimizer, [] if odd else [a], sgd)
        case "groups":
            return error_of(ShardedOptimizer, [{"params": [a]}, {"params": [b]}] if odd else [{"params": [a, b]}], sgd)
        case "shape":
            return error_of(ShardedOptimizer, [nn.Parameter(torch.ones(3, 2)) if odd else a], sgd)
        case "class":
            return error_of(ShardedOptimizer, [a], adam if odd else sgd)
        case "option":
            return error_of(ShardedOptimizer, [a], sgd, lr=0.1 if odd else 0.2)
        case "LBFGS":
            return error_of(ShardedOptimizer, [a], torch.optim.LBFGS)
        case "LBFGS on one":
            return error_of(ShardedOptimizer, [a], torch.optim.LBFGS if odd else sgd)
        case "devices":
            return error_of(ShardedOptimizer, [a, nn.Parameter(torch.ones(2, device="meta"))], sgd)
        case "refused":
            return error_of(ShardedOptimizer, [a], sgd, lr=-1)
        case "later":
            optimizer = ShardedOptimizer([a], sgd)
            return error_of(optimizer.add_param_group, {"params": [b], "lr": 0.1 + odd})
        case "load":
            optimizer = ShardedOptimizer([a, b], sgd)
            return error_of(optimizer.load_state_dict, torch.optim.SGD([a]).state_dict())
        case "zero-2":
            optimizer = ShardedOptimizer([a], sgd)
            return error_of(DataParallel, nn.Linear(2, 2), sharded_optimizer=optimizer)
        case "zero-2 on some":
            optimizer = ShardedOptimizer((module := nn.Linear(2, 2)).parameters(), sgd)
            return error_of(DataParallel, module, sharded_optimizer=None if odd else optimizer)


@pytest.mark.parametrize(
    "kind, text",
    {
        "more": "rank 1 brought SGD of 2 parameters or groups; rank 0 brought SGD of 1 parameters or groups.",
        "none": "rank 1 brought SGD of 0 parameters or groups; rank 0 brought SGD of 1",
        "groups": "rank 1 brought SGD of 2 parameters or groups; rank 0 brought SGD of 1",
        "shape": "rank 1 brought parameter 0 of group 0 of shape (3, 2), float32; rank 0 brought parameter 0",
        "class": "rank 1 brought Adam of 1 parameters or groups; rank 0 brought SGD",
        "option": "rank 1 brought lr=0.1; rank 0 brought lr=0.2",
        "LBFGS": "rank 0 asked for LBFGS, which looks at all parameters at once; it cannot be spread over ranks.",
        "LBFGS on one": "rank 1 asked for LBFGS, which looks at all parameters at once",
        "devices": "rank 0 has parameter 0 of group 0 on cpu and parameter 1 of group 0 on meta",
        "refused": "rank 0 could not give its parameters to SGD: Invalid learning rate: -1",
        "later": "rank 1 brought lr=1.1; rank 0 brought lr=0.1",
        "load": "has groups of [2] parameters, and the state is of [1]",
        "zero-2": "rank 0 brought a sharded optimizer of other parameters",
        "zero-2 on some": "rank 1 brought no sharded optimizer; rank 0 brought a sharded optimizer that gives weight",
    }.items(),
)
def test_sharded_optimizers_that_are_refused(worlds, kind, text):
    errors = worlds[4].run(sharded_optimizer_of, kind)
    assert len(set(errors)) == 1 and errors[0].startswith("ValueError: ") and text in errors[0]


def test_a_sharded_optimizer_of_another_group_is_refused(worlds):
    def step():
        pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        module = nn.Linear(2, 2)  # the weight is rank 0's, the bias rank 1's
        optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD)
        return error_of(DataParallel, module, group=pairs[dist.get_rank() % 2], sharded_optimizer=optimizer)

    for rank, error in enumerate(worlds[4].run(step)):
        odd, pair = ("bias to rank 1", "[0, 2]") if rank % 2 == 0 else ("weight to rank 0", "[1, 3]")
        assert f"a sharded optimizer that gives {odd}, which is not in the group {pair}; make it with the same" in error


# ---- ZeRO-2 ----------------------------------------------------------------------------------------------------------


def check_zero_2(bucket_mb):
    """3 steps beside one process; gradients only where they are needed; (n-1)/n bytes for each of a gradient's."""
    n, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(3)
    alone = Mixed()
    module = copy.deepcopy(alone)
    options = dict(lr=0.01, eps=1e-3)  # well above the rounding of a gradient
    ours = ShardedOptimizer(module.parameters(), torch.optim.AdamW, **options)
    model = DataParallel(module, bucket_mb, sharded_optimizer=ours)
    theirs = torch.optim.AdamW(alone.parameters(), **options)
    x, y = batch()
    for _ in range(3):
        ours.zero_grad()
        theirs.zero_grad()
        (alone(x) - y).square().mean().backward()
        with ledger() as led:
            (model(x.chunk(n)[rank]) - y.chunk(n)[rank]).square().mean().backward()
            model.finish_gradient_synchronization()
        for (name, p), q in zip(module.named_parameters(), alone.parameters()):
            mine = ours.owner_of(p) == rank and name != "unused"
            assert (p.grad is not None) == mine, (name, mine, p.grad)
            assert not mine or relative({"": p.grad}, {"": q.grad}) <= 1e-5
        ours.step()
        theirs.step()
    return relative(weights(module), weights(alone)), led.bytes_sent, sum(p.nbytes for p in module.parameters())


@pytest.mark.parametrize("n", SIZES)
def test_zero_2(worlds, n):
    for bucket_mb in (25, 0):
        outs = worlds[n].run(check_zero_2, bucket_mb)
        assert max(off for off, _, _ in outs) <= 1e-5
        assert sum(sent for _, sent, _ in outs) == (n - 1) * outs[0][2]


def test_zero_2_wants_zero_grad(worlds):
    """Only rank 0 owns a parameter, so only it can see that something is wrong: all raise."""

    def step(ahead):
        module = nn.Linear(2, 2, bias=False)
        model = DataParallel(module, sharded_optimizer=ShardedOptimizer(module.parameters(), torch.optim.SGD))
        losses = [model(torch.ones(1, 2)).sum() for _ in range(ahead)]
        losses.pop().backward()
        model.finish_gradient_synchronization()
        model.eval()
        with torch.no_grad():
            model(torch.ones(1, 2))
        return error_of(losses.pop().backward if losses else model, *[] if ahead > 1 else [torch.ones(1, 2)])

    text = "ValueError: DataParallel: rank 0 has last step's sums in .grad, and with a sharded optimizer no new"
    for n in (1, 3):
        outs = worlds[n].run(step, 1)
        assert len(set(outs)) == 1 and outs[0].startswith(text) and "zero_grad() after each step" in outs[0]
    # A forward() before the step could not tell. Then the owner does, and the others wait for it: on one rank.
    assert worlds[1].run(step, 2)[0].startswith(text.replace("Value", "Runtime"))


def test_zero_2_takes_gradients_that_are_set_to_zero(worlds):
    def step(set_to_none):
        n, rank = dist.get_world_size(), dist.get_rank()
        torch.manual_seed(3)
        module = Mixed()
        optimizer = ShardedOptimizer(module.parameters(), torch.optim.Adam, lr=0.01)
        model = DataParallel(module, sharded_optimizer=optimizer)
        x, y = batch()
        for _ in range(3):
            loss_of(model, x.chunk(n)[rank], y.chunk(n)[rank]).backward()
            model.finish_gradient_synchronization()
            optimizer.step()
            optimizer.zero_grad(set_to_none)
        return weights(module)

    assert all(relative(*both) == 0 for both in zip(worlds[3].run(step, True), worlds[3].run(step, False)))


def clipped(wrap, model_of, max_norm):
    """The norm over that of one process, how far the weights are after 3 clipped steps, and the bytes of a clip."""
    n, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(3)
    alone = model_of()
    model, ours = wrap(copy.deepcopy(alone))
    theirs = torch.optim.SGD(alone.parameters(), lr=0.5)
    x, y = batch()
    for _ in range(3):
        ours.zero_grad()
        theirs.zero_grad()
        loss_of(alone, x, y).backward()
        loss_of(model, x.chunk(n)[rank], y.chunk(n)[rank]).backward()
        model.finish_gradient_synchronization()
        with torch.no_grad():
            model(x)  # an evaluation in between changes nothing
        norm = nn.utils.clip_grad_norm_(alone.parameters(), max_norm)
        with ledger() as led:
            ratio = model.clip_gradients(max_norm) / norm
        ours.step()
        theirs.step()
    is_whole = isinstance(model, DataParallel)
    ours = weights(model.module) if is_whole else model.gather_full_params()
    return ratio.item(), relative(ours, weights(alone)), led.calls


def zero_2(module):
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.5)
    return DataParallel(module, sharded_optimizer=optimizer), optimizer


def zero_3(module):
    model = FullyShardedDataParallel(module)
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


@pytest.mark.parametrize("wrap", [zero_2, zero_3])
def test_clipping_as_on_one_process(worlds, wrap):
    """Mixed has a parameter that nobody uses; of one weight, all but one rank own nothing."""
    cases = (Mixed, 0.05), (Mixed, 100.0), (lambda: nn.Linear(WIDTH, WIDTH, bias=False), 0.05)
    for n in (1, 3):
        for outs in worlds[n].run(lambda: [clipped(wrap, *case) for case in cases]):
            for ratio, off, calls in outs:
                assert abs(ratio - 1) <= 1e-5 and off <= 1e-5
                assert [(call.name, call.elements, call.dtype) for call in calls] == [("all_reduce", 1, "float64")]


# ---- ZeRO-3: modules -------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """No list of layers: each child is one. Its embedding serves as the head too, by hand."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.first, self.norm, self.second = nn.Linear(WIDTH, 13), nn.LayerNorm(13), nn.Linear(13, WIDTH)

    def forward(self, x):
        tokens = (x.abs() * 3).long().clamp(max=9)
        h = self.embedding(tokens).mean(1)
        return (self.second(self.norm(self.first(h)).relu()) @ self.embedding.weight.T)[:, :WIDTH]


class Custom(nn.Module):
    """A layer with parameters of its own, one with fewer elements than ranks, one with none."""

    def __init__(self):
        super().__init__()
        self.matrix, self.gain = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3), nn.Parameter(torch.tensor(1.1))
        self.empty, self.inner = nn.Parameter(torch.empty(0, 2)), nn.RMSNorm(WIDTH)
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.ones(1))])

    def forward(self, x):
        return self.inner(x @ self.matrix) * self.gain + self.empty.sum() + self.listed[0] * self.listed[1]


class Lists(nn.Module):
    """ModuleList in ModuleList, ModuleDict, Sequential, a ParameterList, parameters at the top."""

    def __init__(self):
        super().__init__()
        self.deep = nn.ModuleList([nn.ModuleList([Custom(), nn.Linear(WIDTH, WIDTH)]), nn.Sequential(Custom())])
        self.named = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": Custom()})
        self.bare = nn.ParameterList([nn.Parameter(torch.randn(WIDTH))])
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        x = self.deep[0][1](self.deep[0][0](x)).tanh()
        return self.named["b"](self.named["a"](self.deep[1](x))) * self.bare[0] + self.shift


class Tied(nn.Module):
    """Tied within a layer, across layers, and a layer that is in the list twice."""

    def __init__(self):
        super().__init__()
        inside = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        inside[2].weight = inside[0].weight
        twice = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Residual(inside), twice, nn.Linear(WIDTH, WIDTH), twice, nn.Linear(WIDTH, WIDTH)])
        self.layers[4].weight = self.layers[2].weight

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class UNet(nn.Module):
    """Layers that return tuples, dicts and objects; outputs that skip layers; some that nobody uses."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(Down(kind) for kind in ("tuple", "dict", "object"))
        self.up = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        x, a, _ = self.down[0](x=x)
        down = self.down[1](x=x)
        pair = self.down[2](x=down["y"][0])
        x = pair.first
        for layer, skip in zip(self.up, (pair.second[0], down["skip"], a)):
            x = torch.tanh(layer(torch.cat([x, skip], dim=-1)))
        return x


@dataclass
class Pair:
    first: torch.Tensor
    second: list


class Down(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.a, self.b = kind, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.extra = nn.Linear(WIDTH, 2)

    def forward(self, x):
        skip = torch.tanh(self.a(x))
        y, unused = self.b(skip), self.extra(x)
        return {"tuple": (y, skip, unused), "dict": {"y": [y], "skip": skip}, "object": Pair(y, [skip])}[self.kind]


class Frozen(nn.Module):
    """A frozen weight of the outermost module between layers, a layer frozen as a whole, and low-rank adapters beside a
    frozen matrix that comes before them."""

    def __init__(self):
        super().__init__()
        self.between = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3, requires_grad=False)
        self.layers = nn.ModuleList([Adapted(), nn.Linear(WIDTH, WIDTH).requires_grad_(False), Adapted()])
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        x = self.layers[0](x) @ self.between
        return self.layers[2](self.layers[1](x).tanh()) * self.gain


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x):
        return self.frozen(x) + x @ self.a @ self.b


class Unused(nn.Module):
    """Parameters, and a whole layer, that nobody uses; and one that only some rows use, in each of several layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Sometimes() for _ in range(3))
        self.never = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        y = torch.tanh(self.always(x))
        rows = x[:, 0] > 0.5
        return torch.where(rows[:, None], self.sometimes(y), y) if rows.any() else y


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, WIDTH, num_layers=2, batch_first=True)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)])
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        h, _ = self.lstm(x[:, :, None])  # (batch, WIDTH as time, WIDTH)
        h = self.layers[0](h)
        return self.attention(h, h, h)[0].mean(-1)


class PlainRecurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(1, WIDTH, batch_first=True), nn.Linear(WIDTH, 1)

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x[:, :, None], [WIDTH] * len(x), batch_first=True)
        return self.out(nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0])[:, :, 0]


class Checkpointed(nn.Module):
    """Activations recomputed inside a layer, around one, and around two."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Inside(), *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))])
        self.blocks = nn.ModuleList(Residual(nn.Linear(WIDTH, WIDTH)) for _ in range(4))

    def forward(self, x):
        x = self.layers[0](x)
        x = checkpoint(self.blocks[0], x, use_reentrant=False)
        x = checkpoint(lambda x: self.blocks[2](torch.tanh(self.blocks[1](x))), x, use_reentrant=False)
        return self.layers[2](self.layers[1](self.blocks[3](x)))


class Inside(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.b(checkpoint(lambda x: torch.tanh(self.a(x)), x, use_reentrant=False))


class Nested(nn.Module):
    """A layer that calls another one, which the module does not know to be inside of it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Asks(), nn.Linear(WIDTH, WIDTH)])
        self.layers[1].other = [self.layers[0]]

    def forward(self, x):
        return self.layers[2](self.layers[1](x))


class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.b(torch.tanh(self.other[0](torch.tanh(self.a(x)))))


class WholeAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        return self.inner(x[:, None], x[:, None], x[:, None])[0][:, 0]


class Characters(Transformer):
    def __init__(self, tied):
        super().__init__(layers=2, hidden=16, heads=4, kv_heads=2, ffn_hidden=24, vocab=WIDTH, tied=tied)

    def forward(self, x):
        return super().forward((x > 0).long()).mean(1)


MODELS = {
    "the lecture's MLP": lambda: deep_mlp(WIDTH, 4),
    "in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)),
    "one linear layer": lambda: nn.Linear(WIDTH, WIDTH),
    "Sequential of embeddings": lambda: nn.Sequential(
        Tokens(), nn.Embedding(3, WIDTH), Mean(), nn.Linear(WIDTH, WIDTH)
    ),
    "transformer": lambda: Characters(False),
    "tied transformer": lambda: Characters(True),
    "plain": Plain,
    "custom": Custom,
    "lists": Lists,
    "tied": Tied,
    "U-Net": UNet,
    "frozen": Frozen,
    "unused": Unused,
    "recurrent": Recurrent,
    "packed sequences": PlainRecurrent,
    "attention": WholeAttention,
    "checkpointed": Checkpointed,
    "nested": Nested,
}


class Tokens(nn.Module):
    def forward(self, x):
        return (x > 0).long() + (x > 1).long()


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


def loss_of(model, x, y):
    return (model(x) - y).square().mean()


def check_fully_sharded(names=None, accumulate=1):
    """Every model, 3 steps of SGD with momentum beside one process: losses, gradients, weights. The first step learns
    the order of the layers, the others prefetch by it. What differs by more than 1e-5, which is some 100 roundings of
    float32, or is otherwise not as it should be."""
    n, rank, wrong = dist.get_world_size(), dist.get_rank(), []
    x, y = batch()
    for name in names or MODELS:
        torch.manual_seed(3)
        alone = MODELS[name]()
        torch.manual_seed(rank)
        model = FullyShardedDataParallel(copy.deepcopy(alone) if rank == 0 else MODELS[name]())
        options = dict(lr=0.05, momentum=0.9, weight_decay=0.01)
        ours = torch.optim.SGD(model.parameters(), **options)
        theirs = torch.optim.SGD(alone.parameters(), **options)
        for _ in range(3):
            ours.zero_grad()
            theirs.zero_grad()
            expected = loss_of(alone, x, y)
            expected.backward()
            loss = torch.zeros(())
            pieces = x.chunk(n)[rank].chunk(accumulate), y.chunk(n)[rank].chunk(accumulate)
            for a, b in zip(*pieces):
                part = loss_of(model, a, b) / len(pieces[0])
                part.backward()
                model.finish_gradient_synchronization()
                loss += part.detach()
            dist.all_reduce(loss, dist.ReduceOp.AVG)
            if not abs(loss.item() / expected.item() - 1) <= 1e-5:
                wrong.append((name, "loss", loss.item(), expected.item()))
            full = dict(alone.named_parameters())
            for key, p in model.module.named_parameters():
                if p.grad is None:
                    if full[key].grad is not None and p.numel():
                        wrong.append((name, f"no gradient of {key}"))
                elif (p.grad.shape, p.grad.dtype) != (p.data.shape, p.data.dtype) or p.dim() != 1:
                    wrong.append((name, key, p.grad.shape, p.data.shape))
                elif full[key].grad is None:
                    wrong.append((name, f"a gradient of {key}"))
            ours.step()
            theirs.step()
            if any(flat._whole.untyped_storage().nbytes() for unit in model._units for flat in unit.flats):
                wrong.append((name, "not freed"))
        off = relative(model.gather_full_params(), weights(alone))
        if not off <= 1e-5:
            wrong.append((name, "weights", off))
        if sum(p.numel() for p in model.parameters()) > sum(p.numel() for p in alone.parameters()) / n + len(full):
            wrong.append((name, "holds too much"))
    return wrong


@pytest.mark.parametrize("n", SIZES)
def test_fully_sharded_equals_one_process(worlds, n):
    assert worlds[n].run(check_fully_sharded) == [[]] * n


@pytest.mark.parametrize("n", [2, 3])
def test_gradients_of_several_backward_passes_add_up(worlds, n):
    names = ["the lecture's MLP", "tied transformer", "frozen", "unused", "checkpointed"]
    assert worlds[n].run(check_fully_sharded, names, 2) == [[]] * n


def test_bit_for_bit_where_the_order_of_addition_allows(worlds):
    """Small whole numbers add up without rounding in any order: then all ranks' weights are those of one process."""

    def step():
        n, rank = dist.get_world_size(), dist.get_rank()
        torch.manual_seed(0)
        alone = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
        with torch.no_grad():
            for p in alone.parameters():
                p.copy_(torch.randint(-2, 3, p.shape))
        model = FullyShardedDataParallel(copy.deepcopy(alone))
        ours, theirs = (torch.optim.SGD(m.parameters(), lr=2**-7) for m in (model, alone))
        x = torch.randint(-2, 3, (8, WIDTH)).float()
        for _ in range(2):
            for m, optimizer, rows in ((alone, theirs, x), (model, ours, x.chunk(n)[rank])):
                optimizer.zero_grad()
                (m(rows).sum() / len(rows)).backward()
                if m is model:
                    m.finish_gradient_synchronization()
                optimizer.step()
        full = model.gather_full_params()
        return all(torch.equal(full[name], p) for name, p in alone.named_parameters())

    for n in (1, 2, 4):
        assert worlds[n].run(step) == [True] * n


# ---- ZeRO-3: against fully_shard -------------------------------------------------------------------------------------


def check_against_fully_shard(compute_dtype):
    n, rank, offs = dist.get_world_size(), dist.get_rank(), {}
    for name, make in {
        "mlp": lambda: deep_mlp(WIDTH, 4),
        "transformer": lambda: Transformer(layers=2, hidden=16, heads=4, kv_heads=2, ffn_hidden=24, vocab=32),
        "tied": lambda: Transformer(layers=2, hidden=16, heads=4, kv_heads=2, ffn_hidden=24, vocab=32, tied=True),
    }.items():
        torch.manual_seed(3)
        theirs = make()
        ours = FullyShardedDataParallel(copy.deepcopy(theirs), compute_dtype)
        policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=compute_dtype)} if compute_dtype else {}
        for layer in theirs.blocks if isinstance(theirs, Transformer) else theirs:
            if list(layer.parameters()):
                fully_shard(layer, **policy)
        fully_shard(theirs, **policy)
        steppers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (ours, theirs)]
        x, y = (tensor.chunk(n)[rank] for tensor in batch())
        tokens = (x > 0).long()
        losses = []
        for _ in range(3):
            for m, optimizer in zip((ours, theirs), steppers):
                optimizer.zero_grad()
                loss = m(x).sub(y).square().mean() if name == "mlp" else next_token_loss(m(tokens).float(), tokens)
                losses.append(loss.item())
                loss.backward()
                if m is ours:
                    m.finish_gradient_synchronization()
                optimizer.step()
        full = {key: p.full_tensor() for key, p in theirs.named_parameters(remove_duplicate=False)}
        mine = ours.gather_full_params()
        assert all(p.dtype == torch.float32 for p in [*mine.values(), *ours.parameters()])
        loss_off = max(abs(a - b) for a, b in zip(losses[::2], losses[1::2]))
        offs[name] = relative(mine, full), loss_off, all(torch.equal(mine[key], full[key]) for key in full)
    return offs


@pytest.mark.parametrize("n", [2, 3, 4])
def test_equal_to_fully_shard(worlds, n):
    for offs in worlds[n].run(check_against_fully_shard, None):
        for name, (weights_off, loss_off, same) in offs.items():
            assert weights_off <= 1e-6 and loss_off <= 1e-6 and (same or n > 2), (name, offs)


@pytest.mark.parametrize("compute_dtype, rounding", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_compute_dtype_as_in_fully_shard(worlds, compute_dtype, rounding):
    """fully_shard divides by the number of ranks at another moment: a rounding of the compute dtype."""
    for offs in worlds[2].run(check_against_fully_shard, compute_dtype):
        for name, (weights_off, loss_off, _) in offs.items():
            assert weights_off <= 2 * rounding and loss_off <= 4 * rounding, (name, offs)


def test_compute_dtype_with_recomputation_and_accumulation(worlds):
    def step():
        n, rank = dist.get_world_size(), dist.get_rank()
        torch.manual_seed(3)
        alone = Checkpointed()
        model = FullyShardedDataParallel(copy.deepcopy(alone), torch.bfloat16)
        x, y = batch()
        loss_of(alone, x, y).backward()
        with ledger() as led:
            for a, b in zip(x.chunk(n)[rank].chunk(2), y.chunk(n)[rank].chunk(2)):
                (loss_of(model, a, b) / 2).backward()
                model.finish_gradient_synchronization()
        assert {call.dtype for call in led.calls} == {"bfloat16"}
        shards = {name: p.grad for name, p in model.module.named_parameters()}
        assert all(g.dtype == torch.float32 for g in shards.values())
        with torch.no_grad():  # gradients, gathered as if they were weights
            for name, p in model.module.named_parameters():
                p.copy_(shards[name])
        return relative(model.gather_full_params(), {name: p.grad for name, p in alone.named_parameters()})

    assert max(worlds[2].run(step)) < 0.05


# ---- ZeRO-3: bytes and memory ----------------------------------------------------------------------------------------


def sent_by_fully_sharded(kind, compute_dtype=None):
    model = FullyShardedDataParallel(MODELS[kind](), compute_dtype)
    ledgers = []
    for _ in range(2):
        with ledger() as led:
            loss_of(model, *batch()).backward()
            model.finish_gradient_synchronization()
        ledgers.append(led)
    with ledger() as evaluation, torch.no_grad():
        model(batch()[0])
    return [led.totals() for led in (*ledgers, evaluation)]


def test_bytes_are_three_times_those_of_a_layer_and_twice_those_of_the_rest(worlds):
    layer = 4 * WIDTH * WIDTH
    transformer = MODELS["transformer"]()
    block = 4 * sum(p.numel() for p in transformer.blocks[0].parameters())
    rest = 4 * sum(p.numel() for p in transformer.parameters()) - 2 * block
    for n in SIZES:

        def ceil(nbytes, n=n):
            return -(-nbytes // (4 * n)) * 4 * n  # padded to a multiple of n elements

        for kind, layers, whole in (("the lecture's MLP", 4 * [layer], 0), ("transformer", 2 * [block], rest)):
            padded = sum(ceil(nbytes) for nbytes in layers)
            gathered = (n - 1) * (2 * padded + ceil(whole)) // n
            scattered = (n - 1) * (padded + ceil(whole)) // n
            for first, second, evaluation in worlds[n].run(sent_by_fully_sharded, kind):
                assert first == second  # the prefetch of the second pass sends no more
                assert second["all_gather_single"][2] == gathered
                assert second["reduce_scatter_single"][2] == scattered
                assert evaluation["all_gather_single"][2] == (n - 1) * (padded + ceil(whole)) // n
    (_, narrow, _), *_ = worlds[2].run(sent_by_fully_sharded, "the lecture's MLP", torch.bfloat16)
    assert narrow["all_gather_single"][2] == 2 * 4 * layer // 2 // 2


def held(stage, layers=8, width=32):
    """Peak bytes of the second step of AdamW, and the bytes sent in it."""
    torch.manual_seed(0)
    module, mb = deep_mlp(width, layers), 4e-6 * width * width
    x = torch.randn(4, width)
    options = dict(fused=True)  # which makes no temporary copies
    match stage:
        case 0:
            model = DataParallel(module, mb)
            optimizer = torch.optim.AdamW(model.parameters(), **options)
        case 1:
            model = DataParallel(module, mb)
            optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, **options)
        case 2:
            optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW, **options)
            model = DataParallel(module, mb, sharded_optimizer=optimizer)
        case 3:
            model = FullyShardedDataParallel(module)
            optimizer = torch.optim.AdamW(model.parameters(), **options)
    for _ in range(2):
        with memory(model, optimizer) as memory_held, ledger() as led:
            model(x).sum().backward()
            model.finish_gradient_synchronization()
            optimizer.step()
            optimizer.zero_grad()
    return memory_held.peak, led.bytes_sent


def test_memory_and_bytes_of_each_stage(worlds):
    layer = 4 * 32 * 32
    whole = 8 * layer
    for n in (1, 2, 4):
        scalars = 4 * 8 // n  # each parameter's count of steps
        parameters = [whole, whole, whole, whole // n + 2 * layer * (n > 1)]
        # Stage 2: a bucket travels, one is full, and the backward pass has brought a gradient.
        gradients = [whole, whole, whole // n + 3 * layer * (n > 1), whole // n + 2 * layer * (n > 1)]
        optimizer = [2 * whole + 32] + [2 * whole // n + scalars] * 2 + [2 * whole // n + 32]
        for stage in range(4):
            outs = worlds[n].run(held, stage)
            peaks = [peak for peak, _ in outs]
            if n > 1 or stage != 3:
                assert {peak["parameters"] for peak in peaks} == {parameters[stage]}, (n, stage)
                assert max(peak["gradients"] for peak in peaks) <= gradients[stage], (n, stage)
            assert {peak["optimizer"] for peak in peaks} == {optimizer[stage]}, (n, stage)
            sent = sum(bytes_sent for _, bytes_sent in outs)
            assert sent == (2, 3, 2, 3)[stage] * (n - 1) * whole, (n, stage)


# ---- ZeRO-3: around it -----------------------------------------------------------------------------------------------


def test_names_and_state_dicts(worlds):
    def step():
        torch.manual_seed(3)
        alone = nn.Sequential(Characters(True), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        model = FullyShardedDataParallel(copy.deepcopy(alone))
        assert [name for name, _ in model.module.named_parameters()] == [name for name, _ in alone.named_parameters()]
        full = model.gather_full_params()
        assert list(full) == [name for name, _ in alone.named_parameters(remove_duplicate=False)]
        model(batch()[0])  # a forward pass without a backward pass changes nothing
        state = model.state_dict()
        reference = alone.state_dict()
        for key in ("2.running_mean", "2.running_var", "2.num_batches_tracked"):
            reference[key] = state[key]
        assert state.keys() == reference.keys()
        assert all(torch.equal(state[key], reference[key]) for key in state)
        fresh = nn.Sequential(Characters(True), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        fresh.load_state_dict(state)
        other = FullyShardedDataParallel(
            nn.Sequential(Characters(True), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        )
        other(batch()[0]).sum().backward()
        other.finish_gradient_synchronization()
        other.load_state_dict(state)
        again = other.state_dict()
        assert all(torch.equal(again[key], state[key]) for key in state)
        wrong_shape = {**state, "1.weight": state["1.weight"].view(-1)}
        return error_of(other.load_state_dict, wrong_shape), error_of(
            other.load_state_dict, {"1.weight": state["1.weight"]}
        )

    for n in (1, 3):
        for shape, names in worlds[n].run(step):
            assert "1.weight of the state dict has shape (64,), that of the module (8, 8)" in shape
            assert "differ in 0.blocks.0" in names


def test_an_optimizer_made_before_wrapping_and_clipping(worlds):
    def step():
        n, rank = dist.get_world_size(), dist.get_rank()
        torch.manual_seed(3)
        alone = Lists()
        module = copy.deepcopy(alone)
        ours = torch.optim.Adam(module.parameters(), lr=0.01, eps=1e-3)
        model = FullyShardedDataParallel(module)
        theirs = torch.optim.Adam(alone.parameters(), lr=0.01, eps=1e-3)
        x, y = batch()
        for _ in range(3):
            theirs.zero_grad()
            ours.zero_grad()
            loss_of(alone, x, y).backward()
            loss_of(model, x.chunk(n)[rank], y.chunk(n)[rank]).backward()
            model.finish_gradient_synchronization()
            expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
            assert abs(model.clip_gradients(0.1) / expected - 1) < 1e-5
            ours.step()
            theirs.step()
        return relative(model.gather_full_params(), weights(alone))

    for n in (2, 3):
        assert max(worlds[n].run(step)) <= 1e-5


def test_evaluation_and_exceptions_leave_nothing_whole(worlds):
    def step():
        class Breaks(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.broken = nn.Linear(WIDTH, WIDTH), True

            def forward(self, x):
                if self.broken:
                    raise ZeroDivisionError("on purpose")
                return self.inner(x)

        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Breaks(), nn.Linear(WIDTH, WIDTH))
        alone = copy.deepcopy(module)
        alone[1].broken = False
        model = FullyShardedDataParallel(module)
        alone.load_state_dict(model.state_dict())
        x, y = batch()
        with pytest.raises(ZeroDivisionError):
            model(x)
        module[1].broken = False

        def whole():
            return sum(flat._whole.untyped_storage().nbytes() for unit in model._units for flat in unit.flats)

        model.eval()
        with torch.no_grad():
            same = torch.equal(model(x), alone(x))
        assert whole() == 0
        with torch.inference_mode():
            same &= torch.equal(model(x), alone(x))
        assert whole() == 0
        model.train()
        loss_of(model, x, y).item()  # with a graph that is dropped
        for _ in range(2):
            model.zero_grad()
            loss_of(model, x, y).backward()
            model.finish_gradient_synchronization()
        assert whole() == 0
        alone.zero_grad()
        loss_of(alone, x, y).backward()
        piece = model.module[0].weight.grad
        k = len(piece)
        first = 0 if dist.get_rank() == 0 else alone[0].weight.numel() - k
        return same and torch.allclose(piece, alone[0].weight.grad.flatten()[first : first + k])

    assert worlds[2].run(step) == [True, True]


def test_two_forward_passes_and_two_backward_passes(worlds):
    """Both halves of a batch before one backward pass; and one loss after the other through the same graph."""

    def step():
        n, rank = dist.get_world_size(), dist.get_rank()
        torch.manual_seed(3)
        alone = Characters(True)
        model = FullyShardedDataParallel(copy.deepcopy(alone))
        x, y = batch()
        loss_of(alone, x, y).backward()
        a, b = x.chunk(n)[rank].chunk(2), y.chunk(n)[rank].chunk(2)
        ((loss_of(model, a[0], b[0]) + loss_of(model, a[1], b[1])) / 2).backward()
        model.finish_gradient_synchronization()
        off = [own_gradients_off(model, alone)]
        model.zero_grad()
        loss = loss_of(model, x.chunk(n)[rank], y.chunk(n)[rank]) / 2
        for keep in (True, False):
            loss.backward(retain_graph=keep)
            model.finish_gradient_synchronization()
        return [*off, own_gradients_off(model, alone)]

    for n in (2, 3):
        assert max(map(max, worlds[n].run(step))) <= 1e-5


def own_gradients_off(model, alone):
    """How far this rank's pieces of the gradients are from those of one process."""
    pieces = {p: piece for unit in model._units for flat in unit.flats for p, (_, piece) in flat.pieces()}
    theirs = dict(alone.named_parameters())
    ours = {name: p for name, p in model.module.named_parameters() if p.numel()}
    return relative(
        {name: p.grad for name, p in ours.items()},
        {name: theirs[name].grad.flatten()[pieces[p]] for name, p in ours.items()},
    )


def test_fully_sharded_that_is_refused(worlds):
    def step(kind):
        odd = dist.get_rank() == 1
        match kind:
            case "shape":
                return error_of(FullyShardedDataParallel, nn.Linear(2, 2 + odd))
            case "more":
                return error_of(FullyShardedDataParallel, deep_mlp(2, 1 + odd))
            case "dtype":
                return error_of(FullyShardedDataParallel, nn.Linear(2, 2), torch.float16 if odd else None)
            case "device":
                return error_of(
                    FullyShardedDataParallel, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
                )
            case "again":
                module = deep_mlp(2, 2)
                FullyShardedDataParallel(module)
                return error_of(FullyShardedDataParallel, nn.Sequential(module))
            case "changed":
                model = FullyShardedDataParallel(deep_mlp(2, 2))
                model.module[0].weight.requires_grad_(False)
                return error_of(model, torch.ones(1, 2))
            case "batch norm":
                layers = nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False), nn.BatchNorm1d(2)
                FullyShardedDataParallel(copy.deepcopy(nn.Sequential(*layers[:2])), torch.bfloat16)(torch.ones(2, 2))
                return error_of(FullyShardedDataParallel, nn.Sequential(*layers), torch.bfloat16)
            case "unfinished":
                model = FullyShardedDataParallel(deep_mlp(2, 2))
                model(torch.ones(1, 2)).sum().backward()
                error = error_of(model, torch.ones(1, 2))
                model.finish_gradient_synchronization()
                model(torch.ones(1, 2))
                return error
            case "second backward":
                model = FullyShardedDataParallel(nn.Linear(2, 2))
                loss = model(torch.ones(1, 2)).sum()
                loss.backward(retain_graph=True)
                return error_of(loss.backward)

    for kind, text in {
        "shape": "rank 1 brought weight of shape (3, 2), float32; rank 0 brought weight of shape (2, 2), float32.",
        "more": "rank 1 brought 1 more than rank 0, the first of them 2.weight of shape (2, 2), float32.",
        "dtype": "rank 1 brought compute_dtype=torch.float16; rank 0 brought compute_dtype=None.",
        "device": "rank 0 has 0.weight on cpu and 1.weight on meta; move the module to one device first.",
        "again": "rank 0 brought a module that is sharded already; build it anew, and wrap that.",
        "changed": "parameter 0.weight was added, removed, replaced, frozen",
        "batch norm": "rank 0 brought 2, a BatchNorm1d with running means in torch.float32, and compute_dtype=torch.",
        "unfinished": "call finish_gradient_synchronization() after a backward pass, before the next forward().",
        "second backward": "a second backward pass; call finish_gradient_synchronization() after each.",
    }.items():
        errors = worlds[3].run(step, kind)
        assert len(set(errors)) == 1 and text in (errors[0] or ""), (kind, errors)


def test_groups_of_two(worlds):
    """Ranks 0 and 1 train one model with stage 3, ranks 2 and 3 another; likewise with stages 1 and 2."""

    def step():
        rank = dist.get_rank()
        group = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
        torch.manual_seed(rank // 2)
        alone, (x, y) = Lists(), batch()
        module, sharded = copy.deepcopy(alone), copy.deepcopy(alone)
        ours = ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1, group=group)
        model = DataParallel(module, group=group, sharded_optimizer=ours)
        fully = FullyShardedDataParallel(sharded, group=group)
        for m, optimizer in (
            (alone, torch.optim.SGD(alone.parameters(), lr=0.1)),
            (model, ours),
            (fully, torch.optim.SGD(fully.parameters(), lr=0.1)),
        ):
            for _ in range(2):
                optimizer.zero_grad()
                rows = (x, y) if m is alone else (x.chunk(2)[rank % 2], y.chunk(2)[rank % 2])
                loss_of(m, *rows).backward()
                if m is not alone:
                    m.finish_gradient_synchronization()
                optimizer.step()
        off = relative(weights(module), weights(alone)), relative(fully.gather_full_params(), weights(alone))
        return max(off), flat_state(ours.state_dict())["param_groups"][0]["lr"]

    assert all(off <= 1e-5 for off, _ in worlds[4].run(step))


def test_slices_are_not_overwritten(worlds):
    """What is split over some ranks can be wrapped across them, not over them, who hold different values."""

    def step(wrapper):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mine, across = mesh["tp"].get_group(), mesh["dp"].get_group()
        torch.manual_seed(0)
        whole = deep_mlp(4, 2)
        split = tensor_parallel(copy.deepcopy(whole), mine)
        before = weights(split)
        errors = [error_of(wrapper, nn.Sequential(split), group=group) for group in (mine, None)]
        same = relative(weights(split), before) == 0 and relative(gather_full_state_dict(split), weights(whole)) == 0
        loss_of(model := wrapper(split, group=across), torch.ones(1, 4), torch.zeros(1, 4)).backward()
        model.finish_gradient_synchronization()
        assert "hold different slices of 0, and their norm is of all" in error_of(model.clip_gradients, 1.0)
        return errors, same

    for wrapper in (DataParallel, FullyShardedDataParallel):
        outs = worlds[4].run(step, wrapper)
        assert all(same for _, same in outs)
        for rank, ((over, everyone), _) in enumerate(outs):
            both = "0, 1" if rank < 2 else "2, 3"
            assert (
                f"{wrapper.__name__}: rank {both[0]} brought 0.0, of which ranks {both} hold different slices" in over
            )
            assert "rank 0 brought 0.0, of which ranks 0, 1 hold different slices; give a group of ranks" in everyone


def test_modules_are_let_go(worlds):
    def step():
        import gc
        import weakref

        model = FullyShardedDataParallel(deep_mlp(WIDTH, 3))
        loss_of(model, *batch()).backward()
        model.finish_gradient_synchronization()
        shard = weakref.ref(model._units[0].flats[0].shard)
        del model
        gc.collect()
        return shard() is None

    assert worlds[2].run(step) == [True, True]
