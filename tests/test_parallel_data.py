"""Data parallelism against one process and against DistributedDataParallel; what travels, when, and what is refused."""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from comparing import error_of, gradients, relative, weights
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lecture_lib.parallel.data import DataParallel, _shares, average_gradients, fill_buckets, sharded_batches
from lecture_lib.parallel.model import Transformer, deep_mlp
from lecture_lib.trace import ledger, region, timeline

SIZES = (1, 2, 3, 4)
WIDTH, SAMPLES, BATCH = 8, 22, 12  # an epoch is a batch of 12, which 1 to 4 ranks share equally, and a last one of 10


# ---- models ----------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """One weight in two layers, and used twice more by hand."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x):
        for _ in range(2):
            x = self.second(torch.tanh(self.first(x)))
        return x @ self.first.weight


class Frozen(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
        )
        self[2].requires_grad_(False)
        self[4].bias.requires_grad_(False)


class Unused(nn.Module):
    """A layer that nobody uses, and one that is used where the batch holds a positive first feature."""

    def __init__(self):
        super().__init__()
        self.used, self.never, self.sometimes = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        y = torch.tanh(self.used(x))
        rows = x[:, 0] > 1
        if rows.any():
            y = torch.where(rows[:, None], self.sometimes(y), y)
        return y


class Dtypes(nn.Module):
    """Parameters in float64 and float32, and one without elements."""

    def __init__(self):
        super().__init__()
        self.wide, self.usual = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Linear(WIDTH, WIDTH)
        self.empty, self.scale = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.usual(self.wide(x.double()).float()) * self.scale + self.empty.sum()


class Characters(Transformer):
    """Predicts the sign of the features, from left to right."""

    def forward(self, x):
        return super().forward((x > 0).long())


def small_transformer(tied: bool):
    return Characters(layers=2, hidden=16, heads=4, kv_heads=2, ffn_hidden=24, vocab=WIDTH, tied=tied)


MODELS = {
    "the lecture's MLP": lambda: deep_mlp(WIDTH, 4),
    "transformer": lambda: small_transformer(False),
    "transformer with a tied head": lambda: small_transformer(True),
    "tied": Tied,
    "frozen": Frozen,
    "unused": Unused,
    "several dtypes": Dtypes,
}
SOME = ("transformer with a tied head", "unused", "several dtypes")
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    # eps well above the rounding of a gradient, else AdamW turns what is nearly zero into a whole step
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
}


def samples(rows=SAMPLES):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def sum_of_losses(module, x, y):
    output = module(x)
    if isinstance(getattr(module, "module", module), Characters):
        return F.cross_entropy(output.flatten(0, 1), y.abs().long().flatten(), reduction="sum") / WIDTH
    return (output - y).square().mean(-1).sum()


# ---- against one process ---------------------------------------------------------------------------------------------


def check_against_one_process(bucket_mb):
    """Every model and optimizer, 3 steps beside one process on the whole batch. Returns what differs by more than 1e-5,
    which is some 100 roundings of float32."""
    wrong = []
    for name, make in MODELS.items():
        for optimizer, new_optimizer in OPTIMIZERS.items():
            if bucket_mb != 25 and (optimizer == "AdamW" or name not in SOME):
                continue  # the order of addition is all that a bucket changes
            torch.manual_seed(3)
            alone = make()
            torch.manual_seed(dist.get_rank())  # the first rank's values count
            model = DataParallel(copy.deepcopy(alone) if dist.get_rank() == 0 else make(), bucket_mb)
            ours, theirs = new_optimizer(model.parameters()), new_optimizer(alone.parameters())
            steps = [
                (mine, whole)
                for epoch in range(2)
                for mine, whole in zip(
                    sharded_batches(*samples(), batch_size=BATCH, epoch=epoch),
                    _shares(samples(), BATCH, epoch, seed=0, n=1, rank=0),
                )
            ]
            for (x, y, scale), (all_x, all_y, all_scale) in steps[:3]:
                ours.zero_grad()
                theirs.zero_grad()
                loss = scale * sum_of_losses(model, x, y)
                expected = all_scale * sum_of_losses(alone, all_x, all_y)
                loss.backward()
                model.finish_gradient_synchronization()
                expected.backward()
                loss = loss.detach()
                dist.all_reduce(loss, dist.ReduceOp.AVG)
                for what, off in {
                    "loss": abs(loss.item() / expected.item() - 1),
                    "gradients": relative(gradients(model.module), gradients(alone)),
                }.items():
                    if not off <= 1e-5:
                        wrong.append((name, optimizer, what, off))
                ours.step()
                theirs.step()
            off = relative(weights(model.module), weights(alone))
            if not off <= 1e-5:
                wrong.append((name, optimizer, "weights", off))
    return wrong


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("bucket_mb", [25.0, 0.0006, 0])
def test_equal_to_one_process(worlds, n, bucket_mb):
    assert worlds[n].run(check_against_one_process, bucket_mb) == [[]] * n


def test_the_five_line_version(worlds):
    def step():
        torch.manual_seed(3)
        module = Tied()
        x, y = samples(BATCH)
        alone = copy.deepcopy(module)
        (sum_of_losses(alone, x, y) / BATCH).backward()
        n, rank = dist.get_world_size(), dist.get_rank()
        F.mse_loss(module(x.chunk(n)[rank]), y.chunk(n)[rank]).backward()
        with ledger() as led:
            average_gradients(module)
        sizes = [p.numel() for p in module.parameters()]
        assert [(call.name, call.elements) for call in led.calls] == [("all_reduce", size) for size in sizes]
        return relative(gradients(module), gradients(alone))

    for n in SIZES:
        assert max(worlds[n].run(step)) <= 1e-5, n


# ---- against DistributedDataParallel ---------------------------------------------------------------------------------


def check_against_pytorch():
    n, rank, wrong = dist.get_world_size(), dist.get_rank(), []
    for name, make in MODELS.items():
        torch.manual_seed(3)
        theirs = make()
        ours = DataParallel(copy.deepcopy(theirs))
        theirs = nn.parallel.DistributedDataParallel(theirs, find_unused_parameters=name == "unused")
        steppers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (ours, theirs)]
        x, y = (tensor.chunk(n)[rank] for tensor in samples(BATCH))
        for _ in range(3):  # DistributedDataParallel makes its buckets anew after the first
            for model, optimizer in zip((ours, theirs), steppers):
                optimizer.zero_grad()
                (sum_of_losses(model, x, y) / len(x)).backward()
                if model is ours:
                    model.finish_gradient_synchronization()
                optimizer.step()
        a, b = weights(ours.module), weights(theirs.module)
        same = all(torch.equal(a[key], b[key]) for key in a)
        if relative(a, b) > 1e-6 or (n <= 2 and not same):
            wrong.append((name, relative(a, b)))
    return wrong


@pytest.mark.parametrize("n", SIZES)
def test_equal_to_distributed_data_parallel(worlds, n):
    """Bit for bit at 2 ranks, where there is one order of addition."""
    assert worlds[n].run(check_against_pytorch) == [[]] * n


def test_batch_norm_takes_the_first_ranks_running_means(worlds):
    def step():
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))
        module.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        module.register_buffer("narrow", torch.ones(3, dtype=torch.bfloat16))
        theirs = copy.deepcopy(module)
        n, rank = dist.get_world_size(), dist.get_rank()
        if rank:
            module.mask.zero_()
        model, x = DataParallel(module), samples(BATCH)[0].chunk(n)[rank]
        theirs = nn.parallel.DistributedDataParallel(theirs)
        for _ in range(3):
            for m in (model, theirs):
                m(x).square().mean().backward()
            model.finish_gradient_synchronization()
        model.eval()
        with ledger() as led:
            model(x)  # only in training: an evaluation sends nothing
        assert led.calls == [] and module.mask.all()
        same = all(torch.equal(a, b) for a, b in zip(module.buffers(), theirs.module.buffers()))
        return same and all(torch.equal(p.grad, q.grad) for p, q in zip(module.parameters(), theirs.parameters()))

    for n in (1, 2):
        assert worlds[n].run(step) == [True] * n


# ---- parameters that are not used ------------------------------------------------------------------------------------


def test_unused_on_some_ranks_counts_as_zero_and_on_all_as_none(worlds):
    def step(bucket_mb):
        model = DataParallel(Unused(), bucket_mb)
        rank = dist.get_rank()
        # Nothing but minus zeros comes from rank 1: a gradient that is there, and is not mistaken for none.
        x = torch.full((2, WIDTH), 2.0 if rank == 1 else 0.0)
        (-0.0 * model(x).sum()).backward()
        model.finish_gradient_synchronization()
        module = model.module
        return [p.grad is None for p in (module.used.weight, module.sometimes.weight, module.never.weight)]

    for bucket_mb in (25, 0):
        assert worlds[4].run(step, bucket_mb) == [[False, False, True]] * 4
        assert worlds[1].run(step, bucket_mb) == [[False, True, True]]


# ---- accumulation ----------------------------------------------------------------------------------------------------


def test_accumulation_sends_nothing_until_the_last_micro_batch(worlds):
    def step():
        torch.manual_seed(3)
        alone = Frozen()
        n, rank = dist.get_world_size(), dist.get_rank()
        model = DataParallel(copy.deepcopy(alone), bucket_mb=0)
        x, y = samples(BATCH)
        for _ in range(2):  # the second time, .grad begins as a view of a bucket
            for m in (model, alone):
                m.zero_grad()
            (sum_of_losses(alone, x, y) / BATCH).backward()
            *before, last = (pair for pair in zip(x.chunk(n)[rank].chunk(3), y.chunk(n)[rank].chunk(3)))
            with ledger() as led, model.no_sync():
                for a, b in before:
                    with model.no_sync():
                        pass
                    (sum_of_losses(model, a, b) * n / BATCH).backward()
            assert led.calls == []
            with ledger() as led:
                (sum_of_losses(model, *last) * n / BATCH).backward()
                model.finish_gradient_synchronization()
            trained = [p for p in model.parameters() if p.requires_grad]
            assert len(led.calls) == len(trained)
            assert led.bytes_sent * n == 2 * (n - 1) * sum(p.nbytes for p in trained)
            assert relative(gradients(model.module), gradients(alone)) <= 1e-5
        return "done"

    for n in SIZES:
        assert worlds[n].run(step) == ["done"] * n


def test_gradients_that_are_not_set_to_zero_add_up(worlds):
    def step(set_to_none):
        model = DataParallel(nn.Linear(WIDTH, 1))
        x = samples(BATCH)[0].chunk(4)[dist.get_rank()]
        grads = []
        for kept in (False, False, True):
            if not kept:
                model.zero_grad(set_to_none=set_to_none)
            model(x).sum().backward()
            model.finish_gradient_synchronization()
            grads.append(model.module.weight.grad.clone())
        return torch.equal(grads[0], grads[1]) and torch.allclose(grads[2], 2 * grads[0])

    assert worlds[4].run(step, True) == worlds[4].run(step, False) == [True] * 4


# ---- what travels, and when ------------------------------------------------------------------------------------------


def test_buckets_hold_what_fits_in_reverse_order_and_one_dtype():
    a, b, c, d = (nn.Parameter(torch.ones(size)) for size in (10, 20, 30, 100))
    wide = nn.Parameter(torch.ones(10, dtype=torch.float64))

    def buckets(limit, owner_of=lambda _: None):
        return [[id(p) for p in bucket.parameters] for bucket in fill_buckets([a, b, wide, c, d], limit, owner_of)]

    def ids(*groups):
        return [[id(p) for p in group] for group in groups]

    assert buckets(1e9) == ids([wide], [d, c, b, a])  # as they will be full
    assert buckets(240) == ids([d], [wide], [c, b, a])
    assert buckets(239) == ids([d], [wide], [c, b], [a])
    assert buckets(0) == ids([d], [c], [wide], [b], [a])
    assert buckets(1e9, {a: 0, b: 1, c: 0, d: 1, wide: 0}.get) == ids([wide], [d, b], [c, a])
    assert fill_buckets([], 1e6, lambda _: None) == []


def test_bytes_and_number_of_buckets(worlds):
    def step(bucket_mb):
        model = DataParallel(deep_mlp(WIDTH, 4), bucket_mb)  # 4 x 256 bytes
        with ledger() as led:
            model(samples(BATCH)[0]).sum().backward()
            model.finish_gradient_synchronization()
        return [(call.name, call.elements) for call in led.calls], led.bytes_sent

    for n in SIZES:
        for bucket_mb, elements in ((25, [256]), (0.0006, [128, 128]), (0.000512, [128, 128]), (0, [64] * 4)):
            for calls, sent in worlds[n].run(step, bucket_mb):
                assert calls == [("all_reduce", k) for k in elements] and n * sent == 2 * (n - 1) * 4 * 256


def test_a_module_without_parameters_to_train(worlds):
    def step():
        model = DataParallel(nn.Linear(2, 2).requires_grad_(False))
        empty = DataParallel(nn.ReLU())
        with ledger() as led:
            for m in (model, empty):
                m(torch.ones(1, 2))
                m.finish_gradient_synchronization()
        return led.calls

    assert worlds[2].run(step) == [[], []]


def test_gradients_travel_while_the_backward_pass_runs(worlds):
    def step():
        model = DataParallel(deep_mlp(64, 4), bucket_mb=0)
        loss = model(torch.ones(4, 64)).sum()
        with timeline() as line:
            with region("backward"):
                loss.backward()
            model.finish_gradient_synchronization()
        backward, *sent = line.events
        return [call.begin < backward.end for call in sent]

    assert worlds[4].run(step) == [[True] * 4] * 4


def test_ranks_whose_gradients_become_ready_in_another_order(worlds):
    def step():
        torch.manual_seed(0)
        parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        model = DataParallel(parts, bucket_mb=0)
        order = [0, 1, 2] if dist.get_rank() % 2 else [2, 0, 1]
        x = samples(4)[0]
        for i in order:
            x = parts[i](x)
        x.sum().backward()
        model.finish_gradient_synchronization()
        return [p.grad for p in parts.parameters()]

    outs = worlds[4].run(step)
    assert all(torch.equal(a, b) for out in outs for a, b in zip(out, outs[0]))


# ---- wrapping --------------------------------------------------------------------------------------------------------


def test_state_dict_is_the_bare_modules(worlds):
    def step():
        model = DataParallel(small_transformer(True))
        other = small_transformer(True)
        other.load_state_dict(model.state_dict())
        fresh = DataParallel(small_transformer(True))
        fresh.load_state_dict(other.state_dict())
        return relative(weights(fresh.module), weights(model.module)) == 0

    assert worlds[2].run(step) == [True, True]


def test_a_dropped_wrapper_does_nothing_any_more(worlds):
    def step():
        module = Tied()
        DataParallel(module)
        gc.collect()
        with ledger() as led:
            module(samples(4)[0]).sum().backward()  # bare again
        assert led.calls == []
        module.zero_grad()
        model = DataParallel(module)
        with ledger() as led:
            model(samples(4)[0]).sum().backward()
            model.finish_gradient_synchronization()
        return len(led.calls)

    assert worlds[2].run(step) == [1, 1]


def test_clipping_as_on_one_process(worlds):
    def step(max_norm):
        n, rank = dist.get_world_size(), dist.get_rank()
        torch.manual_seed(3)
        alone = Unused()
        model = DataParallel(copy.deepcopy(alone))
        x, y = samples(12)
        (alone(x) - y).square().mean().backward()
        (model(x.chunk(n)[rank]) - y.chunk(n)[rank]).square().mean().backward()
        model.finish_gradient_synchronization()
        theirs = nn.utils.clip_grad_norm_(alone.parameters(), max_norm)
        with ledger() as led:
            ours = model.clip_gradients(max_norm)
        return ours.item() / theirs.item() - 1, relative(gradients(model.module), gradients(alone)), led.bytes_sent

    for n in SIZES:
        for max_norm in (0.01, 100.0):
            outs = worlds[n].run(step, max_norm)
            assert all(abs(norm) <= 1e-5 and off <= 1e-5 and sent == 0 for norm, off, sent in outs)


def test_groups_of_two(worlds):
    """Ranks 0 and 1 train one model, 2 and 3 another; the same ranks across, as an own group, hold the same."""

    def step():
        rank = dist.get_rank()
        rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        group = rows[rank // 2]
        torch.manual_seed(rank)
        model = DataParallel(nn.Linear(WIDTH, 1, bias=False), group=group)
        x, y, scale = next(iter(sharded_batches(*samples(8), batch_size=4, epoch=rank // 2, group=group)))
        (scale * model(x).sum()).backward()
        model.finish_gradient_synchronization()
        whole = next(_shares(samples(8), 4, rank // 2, seed=0, n=1, rank=0))[0]
        assert torch.allclose(model.module.weight.grad[0], whole.mean(0))
        return model.module.weight.tolist()

    a, b, c, d = worlds[4].run(step)
    assert a == b != c == d


# ---- bad input -------------------------------------------------------------------------------------------------------


def wrapped(kind):
    odd = dist.get_rank() == 2
    modules = {
        "more": lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) if odd else nn.Sequential(nn.Linear(2, 2)),
        "shape": lambda: nn.Linear(2, 3 if odd else 2),
        "dtype": lambda: nn.Linear(2, 2, dtype=torch.float64 if odd else None),
        "frozen": lambda: nn.Linear(2, 2).requires_grad_(not odd),
        "buffer": lambda: nn.BatchNorm1d(2, track_running_stats=not odd),
        "tied": lambda: small_transformer(odd),
        "device": lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta" if odd else None)),
        "bucket": lambda: nn.Linear(2, 2),
    }
    return error_of(DataParallel, modules[kind](), 3 if odd and kind == "bucket" else 25)


REFUSED = {
    "more": "rank 2 brought 2 more than rank 0, the first of them 1.weight of shape (2, 2), float32.",
    "shape": "rank 2 brought weight of shape (3, 2), float32; rank 0 brought weight of shape (2, 2), float32.",
    "dtype": "rank 2 brought weight of shape (2, 2), float64; rank 0 brought weight of shape (2, 2), float32.",
    "frozen": "rank 2 brought weight of shape (2, 2), float32, frozen; rank 0 brought weight of shape (2, 2), float32.",
    "buffer": "rank 0 brought 3 more than rank 2, the first of them buffer running_mean of shape (2,), float32.",
    "tied": "rank 2 brought head.weight of shape (8, 16), float32, tied to embedding.weight; rank 0",
    "device": "rank 2 has 0.weight on cpu and 1.weight on meta; move the module to one device first.",
    "bucket": "rank 2 brought bucket_mb=3; rank 0 brought bucket_mb=25.",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_ranks_that_disagree(worlds, kind):
    errors = worlds[4].run(wrapped, kind)
    assert len(set(errors)) == 1 and errors[0].startswith("ValueError: DataParallel: ")
    assert REFUSED[kind] in errors[0]


def test_a_module_that_changed_after_wrapping(worlds):
    def step():
        errors = []
        for change in (
            lambda m: m.append(nn.Linear(2, 2)),
            lambda m: m[0].requires_grad_(False),
            lambda m: m.double(),
            lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(2, 2))),
        ):
            model = DataParallel(nn.Sequential(nn.Linear(2, 2)))
            change(model.module)
            errors.append(error_of(model, torch.ones(1, 2)))
        return errors

    for errors in worlds[2].run(step):
        assert all("changed" not in e and "after the module was wrapped; change the module first" in e for e in errors)
        assert [e.split("parameter ")[1].split(" ")[0] for e in errors] == ["1.bias", "0.bias", "0.bias", "0.weight"]


def test_a_second_backward_pass_and_a_fresh_start(worlds):
    def step():
        model = DataParallel(nn.Linear(WIDTH, 1, bias=False))
        x = samples(4)[0]
        model(x).sum().backward()
        error = error_of(model(x).sum().backward)
        model.finish_gradient_synchronization()
        model.zero_grad()
        model(x).sum().backward()
        model.finish_gradient_synchronization()
        return error, torch.allclose(model.module.weight.grad[0], x.sum(0))

    for error, same in worlds[2].run(step):
        assert "a second backward pass" in error and "no_sync()" in error and same


def test_an_exception_in_the_backward_pass_and_a_fresh_start(worlds):
    def step():
        class Breaks(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, g):
                raise ZeroDivisionError("on purpose")

        torch.manual_seed(0)
        model = DataParallel(deep_mlp(WIDTH, 3), bucket_mb=0)
        x = samples(4)[0]
        model(x).sum().backward()
        model.finish_gradient_synchronization()
        good = gradients(model.module)
        model.zero_grad()
        broken = model.module[2](Breaks.apply(model.module[1](model.module[0](x))))
        with pytest.raises(ZeroDivisionError):
            model.module[4](broken).sum().backward()
        model.finish_gradient_synchronization()
        model.zero_grad()
        model(x).sum().backward()
        model.finish_gradient_synchronization()
        return relative(gradients(model.module), good)

    assert worlds[2].run(step) == [0, 0]


def test_sparse_gradients_are_refused(worlds):
    def step():
        model = DataParallel(nn.Embedding(4, 2, sparse=True))
        return error_of(model(torch.tensor([1])).sum().backward)

    assert all("sparse=False" in error for error in worlds[2].run(step))


# ---- the batch -------------------------------------------------------------------------------------------------------


@given(samples=st.integers(0, 60), shares=st.integers(1, 6), per_rank=st.integers(1, 6), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=50)
def test_every_sample_once_in_an_epoch(samples, shares, per_rank, seed):
    batch_size, rows = shares * per_rank, torch.arange(samples)

    def epoch(number, n):
        ranks = [list(_shares((rows, 2 * rows), batch_size, number, seed, n, rank)) for rank in range(n)]
        assert len({len(batches) for batches in ranks}) == 1  # all take as many steps
        return list(zip(*ranks))

    batches = epoch(0, shares)
    seen = torch.cat([mine for batch in batches for mine, _, _ in batch]) if batches else rows
    assert sorted(seen.tolist()) == rows.tolist()
    assert all(torch.equal(double, 2 * mine) for batch in batches for mine, double, _ in batch)
    assert [sum(len(mine) for mine, _, _ in batch) for batch in batches] == [
        min(batch_size, samples - first) for first in range(0, samples, batch_size)
    ]
    # The same whole batches on one rank, and the mean over each from the shares.
    for batch, ((whole, _, _),) in zip(batches, epoch(0, 1), strict=True):
        assert torch.equal(torch.cat([mine for mine, _, _ in batch]), whole)
        mean = sum(scale * mine.double().sum() for mine, _, scale in batch) / shares
        torch.testing.assert_close(mean, whole.double().mean())
        assert max(len(mine) for mine, _, _ in batch) - min(len(mine) for mine, _, _ in batch) <= 1
    again = [mine.tolist() for batch in epoch(0, shares) for mine, _, _ in batch]
    assert again == [mine.tolist() for batch in batches for mine, _, _ in batch]


def test_each_epoch_and_seed_has_its_own_order():
    def order(**kwargs):
        ((whole, _),) = _shares((torch.arange(50),), 50, n=1, rank=0, **kwargs)
        return tuple(whole.tolist())

    assert len({order(epoch=epoch, seed=seed) for epoch in range(4) for seed in range(4)}) == 16


def test_a_loader_sends_nothing_and_ranks_may_have_no_row(worlds):
    def step():
        with ledger() as led:
            batches = list(sharded_batches(torch.arange(6.0), batch_size=4))
        return [(mine.tolist(), scale) for mine, scale in batches], led.calls

    outs = worlds[4].run(step)
    assert [len(out[0][1][0]) for out in outs] == [1, 1, 0, 0] and all(led == [] for _, led in outs)
    assert sum(out[0][1][1] * sum(out[0][1][0]) for out in outs) / 4 == sum(outs[0][0][1][0] + outs[1][0][1][0]) / 2


def test_batches_that_cannot_be_shared(worlds):
    def step(kind):
        odd = dist.get_rank() == 1
        x = torch.ones(8, 2)
        calls = {
            "uneven": lambda: sharded_batches(x, batch_size=10),
            "none": lambda: sharded_batches(x, batch_size=0),
            "rows": lambda: sharded_batches(x, x[:7], batch_size=8),
            "no tensors": lambda: sharded_batches(batch_size=8),
            "samples": lambda: sharded_batches(x[: 7 if odd else 8], batch_size=8),
            "epoch": lambda: sharded_batches(x, batch_size=8, epoch=int(odd)),
            "size": lambda: sharded_batches(x, batch_size=4 if odd else 8),
            "fraction": lambda: sharded_batches(x, batch_size=8.0),
            "seed": lambda: sharded_batches(x, batch_size=8, seed=-1 if odd else 0),
        }
        return error_of(calls[kind])

    for kind, text in {
        "uneven": "rank 0 asked for batches of 10, which 4 ranks cannot share equally; 8 would do.",
        "none": "rank 0 asked for batches of 0, which 4 ranks cannot share equally; 4 would do.",
        "rows": "rank 0 brought tensors of [8, 7] rows; they must have one row for each sample.",
        "no tensors": "rank 0 brought tensors of [] rows; they must have one row for each sample.",
        "samples": "rank 1 brought [7] rows; rank 0 brought [8] rows.",
        "epoch": "rank 1 brought epoch=1, seed=0; rank 0 brought epoch=0, seed=0.",
        "size": "rank 1 brought batch_size=4; rank 0 brought batch_size=8.",
        "fraction": "rank 0 asked for batch_size=8.0, epoch=0, seed=0; they are whole numbers, and none is below 0.",
        "seed": "rank 1 asked for batch_size=8, epoch=0, seed=-1; they are whole numbers, and none is below 0.",
    }.items():
        errors = worlds[4].run(step, kind)
        assert len(set(errors)) == 1 and f"ValueError: sharded_batches: {text}" in errors[0].replace(
            "the ranks disagree: ", ""
        )
