"""Pipelines on real ranks: gradients of one process, what travels, what is held, and what is refused on all ranks."""

import copy
import itertools
import random
import weakref

import pytest
import test_parallel_pipeline_schedules as on_paper
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lecture_lib import RankError
from lecture_lib.parallel import pipeline
from lecture_lib.parallel.model import Block, Transformer, deep_mlp, next_token_loss
from lecture_lib.parallel.pipeline.backward import Delayed, Splitter
from lecture_lib.trace import ledger, region, timeline

MAKERS = on_paper.MAKERS


@pytest.fixture(scope="module", params=[2, 3, 4])
def sized(request, worlds):
    return worlds[request.param]


# ---- what ranks run --------------------------------------------------------------------------------------------------


def mlp(stages: int, batch: int):
    torch.manual_seed(0)
    model = deep_mlp(width=16, layers=stages)
    return model, list(model), F.mse_loss, torch.randn(batch, 16), torch.randn(batch, 16)


def transformer(stages: int, batch: int, tied: bool = True):
    torch.manual_seed(0)
    size = dict(hidden=16, heads=2, kv_heads=1, ffn_hidden=32, vocab=11)
    model = Transformer(layers=max(2, stages - 2), tied=tied, **size)
    return model, model.layers(), next_token_loss, *torch.randint(11, (2, batch, 6))


def in_one_process(model, loss_fn, x, y) -> torch.Tensor:
    """The loss of the whole batch; the gradients are in the model."""
    loss = loss_fn(model(x), y)
    loss.backward()
    return loss.detach()


def differences(mine: nn.Module, alone: nn.Module, parameters) -> list[str]:
    """Parameters of a rank whose gradient is not that of one process."""
    names = {parameter: name for name, parameter in mine.named_parameters()}
    expected = dict(alone.named_parameters())
    wrong, seen = [], 0
    for parameter in parameters:
        name = names[parameter]
        seen += 1
        largest = expected[name].grad.abs().max()
        assert largest > 0  # else nothing is compared
        if parameter.grad is None or (parameter.grad - expected[name].grad).abs().max() > 1e-5 * largest:
            wrong.append(name)
    assert seen
    return wrong


def step_of(schedule, case=mlp, per_micro_batch=2, **options) -> list[str]:
    model, layers, loss_fn, x, y = case(schedule.stages, schedule.micro_batches * per_micro_batch)
    alone = copy.deepcopy(model)
    loss = in_one_process(alone, loss_fn, x, y)
    pipe = pipeline.Pipeline(pipeline.cut(layers, schedule.stages), schedule, loss_fn, **options)
    found = pipe.step(x, y)
    wrong = differences(model, alone, pipe.parameters())
    if (found is not None) != (schedule.rank_of[-1] == dist.get_rank()):
        wrong.append("the loss is on another rank")
    if found is not None and not torch.allclose(found, loss, rtol=1e-5):
        wrong.append(f"loss {found} instead of {loss}")
    return wrong


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("case, micro_batches", [(mlp, 1), (mlp, 5), (mlp, 8), (transformer, 5)])
def test_loss_and_gradients_are_those_of_one_process(sized, name, case, micro_batches):
    schedule = on_paper.make(name, sized.size, micro_batches)
    assert sized.run(step_of, schedule, case) == [[]] * sized.size


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zbv"])
@pytest.mark.parametrize("case", [mlp, transformer])
def test_recomputing_changes_nothing(sized, name, case):
    schedule = on_paper.make(name, sized.size, 4)
    assert sized.run(step_of, schedule, case, recompute=True) == [[]] * sized.size


@pytest.mark.parametrize("seed", range(6))
def test_any_valid_table_runs(sized, seed):
    rng = random.Random(seed)
    schedule = on_paper.random_table(rng, sized.size, sized.size + rng.randrange(4), rng.randrange(1, 6))
    assert sized.run(step_of, schedule) == [[]] * sized.size


def train(schedule, steps: int) -> tuple[list, list]:
    """Losses of a pipeline, on every rank, and of one process."""
    model, layers, loss_fn, x, y = transformer(schedule.stages, schedule.micro_batches)
    alone = copy.deepcopy(model)
    pipe = pipeline.Pipeline(pipeline.cut(layers, schedule.stages), schedule, loss_fn)
    mine, theirs = torch.optim.SGD(pipe.parameters(), lr=0.5), torch.optim.SGD(alone.parameters(), lr=0.5)
    losses = [], []
    for _ in range(steps):
        for optimizer in (mine, theirs):
            optimizer.zero_grad()
        losses[0].append(pipe.step(x, y, share_loss=True).item())
        losses[1].append(in_one_process(alone, loss_fn, x, y).item())
        mine.step()
        theirs.step()
    losses[0].append(pipe.evaluate(x, y, share_loss=True).item())
    losses[1].append(loss_fn(alone(x), y).item())
    assert all(p.grad is not None for p in pipe.parameters())
    return losses


@pytest.mark.parametrize("name", ["one_f_one_b", "zbv"])
def test_training_goes_as_in_one_process(world, name):
    found = world.run(train, on_paper.make(name, 4, 4), 4)
    for mine, alone in found:
        assert mine == pytest.approx(alone, rel=1e-4) and mine == found[0][0]
        assert alone[-1] < alone[0]


def evaluate_first(schedule) -> tuple:
    model, layers, loss_fn, x, y = mlp(schedule.stages, schedule.micro_batches)
    pipe = pipeline.Pipeline(pipeline.cut(layers, schedule.stages), schedule, loss_fn)
    with ledger() as led:
        loss = pipe.evaluate(x, y)
    with torch.no_grad():
        expected = loss_fn(model(x), y)
    return loss, expected, [p.grad for p in pipe.parameters()], sum(call.bytes_sent for call in led.calls)


def test_evaluating_goes_forward_only(world):
    *others, last = world.run(evaluate_first, pipeline.zero_bubble_h1(4, 6))
    torch.testing.assert_close(last[0], last[1])
    assert [found[0] for found in others] == [None] * 3
    assert all(grad is None for found in (*others, last) for grad in found[2])
    assert [found[3] for found in (*others, last)] == [6 * 16 * 4] * 3 + [0]


# ---- what travels ----------------------------------------------------------------------------------------------------


def record(schedule, case=mlp, tied=None):
    more = {} if tied is None else {"tied": tied}
    _, layers, loss_fn, x, y = case(schedule.stages, schedule.micro_batches * 2, **more)
    stages = pipeline.cut(layers, schedule.stages)
    with ledger() as built:
        pipe = pipeline.Pipeline(stages, schedule, loss_fn, example=(x, y))
    with ledger() as led:
        pipe.step(x, y)
    return built.calls, led.calls


@pytest.mark.parametrize("name", MAKERS)
def test_activations_go_down_and_gradients_come_back(world, name):
    schedule = on_paper.make(name, 4, 8)
    micro_batch = 2 * 16 * 4  # bytes: samples, width, float32
    for rank, (built, calls) in enumerate(world.run(record, schedule)):
        assert built == []  # the trial is left out
        out = {+1: 0, -1: 0}  # boundaries to another rank, by direction, of this rank's stages
        for a, b in itertools.pairwise(range(schedule.stages)):
            if schedule.rank_of[a] != schedule.rank_of[b]:
                out[+1] += schedule.rank_of[a] == rank
                out[-1] += schedule.rank_of[b] == rank
        sends = [call for call in calls if call.name == "send"]
        assert {call.name for call in calls} == {"send", "recv"}
        assert len(sends) == 8 * (out[+1] + out[-1]) == len(calls) - len(sends)
        assert sum(call.bytes_sent for call in calls) == len(sends) * micro_batch


def test_interleaving_sends_v_times_as_much(world):
    def sent(schedule):
        return sum(call.bytes_sent for _, calls in world.run(record, schedule) for call in calls)

    p, m, micro_batch = 4, 8, 2 * 16 * 4
    for v in (1, 2, 3):
        assert sent(pipeline.interleaved(p, m, v)) == 2 * m * (p * v - 1) * micro_batch


@pytest.mark.parametrize("name, sent", [("gpipe", [1, 0, 0, 1]), ("zbv", [0, 0, 0, 0])])
def test_a_tied_embedding_sends_its_gradient_once(world, name, sent):
    """Between the first and the last rank; in a V these are one and the same."""
    schedule = on_paper.make(name, 4, 4)
    tied, untied = (world.run(record, schedule, transformer, tied) for tied in (True, False))
    weight = 11 * 16 * 4
    for rank, ((built, calls), (_, plain)) in enumerate(zip(tied, untied)):
        more = sum(call.bytes_sent for call in calls) - sum(call.bytes_sent for call in plain)
        assert more == sent[rank] * weight
        assert sum(call.bytes_sent for call in built) == (weight if rank == 0 and name == "gpipe" else 0)


def gantt_of(schedule):
    _, layers, loss_fn, x, y = mlp(schedule.stages, schedule.micro_batches)
    pipe = pipeline.Pipeline(pipeline.cut(layers, schedule.stages), schedule, loss_fn, example=(x, y))
    with timeline() as line, region("step"):
        pipe.step(x, y)
    return line


@pytest.mark.parametrize("name", ["one_f_one_b", "zbv"])
def test_a_real_run_is_read_from_its_timelines(world, name):
    schedule = on_paper.make(name, 4, 4)
    lines = world.run(gantt_of, schedule)
    run = pipeline.measured(schedule, lines)
    end = {action: end for _, action, _, end in run.bars()}
    for _, action, begin, _ in run.bars():  # nothing began before its input was there; clocks agree to some 50 us
        for before in on_paper.dependencies(schedule)[action]:
            assert end[before] <= begin + 1e-3
    assert all(event.end is not None for line in lines for event in line.events)


# ---- what is held ----------------------------------------------------------------------------------------------------

live: set = set()  # tokens of graphs that are still there, on this rank
most = 0


class Token:
    pass


class Held(torch.autograd.Function):
    """y = x w, and a token that lives as long as the graph."""

    @staticmethod
    def forward(ctx, x, weight):
        global most
        ctx.token, ctx.save_for_backward = Token(), None
        live.add(id(ctx.token))
        weakref.finalize(ctx.token, live.discard, id(ctx.token))
        most = max(most, len(live))
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient.sum().view(1, 1)


class Holding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))

    def forward(self, x):
        return Held.apply(x, self.weight)


def most_held(schedule, recompute: bool) -> tuple[int, int]:
    global most
    live.clear()
    stages = [Holding() for _ in range(schedule.stages)]
    x = torch.ones(schedule.micro_batches, 2)
    pipe = pipeline.Pipeline(stages, schedule, F.mse_loss, example=(x, x), recompute=recompute)
    live.clear()
    most = 0
    pipe.step(x, x)
    return most, len(live)


@pytest.mark.parametrize("name", MAKERS)
def test_a_rank_holds_what_the_table_says(world, name):
    schedule = on_paper.make(name, 4, 8)
    found = world.run(most_held, schedule, False)
    assert tuple(most for most, _ in found) == pipeline.peak_in_flight(schedule)
    assert [left for _, left in found] == [0] * 4


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "interleaved"])
def test_with_recomputation_one_graph_at_a_time(world, name):
    assert world.run(most_held, on_paper.make(name, 4, 8), True) == [(1, 0)] * 4


# ---- the backward pass in two halves ---------------------------------------------------------------------------------


class Twice(nn.Module):
    """One linear layer, used twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


class Borrowing(nn.Module):
    """A weight that belongs to a module which is never called."""

    def __init__(self):
        super().__init__()
        self.lender, self.gain = nn.Linear(8, 8), nn.Parameter(torch.ones(8, 8))

    def forward(self, x):
        return F.linear(x, self.lender.weight) @ self.gain


class Named(nn.Module):
    """Called with a keyword; returns a dictionary with a number and two tensors."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, *, x, scale):
        return {"scaled": scale * x @ self.weight, "number": 3, "squared": (x @ self.weight) ** 2}


class CallsNamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Named()

    def forward(self, x):
        found = self.inner(x=x, scale=2.0)
        return found["scaled"] + found["number"] * found["squared"]


class OfAList(nn.Module):
    """Called with a list of tensors."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, parts):
        return sum(parts) @ self.weight


class CallsOfAList(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = OfAList()

    def forward(self, x):
        return self.inner([torch.tanh(x), x])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        y, (hidden, _) = self.layer(x)
        return y + hidden.transpose(0, 1)


def modules() -> dict:
    torch.manual_seed(0)
    block, tied = Block(8, 2, 1, 16), nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    tied[2].weight = tied[0].weight
    frozen = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    frozen[0].requires_grad_(False)
    some = nn.Linear(8, 8)
    some.bias.requires_grad_(False)
    x = torch.randn(3, 5, 8)
    return {
        "linear": (nn.Linear(8, 4), x),
        "in place": (nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)), x),
        "block": (block, x),
        "twice": (Twice(), x),
        "tied": (tied, x),
        "frozen": (frozen, x),
        "partly frozen": (some, x),
        "borrowing": (Borrowing(), x),
        "keywords": (CallsNamed(), x),
        "list": (CallsOfAList(), x),
        "recurrent": (Recurrent(), x),
        "convolution": (nn.Sequential(nn.Conv1d(5, 6, 3), nn.GroupNorm(2, 6)), x),
        "embedding": (nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8)), torch.randint(9, (3, 5))),
        "no parameters": (nn.GELU(), x),
    }


LATE = {  # which parameters have no gradient before W
    "linear": {"weight", "bias"},
    "in place": {"0.weight", "0.bias", "2.weight", "2.bias"},
    "block": {f"attention.{n}.weight" for n in ("query", "key", "value", "output")}
    | {f"mlp.{n}.weight" for n in ("gate", "up", "down")},
    "twice": {"layer.weight", "layer.bias"},
    "tied": {"0.weight", "0.bias", "2.bias"},
    "frozen": {"1.weight", "1.bias"},
    "partly frozen": {"weight"},
    "borrowing": set(),
    "keywords": {"inner.weight"},
    "list": {"inner.weight"},
    "recurrent": {f"layer.{n}_l0" for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")},
    "convolution": {"0.weight", "0.bias"},
    "embedding": {"0.weight", "1.weight", "1.bias"},
    "no parameters": set(),
}


@pytest.mark.parametrize("name", LATE)
def test_two_halves_give_the_same_gradients(name):
    module, x = modules()[name]
    alone, inputs = copy.deepcopy(module), [x.clone(), x.clone()]
    if x.is_floating_point():
        for one in inputs:
            one.requires_grad_()
    splitter, delayed = Splitter(module), Delayed()
    for _ in range(2):  # gradients add up
        with splitter.delaying(delayed):
            y = module(inputs[0])
        gradient = torch.randn_like(y)
        alone(inputs[1]).backward(gradient)
        before = {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}
        y.backward(gradient)  # I
        if x.is_floating_point():
            torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
        late = {n for n, p in module.named_parameters() if p.requires_grad and _same(p.grad, before[n])}
        assert late == LATE[name] | ({"lender.bias"} if name == "borrowing" else set())  # which nobody uses
        delayed.compute()  # W
        for p, q in zip(module.parameters(), alone.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad)


def _same(a, b) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def test_between_i_and_w_less_is_held_and_after_w_nothing():
    live = {}

    def keep(tensor):
        token = Token()
        live[id(token)] = tensor.numel() * tensor.element_size()
        weakref.finalize(token, live.pop, id(token))
        token.tensor = tensor
        return token

    module, x = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))), torch.randn(4, 8)
    splitter, delayed = Splitter(module), Delayed()
    with splitter.delaying(delayed), torch.autograd.graph.saved_tensors_hooks(keep, lambda token: token.tensor):
        y = module(x.requires_grad_())
    activation, weights = 4 * 8 * 4, 3 * 8 * 8 * 4
    assert sum(live.values()) == 3 * 2 * activation + weights  # what linear layers take and GELUs take; the weights
    y.backward(torch.ones_like(y))
    del y
    assert sum(live.values()) == 3 * activation + weights  # what linear layers take
    delayed.compute()
    assert sum(live.values()) == 0


def test_outside_the_block_a_splitter_does_nothing():
    module, x = modules()["block"]
    Splitter(module)
    module(x).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


# ---- stages of all kinds ---------------------------------------------------------------------------------------------


class Cast(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


class Apart(nn.Module):
    """(batch, 6) -> (2, batch, 3), not contiguous."""

    def forward(self, x):
        return x.unflatten(1, (3, 2)).permute(2, 0, 1)


def shapes_that_change(schedule) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 6), Cast(torch.float64), Apart(), nn.Linear(3, 5, dtype=torch.float64), Cast(torch.float32)
    )
    model.append(nn.Linear(5, 2))
    cuts = {3: (2, 3, 6), 4: (1, 2, 4, 6)}[schedule.stages]
    stages = [model[a:b] for a, b in itertools.pairwise((0, *cuts))]
    x, y = torch.randn(8, 4), torch.randn(2, 8, 2)

    def loss_fn(output, target):  # (2, micro-batch, 2); targets come (micro-batch, 2, 2)
        return F.mse_loss(output, target.transpose(0, 1))

    alone = copy.deepcopy(model)
    in_one_process(alone, loss_fn, x, y.transpose(0, 1))
    pipe = pipeline.Pipeline(stages, schedule, loss_fn)
    pipe.step(x, y.transpose(0, 1))
    return differences(model, alone, pipe.parameters()) if [*pipe.parameters()] else []


@pytest.mark.parametrize("name", ["one_f_one_b", "zero_bubble_h1"])
def test_shapes_and_dtypes_change_from_stage_to_stage(world, name):
    assert world.run(shapes_that_change, on_paper.make(name, 4, 4)) == [[]] * 4


def odd_stages(kind: str) -> list[str]:
    schedule = pipeline.zero_bubble_h1(4, 4)
    torch.manual_seed(0)
    model = deep_mlp(width=8, layers=4)
    if kind == "frozen":
        model[0].requires_grad_(False)
        model[4].requires_grad_(False)
    if kind == "uneven":
        stages = [model[:5], model[5:6], model[6:7], model[7:]]
    else:
        stages = pipeline.cut(model, 4)
    if kind == "meta":
        stages = [s if i == dist.get_rank() else copy.deepcopy(s).to("meta") for i, s in enumerate(stages)]
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    alone = copy.deepcopy(model)
    in_one_process(alone, F.mse_loss, x, y)
    pipe = pipeline.Pipeline(stages, schedule, F.mse_loss)
    mine = dist.get_rank()
    if kind == "data where it is used":
        pipe.step(x if mine == 0 else None, y if mine == 3 else None)
    else:
        pipe.step(x, y)
    trained = [p for p in pipe.parameters() if p.requires_grad]
    assert all(p.grad is None for p in pipe.parameters() if not p.requires_grad)
    return differences(model, alone, trained) if trained else []


@pytest.mark.parametrize("kind", ["uneven", "frozen", "meta", "data where it is used"])
def test_stages_of_all_kinds(world, kind):
    assert world.run(odd_stages, kind) == [[]] * 4


def three_holders() -> tuple:
    """One matrix in three of four stages, over two steps without clearing gradients; the copies begin differently."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(4)))
    model[1].weight = model[3].weight = model[0].weight
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    alone = copy.deepcopy(model)
    for _ in range(2):
        in_one_process(alone, F.mse_loss, x, y)
    with torch.no_grad():
        model[0].weight += dist.get_rank()  # rank 0's is the one that counts
    pipe = pipeline.Pipeline(list(model), pipeline.one_f_one_b(4, 2), F.mse_loss)
    for _ in range(2):
        pipe.step(x, y)
    return differences(model, alone, pipe.parameters()), next(pipe.parameters()).grad


def frozen_tied() -> tuple:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(4)))
    model[3].weight = model[0].weight
    model[0].weight.requires_grad_(False)
    pipe = pipeline.Pipeline(list(model), pipeline.gpipe(4, 2), F.mse_loss)
    with ledger() as led:
        pipe.step(torch.ones(2, 6), torch.ones(2, 6))
    return next(pipe.parameters()).grad is None, sum(call.bytes_sent for call in led.calls)


def test_a_tied_parameter_that_is_not_trained_sends_nothing(world):
    activation = 6 * 4
    expected = [(True, 2), (False, 4), (False, 4), (True, 2)]  # no gradient; messages of 2 micro-batches
    assert world.run(frozen_tied) == [(none, messages * activation) for none, messages in expected]


def test_a_parameter_of_three_ranks_starts_alike_and_gets_the_sum(world):
    found = world.run(three_holders)
    assert [wrong for wrong, _ in found] == [[]] * 4
    assert torch.equal(found[0][1], found[1][1]) and torch.equal(found[0][1], found[3][1])


def with_dropout(recompute: bool) -> list:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(4)))
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    pipe = pipeline.Pipeline(list(model), pipeline.gpipe(4, 4), F.mse_loss, example=(x, y), recompute=recompute)
    torch.manual_seed(dist.get_rank())
    pipe.step(x, y)
    return [p.grad for p in pipe.parameters()]


def test_dropout_falls_alike_when_it_is_recomputed(world):
    for kept, recomputed in zip(world.run(with_dropout, False), world.run(with_dropout, True)):
        torch.testing.assert_close(kept, recomputed, rtol=0, atol=0)


def a_trial_leaves_no_trace() -> tuple:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)) for _ in range(4)))
    before, random_before = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    pipe = pipeline.Pipeline(list(model), pipeline.gpipe(4, 4), F.mse_loss, example=(x, x))
    same = all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    untouched = same and torch.equal(random_before, torch.get_rng_state())
    pipe.step(x, x)
    return untouched, int(pipe.stages[dist.get_rank()][1].num_batches_tracked)


def test_the_trial_leaves_no_trace(world):
    assert world.run(a_trial_leaves_no_trace) == [(True, 4)] * 4


def two_pipelines(schedule) -> list[str]:
    """Data parallel over two pipelines of two ranks, each with half of the batch."""
    rank = dist.get_rank()
    pipes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    same_stages = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model, layers, loss_fn, x, y = transformer(schedule.stages, 16)
    alone = copy.deepcopy(model)
    in_one_process(alone, loss_fn, x, y)
    half = slice(0, 8) if rank < 2 else slice(8, 16)
    stages = pipeline.cut(layers, schedule.stages)
    pipe = pipeline.Pipeline(stages, schedule, loss_fn, group=pipes[rank // 2])
    pipe.step(x[half], y[half])
    for parameter in pipe.parameters():
        dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, same_stages[rank % 2])
    try:
        pipeline.Pipeline(stages, schedule, loss_fn, group=pipes[1 - rank // 2])
    except ValueError as error:
        assert str(error) == f"Pipeline: rank {rank} is not in this group; only its ranks build it."
    else:
        return ["a stranger was let in"]
    return differences(model, alone, pipe.parameters())


@pytest.mark.parametrize("name", ["one_f_one_b", "zbv"])
def test_in_a_group(world, name):
    assert world.run(two_pipelines, on_paper.make(name, 2, 4)) == [[]] * 4


def timed(layers: int) -> list[float]:
    return pipeline.times_of(
        [nn.Embedding(9, 4), *(nn.Linear(4, 4) for _ in range(layers - 1))], torch.tensor([[1, 2]])
    )


def test_times_are_measured_on_one_rank(world):
    found = world.run(timed, 4)
    assert found == [found[0]] * 4 and len(found[0]) == 4 and all(seconds > 0 for seconds in found[0])


# ---- what a stage may do, and what a caller may not ------------------------------------------------------------------


def linears(n: int = 4, width: int = 8, dtype=torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, dtype=dtype) for _ in range(n)))


def autocast_changes(first: bool) -> None:
    """The trial in autocast and the step outside, or the other way round."""
    x = torch.ones(4, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=first):
        pipe = pipeline.Pipeline(list(linears()), pipeline.gpipe(4, 2), F.mse_loss, example=(x, x))
    with torch.autocast("cpu", torch.bfloat16, enabled=not first):
        pipe.step(x, x)


@pytest.mark.parametrize("first, trial, later", [(False, "float32", "bfloat16"), (True, "bfloat16", "float32")])
def test_what_is_sent_is_what_was_agreed_on_trial(world, first, trial, later):
    said = f"stage 0 .rank 0. returns shape .2, 8., {later}, and on trial returned shape .2, 8., {trial}; use the same"
    with pytest.raises(RankError, match=said):
        world.run(autocast_changes, first)


def in_autocast() -> tuple:
    model, x = linears(), torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        pipe = pipeline.Pipeline(list(model), pipeline.gpipe(4, 2), F.mse_loss)
        return pipe.step(x, x, share_loss=True), F.mse_loss(model(x), x).detach()


def test_all_under_one_autocast(world):
    for found, expected in world.run(in_autocast):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=0)


def shared_loss(dtype) -> list:
    model = linears(dtype=dtype)
    x = torch.randn(4, 8, dtype=dtype, generator=torch.Generator().manual_seed(1))
    pipe = pipeline.Pipeline(list(model), pipeline.gpipe(4, 2), F.mse_loss)
    return [pipe.step(x, x, share_loss=True), pipe.evaluate(x, x, share_loss=True), F.mse_loss(model(x), x).detach()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_all_ranks_get_the_loss_in_its_dtype(world, dtype):
    for *found, expected in world.run(shared_loss, dtype):
        for loss in found:
            torch.testing.assert_close(loss, expected)


class Doubles(nn.Module):
    """Writes into its input."""

    def forward(self, x):
        return x.mul_(2.0)


def writes_into_inputs(schedule, recompute: bool) -> list:
    def loss_fn(output, target):
        return F.mse_loss(output, target.sub_(1.0))

    # The first stage writes into the batch, as in one process; the others into what they receive.
    parts = [[Doubles(), nn.Linear(8, 8)], *([nn.SiLU(inplace=True), nn.Linear(8, 8)] for _ in range(7))]
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(*part) for part in parts[: schedule.stages]))
    alone, x, y = copy.deepcopy(model), torch.randn(8, 8), torch.randn(8, 8)
    batch = x.clone(), y.clone()
    in_one_process(alone, loss_fn, x.clone(), y.clone())
    pipe = pipeline.Pipeline(list(model), schedule, loss_fn, example=batch, recompute=recompute)
    wrong = [] if torch.equal(batch[0], x) and torch.equal(batch[1], y) else ["the trial changed the batch"]
    pipe.step(*batch)
    return wrong + differences(model, alone, pipe.parameters())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["gpipe", "zero_bubble_h1", "zbv"])
def test_a_stage_may_begin_in_place(world, name, recompute):
    assert world.run(writes_into_inputs, on_paper.make(name, 4, 4), recompute) == [[]] * 4


def tied_on_one_rank() -> str:
    model = linears()
    if dist.get_rank() == 1:
        model[3].weight = model[0].weight
    try:
        pipeline.Pipeline(list(model), pipeline.gpipe(4, 2), F.mse_loss)
    except ValueError as error:
        return str(error)


def test_stages_tied_on_one_rank_only(world):
    said = (
        "Pipeline: the ranks disagree: rank 1 brought stage 3.weight of shape (8, 8), float32, tied to stage 0.weight; "
        "rank 0 brought stage 3.weight of shape (8, 8), float32. Build the same on every rank."
    )
    assert world.run(tied_on_one_rank) == [said] * 4


def where_gradients_are_off(mode) -> str:
    pipe, x = pipeline.Pipeline(list(linears()), pipeline.gpipe(4, 2), F.mse_loss), torch.ones(4, 8)
    with mode():
        try:
            pipe.step(x, x)
        except ValueError as error:
            assert pipe.evaluate(x, x, share_loss=True) > 0  # as the message says
            return str(error)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_needs_gradients(world, mode):
    found = world.run(where_gradients_are_off, mode)
    assert found == [found[0]] * 4
    assert found[0].startswith("Pipeline: step was called where gradients are off (torch.no_grad or inference_mode)")


def a_later_batch_is_missing() -> list[str]:
    """Two ranks of four, which both notice; ranks between them would need no batch."""
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    pipe, x = pipeline.Pipeline(list(linears(2)), pipeline.gpipe(2, 2), F.mse_loss, group=pair), torch.ones(4, 8)
    pipe.step(x, x)
    said = []
    for method in (pipe.step, pipe.evaluate):
        try:
            method(None, None)
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_later_batch_that_is_missing(world):
    for rank, said in enumerate(world.run(a_later_batch_is_missing)):
        stage, name = rank % 2, ("inputs", "targets")[rank % 2]
        assert said == [f"Pipeline: rank {rank} holds stage {stage} and got {name}=None; it needs a tensor."] * 2


def hooks_left() -> list[int]:
    stages, x = list(linears()), torch.ones(4, 8)
    mine, found = stages[dist.get_rank()], []
    for _ in range(3):
        pipe = pipeline.Pipeline(stages, pipeline.zero_bubble_h1(4, 2), F.mse_loss)
        pipe.step(x, x)
        found.append((len(mine._forward_hooks), len(mine._forward_pre_hooks)))
    del pipe
    return [*found, (len(mine._forward_hooks), len(mine._forward_pre_hooks))]


def test_a_pipeline_that_is_gone_leaves_no_hooks(world):
    for found in world.run(hooks_left):
        assert found == [(1, 1), (1, 1), (1, 1), (0, 0)]


# ---- bad input -------------------------------------------------------------------------------------------------------


class Pair(nn.Module):
    def forward(self, x):
        return x, x


class Rounds(nn.Module):
    def forward(self, x):
        return x.long()


BACKWARD_FIRST = on_paper.table(*(f"{r}B0 {r}F0" for r in range(4)))


def bad(kind: str) -> str:
    rank, made = dist.get_rank(), dict(schedule=pipeline.gpipe(4, 4), loss_fn=F.mse_loss)
    torch.manual_seed(0)
    stages, x, y = [nn.Linear(8, 8) for _ in range(4)], torch.ones(8, 8), torch.ones(8, 8)
    match kind:
        case "ranks":
            made["schedule"] = pipeline.gpipe(3, 4)
        case "no schedule":
            made["schedule"] = "gpipe"
        case "not valid":
            made["schedule"] = BACKWARD_FIRST
        case "stages":
            stages = stages[:3]
        case "no module":
            stages[2] = torch.tanh
        case "one rank differs":
            stages[1] = nn.Linear(8, 7 + (rank != 2))
        case "schedules differ":
            made["schedule"] = (pipeline.gpipe if rank else pipeline.one_f_one_b)(4, 4)
        case "tuple":
            stages[1] = Pair()
        case "integers":
            stages[2] = Rounds()
        case "do not fit":
            stages[2] = nn.Linear(9, 8)
        case "micro-batches":
            x, y = torch.ones(6, 8), torch.ones(6, 8)
        case "empty":
            x, y = torch.ones(0, 8), torch.ones(0, 8)
        case "no targets":
            y = None
        case "loss":
            made["loss_fn"] = nn.MSELoss(reduction="none")
        case "loss fails":
            made["loss_fn"] = F.cross_entropy
            y = torch.ones(8, 3, 3)
    messages = []
    for example in ((x, y), None):  # at construction, and else in the first step
        try:
            pipeline.Pipeline(stages, example=example, **made).step(x, y)
            messages.append("nothing happened")
        except ValueError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize(
    "kind, said",
    [
        ("ranks", "rank 0 brought gpipe for 3 ranks, and the group has 4; make it for 4."),
        ("no schedule", "rank 0 brought a schedule of type str; make one, as with pipeline.gpipe(4, 8)."),
        (
            "not valid",
            "rank 0 brought a schedule that cannot be run: rank 0, step 0: 0B0 comes before 0F0, which is step",
        ),
        ("stages", "rank 0 brought 3 stages, and gpipe has 4; cut the model into 4."),
        ("no module", "rank 0 brought a stage 2 of type builtin_function_or_method; a stage is an nn.Module."),
        ("one rank differs", "the ranks disagree: rank 2 brought stage 1.weight of shape (7, 8), float32; rank 0"),
        (
            "schedules differ",
            "the ranks disagree: rank 0 brought the schedule one_f_one_b for 4 micro-batches; rank 1 brought",
        ),
        ("tuple", "stage 1 (rank 1) returns a tuple of 2; a stage hands on one tensor, so let it return one"),
        ("integers", "stage 2 (rank 2) returns shape (2, 8), int64; gradients can only come back through a floating-"),
        ("do not fit", "stage 2 (rank 2) fails on shape (2, 8), float32: RuntimeError: "),
        ("micro-batches", "4 micro-batches do not divide inputs of 6 samples; use a multiple of 4."),
        ("empty", "4 micro-batches do not divide inputs of 0 samples; use a multiple of 4."),
        ("no targets", "rank 3 holds stage 3 and got targets=None; it needs a tensor."),
        ("loss", "loss_fn returns shape (2, 8), float32; it has to return the mean over the micro-batch, a tensor of"),
        ("loss fails", "loss_fn fails on an output of shape (2, 8), float32 and targets of shape (2, 3, 3), float32: "),
    ],
)
def test_bad_input_is_one_error_on_all_ranks(world, kind, said):
    found = world.run(bad, kind)
    assert found == [found[0]] * 4
    for message in found[0]:
        assert message.startswith(f"Pipeline: {said}")


def test_more_stages_than_layers(world):
    with pytest.raises(RankError, match="3 layers cannot be cut into 4 stages; ask for 1 to 3, for a stage needs a"):
        world.run(lambda: pipeline.cut([nn.Identity()] * 3, 4))


def another_batch(first, then) -> str:
    pipe = pipeline.Pipeline([nn.Linear(8, 8) for _ in range(4)], pipeline.gpipe(4, 4), F.mse_loss)
    pipe.step(*map(torch.ones, first))
    try:
        pipe.step(*map(torch.ones, then))
    except ValueError as error:
        return str(error)


def test_a_batch_of_another_shape_is_refused(world):
    for then, name in ((((12, 8), (12, 8)), "inputs"), (((8, 8), (12, 8)), "targets")):
        said = (
            f"Pipeline: {name} of shape (12, 8), float32, after a first batch of shape (8, 8), float32; all batches "
            "have one shape. For another one, make another Pipeline of the same stages."
        )
        assert world.run(another_batch, ((8, 8), (8, 8)), then) == [said] * 4
