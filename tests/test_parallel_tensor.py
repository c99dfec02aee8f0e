"""Tensor parallelism against one process and against PyTorch's own, on 1 to 4 ranks; and its exact bytes."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from comparing import counts, difference, relative, seeded
from torch import nn

from lecture_lib.parallel.mesh import Mesh, ParallelTransformer
from lecture_lib.parallel.model import Attention, SwiGLU, Transformer, deep_mlp, next_token_loss
from lecture_lib.parallel.tensor import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelEmbedding,
    ParallelSwiGLU,
    RowParallelLinear,
    all_gather_mlp,
    copy_to_group,
    gather_from_group,
    gather_full_gradients,
    gather_full_state_dict,
    gather_to_group,
    linear_of_copy,
    linear_then_reduce,
    parallel_cross_entropy,
    reduce_from_group,
    reduce_scatter_from_group,
    split_to_group,
    tensor_parallel,
)
from lecture_lib.trace import ledger

CLOSE = 1e-5  # largest difference over largest value, float32


def gradients(module):
    """By every name that a parameter has, as in a state_dict."""
    tensors = module.state_dict(keep_vars=True).items()
    return {name: tensor.grad for name, tensor in tensors if tensor.grad is not None}


WITH_A_DIMENSION = (split_to_group, gather_from_group, gather_to_group, reduce_scatter_from_group)


# ---- the moves -------------------------------------------------------------------------------------------------------


def check_moves():
    """Forward and backward of each move, of tensors with gaps in memory too, against what it is defined to be."""
    n, rank = dist.get_world_size(), dist.get_rank()
    wrong, whole = [], (3, 2 * n, 4 * n)

    def integers(seed, shape):  # sums of small integers are exact in any order
        return seeded(seed, lambda: torch.randint(-9, 9, shape).double())

    def on_all_ranks(seed, shape):
        return [integers(100 * seed + r, shape) for r in range(n)]

    def check(name, move, x, y, grad, grad_x):
        x = x.mT.contiguous().mT.requires_grad_()  # the same numbers, not contiguous
        out = move(x)
        out.backward(grad.mT.contiguous().mT)
        if not (torch.equal(out, y) and torch.equal(x.grad, grad_x)):
            wrong.append(name)

    x, grad = integers(1, whole), integers(2, whole)  # the same on all ranks
    xs, grads = on_all_ranks(3, whole), on_all_ranks(4, whole)  # another one on each
    check("copy", copy_to_group, x, x, grads[rank], sum(grads))
    check("reduce", reduce_from_group, xs[rank], sum(xs), grad, grad)
    for dim in (1, -1):
        own = [tensor.chunk(n, dim)[rank] for tensor in (x, grad, sum(xs), sum(grads))]
        parts, grad_parts = on_all_ranks(5, own[0].shape), on_all_ranks(6, own[0].shape)
        one, all_, all_grads = parts[rank], torch.cat(parts, dim), torch.cat(grad_parts, dim)
        moves = {move.__name__: functools.partial(move, dim=dim) for move in WITH_A_DIMENSION}
        check(f"split {dim}", moves["split_to_group"], x, own[0], grad_parts[rank], all_grads)
        check(f"gather from {dim}", moves["gather_from_group"], one, all_, grad, own[1])
        check(f"gather to {dim}", moves["gather_to_group"], one, all_, grads[rank], own[3])
        check(f"sum {dim}", moves["reduce_scatter_from_group"], xs[rank], own[2], grad_parts[rank], all_grads)
    return wrong


def test_each_move_and_its_backward(sized):
    assert sized.run(check_moves) == [[]] * sized.size


def check_derivatives():
    """Functions that begin and end where all ranks hold the same, against finite differences.

    Every rank turns the same element a little at the same time, as they do in a real step.
    """
    n, rank = dist.get_world_size(), dist.get_rank()
    weight = seeded(rank, lambda: torch.randn(1, n, dtype=torch.float64))  # each rank computes something else
    own = weight.chunk(n, 1)[0]

    def copied(x):
        return reduce_from_group((copy_to_group(x) * weight).sin())

    def split(x):
        return gather_from_group((split_to_group(x, 1) * copy_to_group(x).sum() * own).sin(), 1)

    def gathered(x):
        own = split_to_group(x, 1).sin()
        return gather_from_group(reduce_scatter_from_group((gather_to_group(own, 1) * weight).cos(), 1).sin(), 1)

    x = seeded(9, lambda: torch.randn(1, n, dtype=torch.float64)).requires_grad_()
    for function in (copied, split, gathered):
        torch.autograd.gradcheck(function, x)
        torch.autograd.gradgradcheck(function, x, seeded(3, lambda: torch.randn(1, n)).double())
    return "done"


def test_derivatives_of_the_moves_first_and_second(sized):
    assert sized.run(check_derivatives) == ["done"] * sized.size


def test_bytes_of_the_moves_are_those_of_the_table(sized):
    n, S = sized.size, 4 * 12 * 24
    all_reduce, half = ("all_reduce", 2 * (n - 1) * S // n), (n - 1) * S // n
    gather, scatter = ("all_gather_single", half), ("reduce_scatter_single", half)

    def moved():
        n, x = dist.get_world_size(), torch.ones(12, 24)
        piece = x[:, : 24 // n]
        calls = {
            "copy": (lambda x: copy_to_group(x), x),
            "reduce": (lambda x: reduce_from_group(x), x),
            "split": (lambda x: split_to_group(x, 1), x),
            "gather_from": (lambda x: gather_from_group(x, 1), piece),
            "gather_to": (lambda x: gather_to_group(x, 1), piece),
            "reduce_scatter": (lambda x: reduce_scatter_from_group(x, 1), x),
        }
        found = {}
        for name, (move, x) in calls.items():
            x = x.clone().requires_grad_()
            with ledger() as forward:
                y = move(x)
            with ledger() as backward:
                y.sum().backward()
            found[name] = [[(call.name, call.bytes_sent) for call in led.calls] for led in (forward, backward)]
        return found

    expected = {
        "copy": [[], [all_reduce]],
        "reduce": [[all_reduce], []],
        "split": [[], [gather]],
        "gather_from": [[gather], []],
        "gather_to": [[gather], [scatter]],
        "reduce_scatter": [[scatter], [gather]],
    }
    assert sized.run(moved) == [expected if n > 1 else {name: [[], []] for name in expected}] * n


# ---- linear layers ---------------------------------------------------------------------------------------------------


def check_linears(bias):
    """Each kind of linear layer, with each option, built on ranks with different seeds, against the first rank's."""
    n, rank = dist.get_world_size(), dist.get_rank()
    full = seeded(0, lambda: nn.Linear(24, 36, bias))
    mine = seeded(rank, lambda: nn.Linear(24, 36, bias))
    x = seeded(5, lambda: torch.randn(3, 24, 12)).mT  # (3, 12, 24), not contiguous
    g = seeded(6, lambda: torch.randn(3, 12, 36))
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = full(x)
    y.backward(g)

    def own(tensor, dim):
        return tensor.detach().chunk(n, dim)[rank].clone(memory_format=torch.preserve_format)

    layers = {  # the layer, which x goes in, which y has to come out: None for all, or the dimension that is split
        "column": (ColumnParallelLinear(mine), None, -1),
        "column, gathered": (ColumnParallelLinear(mine, gather_output=True), None, None),
        "column, features in": (ColumnParallelLinear(mine, gather_input=True), -1, -1),
        "column, sequence": (ColumnParallelLinear(mine, sequence_dim=1), 1, -1),
        "row": (RowParallelLinear(mine), -1, None),
        "row, whole in": (RowParallelLinear(mine, split_input=True), None, None),
        "row, 4 chunks": (RowParallelLinear(mine, chunks=4), -1, None),
        "row, sequence": (RowParallelLinear(mine, sequence_dim=1), -1, 1),
    }
    found = {}
    for name, (layer, split_in, split_out) in layers.items():
        a = (x.detach().clone() if split_in is None else own(x, split_in)).requires_grad_()
        out = layer(a)
        out.backward(g if split_out is None else own(g, split_out))
        pairs = [(out, y if split_out is None else own(y, split_out))]
        pairs += [(a.grad, x.grad if split_in is None else own(x.grad, split_in))]
        ours, theirs = gather_full_gradients(layer), gradients(full)
        found[name] = max(
            relative(gather_full_state_dict(layer), full.state_dict()),
            relative(ours, theirs),
            *(difference(*pair) for pair in pairs),
        )
    return found


@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_equal_one_process(sized, bias):
    for found in sized.run(check_linears, bias):
        assert all(value < CLOSE for value in found.values()), found


def test_overlap_changes_the_order_and_nothing_else(world):
    def step():
        rank = dist.get_rank()
        x, weight = seeded(rank, lambda: torch.randn(6, 5, 8)), seeded(rank + 9, lambda: torch.randn(7, 8))
        bias, results = torch.randn(7), []
        for functions in (
            (
                lambda x, w, b: linear_of_copy(x, w, b),
                lambda x, w, b: linear_then_reduce(x, w),
                lambda x, w, b: linear_then_reduce(x, w, chunks=3),
            ),
            (
                lambda x, w, b: F.linear(copy_to_group(x), w, b),
                lambda x, w, b: reduce_from_group(F.linear(x, w)),
                lambda x, w, b: reduce_from_group(F.linear(x, w)),
            ),
        ):
            for function in functions:
                leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
                y = function(*leaves)
                y.sin().sum().backward()
                results.append([y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
        half = len(results) // 2
        return [
            max(difference(a, b) for a, b in zip(ours, theirs, strict=True))
            for ours, theirs in zip(results[:half], results[half:], strict=True)
        ]

    assert all(value < 1e-6 for found in world.run(step) for value in found)


def test_only_what_needs_a_gradient_gets_one(world):
    def step():
        column, row = nn.Linear(8, 8), nn.Linear(8, 8)
        column.weight.requires_grad_(False)
        row.weight.requires_grad_(False)
        column, row = ColumnParallelLinear(column), RowParallelLinear(row)
        with ledger() as led:
            row(F.gelu(column(torch.ones(4, 8)))).sum().backward()
        with torch.no_grad():
            row(F.gelu(column(torch.ones(4, 8))))
        frozen = column.weight.grad is None and row.weight.grad is None and not column.weight.requires_grad
        return frozen and column.bias.grad is not None and row.bias.grad is not None, len(led.calls)

    assert world.run(step) == [(True, 1)] * 4


def test_the_megatron_pair_moves_one_all_reduce_each_way(sized):
    n, x_bytes, y_bytes = sized.size, 4 * 6 * 12, 4 * 6 * 24

    def step(chunks, sequence):
        n, dim = dist.get_world_size(), 0 if sequence else None
        up = ColumnParallelLinear(nn.Linear(12, 48), sequence_dim=dim)
        down = RowParallelLinear(nn.Linear(48, 24), chunks=chunks, sequence_dim=dim)
        x = torch.randn(6 // n if sequence and 6 % n == 0 else 6, 12, requires_grad=True)
        with ledger() as forward:
            y = down(F.gelu(up(x)))
        with ledger() as backward:
            y.sum().backward()
        return counts(forward), counts(backward)

    expected = (
        {"all_reduce": (1, 2 * (n - 1) * y_bytes // n)},
        {"all_reduce": (1, 2 * (n - 1) * x_bytes // n)},
    )
    assert sized.run(step, 1, False) == [expected if n > 1 else ({}, {})] * n
    expected[0]["all_reduce"] = (3, expected[0]["all_reduce"][1])
    assert sized.run(step, 3, False) == [expected if n > 1 else ({}, {})] * n
    if n in (2, 3):  # the rows are the sequence here; the bytes are those of the all-reduces, and the bias's gradient
        part, bias = (n - 1) * 1, 2 * (n - 1) * 4 * 24 // n
        forward = {"all_gather_single": (1, part * x_bytes // n), "reduce_scatter_single": (1, part * y_bytes // n)}
        backward = {
            "all_reduce": (1, bias),
            "all_gather_single": (1, part * y_bytes // n),
            "reduce_scatter_single": (1, part * x_bytes // n),
        }
        found = sized.run(step, 1, True)
        assert [(f, dict(sorted(b.items()))) for f, b in found] == [(forward, dict(sorted(backward.items())))] * n


# ---- the deep MLP ----------------------------------------------------------------------------------------------------


def three_steps(model, step):
    """Losses of three steps with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for i in range(3):
        optimizer.zero_grad()
        loss = step(model, i)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def mlp_step(model, i):
    x, y = seeded(50 + i, lambda: torch.randn(2, 12, 24))  # each (batch, width)
    return (model(x) - y).square().mean()


def check_mlp(layers, split):
    one = seeded(0, lambda: deep_mlp(24, layers))
    ours = split(seeded(dist.get_rank(), lambda: deep_mlp(24, layers)))
    losses = difference(three_steps(ours, mlp_step), three_steps(one, mlp_step))
    return max(
        losses,
        relative(gather_full_gradients(ours), gradients(one)),
        relative(gather_full_state_dict(ours), one.state_dict()),
    )


@pytest.mark.parametrize("split", [tensor_parallel, all_gather_mlp])
@pytest.mark.parametrize("layers", [1, 3, 4])
def test_three_steps_of_the_mlp_equal_one_process(sized, layers, split):
    assert all(value < CLOSE for value in sized.run(check_mlp, layers, split))


def test_bytes_of_the_mlp_are_those_of_the_docstrings(sized):
    n, S = sized.size, 4 * 12 * 24

    def step(split, layers, needs_gradient):
        x = torch.ones(12, 24, requires_grad=needs_gradient)
        model = split(deep_mlp(24, layers))
        with ledger() as forward:
            y = model(x)
        with ledger() as backward:
            y.sum().backward()
        return counts(forward), counts(backward)

    def of(**calls):
        return {name: (count, count * share * (n - 1) * S // n) for name, (count, share) in calls.items() if count}

    for layers in (3, 4):
        for needs in (True, False) if n > 1 else ():
            gather = {"all_gather_single": (layers % 2, 1)}
            megatron = of(all_reduce=(layers // 2, 2), **gather), of(all_reduce=((layers + 1) // 2 - (not needs), 2))
            assert sized.run(step, tensor_parallel, layers, needs) == [megatron] * n
            forward = of(all_gather_single=(layers, 1))
            backward = of(reduce_scatter_single=(layers - 1, 1), all_reduce=(int(needs), 2))
            assert sized.run(step, all_gather_mlp, layers, needs) == [(forward, backward)] * n


def against_parallelize_module():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mlp = seeded(0, lambda: deep_mlp(24, 4))
    ours = tensor_parallel(copy.deepcopy(mlp))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(), "6": RowwiseParallel()}
    theirs = parallelize_module(mlp, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    losses = []
    for model in (ours, theirs):
        with ledger() as led:
            losses.append(three_steps(model, mlp_step))
        losses.append(counts(led))
    shards = zip(ours.parameters(), theirs.parameters(), strict=True)
    weights = max(difference(a.detach(), b.to_local().detach()) for a, b in shards)
    return max(difference(losses[0], losses[2]), weights), losses[1] == losses[3]


def test_equal_to_parallelize_module_with_the_same_bytes(sized):
    for value, same_bytes in sized.run(against_parallelize_module):
        assert value < CLOSE and same_bytes


# ---- the transformer -------------------------------------------------------------------------------------------------

SIZES = dict(layers=2, hidden=48, heads=12, kv_heads=12, ffn_hidden=96, vocab=72)


def tokens_of(i):
    tokens = seeded(70 + i, lambda: torch.randint(SIZES["vocab"], (2, 13)))
    return tokens[:, :-1], tokens[:, 1:]  # each (batch, seq) = (2, 12)


def check_transformer(sequence_parallel, **options):
    def one_loss(model, i):
        tokens, targets = tokens_of(i)
        return next_token_loss(model(tokens), targets)

    def our_loss(model, i):
        tokens, targets = tokens_of(i)
        return parallel_cross_entropy(model(tokens), targets)

    one = seeded(0, lambda: Transformer(**SIZES | options))
    ours = seeded(dist.get_rank(), lambda: Transformer(**SIZES | options))
    if dist.get_rank():
        ours.norm.weight.data.fill_(3)  # what is not split has to start alike too
    ours = tensor_parallel(ours, sequence_parallel=sequence_parallel)
    if options.get("tied"):
        assert ours.head.weight is ours.embedding.weight
    losses = difference(three_steps(ours, our_loss), three_steps(one, one_loss))
    state = gather_full_state_dict(ours)
    seeded(1, lambda: Transformer(**SIZES | options)).load_state_dict(state)
    return max(losses, relative(gather_full_gradients(ours), gradients(one)), relative(state, one.state_dict()))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("options", [{}, {"tied": True}, {"kv_heads": 1}, {"kv_heads": 2}])
def test_three_steps_of_the_transformer_equal_one_process(sized, sequence_parallel, options):
    if (sized.size, options.get("kv_heads")) == (3, 2):
        pytest.skip("3 ranks cannot share 2 key and value heads: see the errors")
    for value in sized.run(lambda: check_transformer(sequence_parallel, **options)):
        assert value < CLOSE


@pytest.mark.parametrize("kv_heads", [1, 12])
def test_bytes_of_a_step_are_those_of_the_docstring(sized, kv_heads):
    def step(sequence_parallel):
        model = tensor_parallel(Transformer(**SIZES | {"kv_heads": kv_heads}), sequence_parallel=sequence_parallel)
        tokens, targets = tokens_of(0)
        with ledger() as led:
            parallel_cross_entropy(model(tokens), targets).backward()
        return led.totals(), led.bytes_sent

    n, L, hidden, head_dim, T = sized.size, SIZES["layers"], SIZES["hidden"], 4, 2 * 12
    S, r = 4 * T * hidden, n // min(n, kv_heads)
    activations, loss = (4 * L + 2) * 2 * (n - 1) * S / n, 2 * (n - 1) / n * 3 * T * 4
    shared = 2 * L * 2 * (r - 1) / r * hidden * head_dim * 4
    norms = (2 * L + 1) * 2 * (n - 1) / n * hidden * 4
    for totals, sent in sized.run(step, False):
        assert sent == pytest.approx(activations + loss + shared, rel=1e-12)
        assert n == 1 or totals["all_reduce"][0] == 4 * L + 2 + 2 + 2 * L * (r > 1)
    for totals, sent in sized.run(step, True):
        assert sent == pytest.approx(activations + loss + shared + norms, rel=1e-12)
        if n > 1:
            assert totals["all_gather_single"][::2] == (4 * L + 2, activations / 2)
            assert totals["reduce_scatter_single"][::2] == (4 * L + 2, activations / 2)
            assert totals["all_reduce"][0] == 2 + 2 * L + 1 + 2 * L * (r > 1)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_model_is_split_with_one_broadcast(sized, sequence_parallel):
    def split():
        whole = Transformer(**SIZES)
        size = sum(parameter.nbytes for parameter in whole.parameters())
        with ledger() as led:
            tensor_parallel(whole, sequence_parallel=sequence_parallel)
        return [(call.name, call.bytes_sent) for call in led.calls], size

    last = sized.size - 1
    for rank, (calls, size) in enumerate(sized.run(split)):
        assert calls == ([("broadcast", size if rank < last else 0)] if last else [])


def saved_bytes(module, x):
    """Bytes of the activations that a forward pass keeps for the backward pass, and the shapes of the tensors."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage  # held, so that its address is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = module(x)  # while y lives, so does what was saved
    assert y.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def test_sequence_parallelism_keeps_n_times_fewer_activations_of_the_norms(world):
    def step():
        tokens, hidden, n = tokens_of(0)[0], SIZES["hidden"], dist.get_world_size()
        norm, x = nn.RMSNorm(hidden), torch.ones(2, 12, hidden, requires_grad=True)
        of_norm = saved_bytes(norm, x), saved_bytes(norm, x[:, : 12 // n].contiguous())
        one = saved_bytes(Transformer(**SIZES), tokens)
        plain = saved_bytes(tensor_parallel(Transformer(**SIZES)), tokens)
        sequence = saved_bytes(tensor_parallel(Transformer(**SIZES), sequence_parallel=True), tokens)
        return one, plain, sequence, of_norm

    for one, plain, sequence, (whole, part) in world.run(step):
        assert whole == 4 * part and one > plain > sequence
        assert plain - sequence == (2 * SIZES["layers"] + 1) * (whole - part)


def test_a_slice_does_not_hold_the_rest_in_memory(world):
    def step():
        x = torch.ones(8, 6)
        return [split_to_group(x, 0).untyped_storage().nbytes(), split_to_group(x.mT, 1).untyped_storage().nbytes()]

    assert world.run(step) == [[2 * 6 * 4] * 2] * 4


def test_autocast_computes_and_moves_bfloat16(world):
    def step(sequence_parallel):
        tokens, targets = tokens_of(0)
        one = seeded(0, lambda: Transformer(**SIZES | {"kv_heads": 2}))
        ours = tensor_parallel(copy.deepcopy(one), sequence_parallel=sequence_parallel)
        with torch.autocast("cpu", torch.bfloat16):
            theirs = next_token_loss(one(tokens), targets)
            with ledger() as led:
                logits = ours(tokens)
            loss = parallel_cross_entropy(logits, targets)
        theirs.backward()
        loss.backward()
        sixteen = sum(call.dtype == "bfloat16" for call in led.calls)
        assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
        assert {p.grad.dtype for p in ours.parameters()} == {torch.float32}
        return sixteen, difference(loss, theirs), relative(gather_full_gradients(ours), gradients(one))

    for sixteen, loss, grads in world.run(step, False):
        assert sixteen == 2 * SIZES["layers"] and loss < 1e-3 and grads < 0.05  # bfloat16 has 8 bits
    for _, loss, grads in world.run(step, True):
        assert loss < 1e-3 and grads < 0.05


def test_parts_of_the_transformer_alone(world):
    def step():
        found = []
        x = seeded(3, lambda: torch.randn(2, 6, 48))
        for make, split in (
            (lambda: Attention(48, 12, 2), ParallelAttention),
            (lambda: SwiGLU(48, 96), ParallelSwiGLU),
        ):
            one, ours = seeded(0, make), split(seeded(dist.get_rank(), make))
            a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
            y, z = one(a), ours(b)
            y.sin().sum().backward()
            with ledger() as led:
                z.sin().sum().backward()
            found += [
                difference(z, y),
                difference(b.grad, a.grad),
                relative(gather_full_gradients(ours), gradients(one)),
            ]
            assert sum(call.elements == x.numel() for call in led.calls) == 1  # one move for query, key and value
        return max(found)

    assert all(value < CLOSE for value in world.run(step))


# ---- vocabulary ------------------------------------------------------------------------------------------------------


def check_embedding():
    n, rank = dist.get_world_size(), dist.get_rank()
    one, mine = seeded(0, lambda: nn.Embedding(24, 5)), seeded(rank, lambda: nn.Embedding(24, 5))
    tokens, grad = seeded(1, lambda: torch.randint(24, (2, 12))), seeded(2, lambda: torch.randn(2, 12, 5))
    rows = one(tokens)
    rows.backward(grad)
    found, S = [], 4 * 2 * 12 * 5
    for dim in (None, 1):
        ours = ParallelEmbedding(mine, sequence_dim=dim)
        with ledger() as led:
            y = ours(tokens)
            y.backward(grad if dim is None else grad.chunk(n, 1)[rank])
        found.append(difference(y, rows if dim is None else rows.chunk(n, 1)[rank]))
        found.append(relative(gather_full_gradients(ours), gradients(one)))
        part = (n - 1) * S // n
        names = ("all_reduce",) if dim is None else ("reduce_scatter_single", "all_gather_single")
        assert counts(led) == (dict.fromkeys(names, (1, part * (2 if dim is None else 1))) if n > 1 else {})
    return max(found)


def test_embedding_equals_one_process(sized):
    assert all(value < CLOSE for value in sized.run(check_embedding))


def check_cross_entropy(dtype, scale, ignored):
    """Largest differences of loss and gradient, and calls and bytes."""
    n, rank = dist.get_world_size(), dist.get_rank()
    whole = (seeded(1, lambda: torch.randn(3, 7, 24)) * scale).to(dtype)
    targets = seeded(2, lambda: torch.randint(24, (3, 7)))
    targets[0, :ignored] = -100
    one = whole.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):  # F.cross_entropy in float32, as ours
        theirs = F.cross_entropy(one.flatten(0, 1), targets.flatten())
    (3 * theirs).backward()
    own = whole.chunk(n, -1)[rank].clone().requires_grad_()
    with ledger() as led:
        loss = parallel_cross_entropy(own, targets)
        (3 * loss).backward()
    grad = gather_from_group(own.grad, -1)
    return difference(loss, theirs), difference(grad.float(), one.grad.float()), counts(led)


@pytest.mark.parametrize("scale, ignored", [(1, 0), (1, 5), (1e4, 0)])
def test_cross_entropy_equals_one_process_and_gathers_no_logits(sized, scale, ignored):
    n, T = sized.size, 21
    for loss, grad, calls in sized.run(check_cross_entropy, torch.float32, scale, ignored):
        assert loss < CLOSE and grad < CLOSE
        expected = {"all_reduce": (2, 2 * (n - 1) * 3 * T * 4 / n)} if n > 1 else {}
        assert (
            calls == pytest.approx(expected) if n == 1 else calls["all_reduce"] == pytest.approx(expected["all_reduce"])
        )
    for loss, grad, _ in sized.run(check_cross_entropy, torch.bfloat16, 1, ignored):
        assert loss < CLOSE and grad < 0.01


def test_cross_entropy_in_float64_is_exact_and_the_same_on_all_ranks(world):
    def step():
        whole = seeded(1, lambda: torch.randn(5, 24, dtype=torch.float64))
        targets = torch.tensor([0, 5, 6, 23, 11])
        own = split_to_group(whole, 1).requires_grad_()
        torch.autograd.gradcheck(lambda x: parallel_cross_entropy(gather_all(x), targets), whole.requires_grad_())
        nothing = parallel_cross_entropy(own, torch.full((5,), -100))
        return parallel_cross_entropy(own, targets).item(), nothing.isnan().item()

    def gather_all(x):
        return split_to_group(x, 1)

    found = world.run(step)
    whole = seeded(1, lambda: torch.randn(5, 24, dtype=torch.float64))
    expected = F.cross_entropy(whole, torch.tensor([0, 5, 6, 23, 11])).item()
    assert found == [found[0]] * 4 and found[0] == (pytest.approx(expected, rel=1e-14), True)


# ---- groups ----------------------------------------------------------------------------------------------------------


def test_two_groups_of_two_work_side_by_side(world):
    """A 2 x 2 mesh: tensor parallel along one axis. Each group has its own model and its own data."""

    def step():
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        group, replica = mesh.get_group("tensor"), mesh.get_local_rank("data")
        found = []
        for sequence_parallel in (False, True):
            one = seeded(2 * replica, lambda: Transformer(**SIZES | {"kv_heads": 1}))  # the seed of its first rank
            ours = seeded(dist.get_rank(), lambda: Transformer(**SIZES | {"kv_heads": 1}))
            ours = tensor_parallel(ours, group, sequence_parallel)
            tokens, targets = tokens_of(replica)
            theirs = next_token_loss(one(tokens), targets)
            theirs.backward()
            with ledger() as led:
                loss = parallel_cross_entropy(ours(tokens), targets, group)
                loss.backward()
            found += [difference(loss, theirs), relative(gather_full_gradients(ours), gradients(one))]
            found.append(relative(gather_full_state_dict(ours), one.state_dict()))
            assert {call.group for call in led.calls} == {tuple(dist.get_process_group_ranks(group))}
        mlp = seeded(0, lambda: deep_mlp(8, 4))
        x = seeded(replica, lambda: torch.randn(3, 8))
        ours = tensor_parallel(copy.deepcopy(mlp), group)
        found.append(difference(ours(x), mlp(x)))
        return max(found), replica

    assert all(value < CLOSE for value, _ in world.run(step))


# ---- bad input -------------------------------------------------------------------------------------------------------


def rank_two(right, wrong):
    return wrong if dist.get_rank() == 2 else right


def two_devices():
    linear = nn.Linear(8, 8)
    linear.bias = nn.Parameter(linear.bias.to("meta"))
    return linear


MISTAKES = [
    (
        lambda: ColumnParallelLinear(nn.Linear(8, 10)),
        "ColumnParallelLinear: 10 output features cannot be shared equally by 4 ranks; take fewer ranks, or a multiple "
        "of 4, such as 12.",
    ),
    (
        lambda: RowParallelLinear(nn.Linear(6, 8)),
        "RowParallelLinear: 6 input features cannot be shared equally by 4 ranks; ",
    ),
    (
        lambda: ParallelEmbedding(nn.Embedding(50, 8)),
        "ParallelEmbedding: 50 rows of the vocabulary cannot be shared equally by 4 ranks; ",
    ),
    (
        lambda: ParallelAttention(Attention(48, 6, 6)),
        "ParallelAttention: 6 query heads cannot be shared equally by 4 ranks; ",
    ),
    (
        lambda: ParallelAttention(Attention(48, 12, 3)),
        "ParallelAttention: 3 key and value heads cannot be shared equally by 4 ranks, nor can the ranks by the heads",
    ),
    (
        lambda: ColumnParallelLinear(nn.Linear(rank_two(8, 4), 8)),
        "ColumnParallelLinear: the ranks disagree: rank 2 brought weight of shape (8, 4), float32; rank 0 brought "
        "weight of shape (8, 8), float32.",
    ),
    (
        lambda: RowParallelLinear(nn.Linear(8, 8, bias=rank_two(True, False))),
        "RowParallelLinear: the ranks disagree: rank 0 brought 1 more than rank 2, the first of them bias of shape",
    ),
    (
        lambda: RowParallelLinear(nn.Linear(8, 8), chunks=rank_two(1, 2)),
        "rank 2 brought chunks=2; rank 0 brought chunks=1.",
    ),
    (
        lambda: ColumnParallelLinear(rank_two(nn.Linear(8, 8), nn.GELU())),
        "rank 2 brought a GELU, where Linear is needed",
    ),
    (lambda: ParallelSwiGLU(rank_two(SwiGLU(8, 8), nn.GELU())), "rank 2 brought a GELU, where SwiGLU is needed"),
    (
        lambda: ColumnParallelLinear(rank_two(nn.Linear(8, 8), two_devices())),
        "rank 2 has weight on cpu and bias on meta; move the module to one device first",
    ),
    (
        lambda: ColumnParallelLinear(nn.Linear(8, 8), sequence_dim=rank_two(None, 1)),
        "ColumnParallelLinear: the ranks disagree: rank 2 brought sequence_dim=1; rank 0 brought sequence_dim=None.",
    ),
    (lambda: RowParallelLinear(nn.Linear(8, 8), chunks=2, sequence_dim=1), "chunks=2 cut an all-reduce"),
    (lambda: ColumnParallelLinear(nn.Linear(8, 8), gather_input=True, sequence_dim=1), "pass one"),
    (lambda: ParallelEmbedding(nn.Embedding(8, 8, padding_idx=0)), "padding_idx of nn.Embedding is not supported"),
    (
        lambda: tensor_parallel(deep_mlp(8, rank_two(4, 2))),
        "tensor_parallel: the ranks disagree: rank 0 brought 2 more than rank 2, the first of them 4.weight of shape",
    ),
    (
        lambda: tensor_parallel(Transformer(**SIZES), None, rank_two(False, True)),
        "rank 2 brought sequence_parallel=True; rank 0 brought sequence_parallel=False.",
    ),
    (lambda: tensor_parallel(deep_mlp(8, 2), None, True), "tensor_parallel: an MLP has no sequence to split"),
    (lambda: tensor_parallel(tensor_parallel(deep_mlp(8, 2))), "rank 0 brought a model that is split already"),
    (
        lambda: tensor_parallel(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))),
        "tensor_parallel: 1.weight of shape (8,) is in a kind of layer that it cannot split",
    ),
    (
        lambda: split_to_group(torch.ones(2, 10), -1),
        "4 ranks cannot share dimension 1 of a tensor of shape (2, 10) equally; choose a multiple of 4, such as 12.",
    ),
    (
        lambda: reduce_scatter_from_group(torch.ones(6, 2), 0),
        "4 ranks cannot share dimension 0 of a tensor of shape (6, 2) equally; choose a multiple of 4, such as 8.",
    ),
    (
        lambda: ParallelEmbedding(nn.Embedding(8, 2))(torch.tensor([3, 8])),
        "ParallelEmbedding: token 8 is not in the vocabulary, 0 to 7.",
    ),
    (
        lambda: parallel_cross_entropy(torch.ones(2, 2), torch.tensor([3, -1])),
        "parallel_cross_entropy: token -1 is not in the vocabulary, 0 to 7.",
    ),
]


@pytest.mark.parametrize("mistake, says", MISTAKES)
def test_a_mistake_is_one_clear_error_on_every_rank(world, mistake, says):
    def step():
        try:
            mistake()
        except ValueError as error:
            return str(error)

    messages = world.run(step)
    assert len(set(messages)) == 1 and says in messages[0] and "\n" not in messages[0], messages


def test_a_model_that_cannot_be_split_stays_as_it_was(world):
    def step():
        model = Transformer(**SIZES | {"vocab": 74})  # block by block it would fit, the head does not
        before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
        try:
            tensor_parallel(model)
        except ValueError as error:
            assert "74" in str(error)
        same = all(p is before[n][0] and torch.equal(p, before[n][1]) for n, p in model.named_parameters())
        return same and type(model.blocks[0].attention) is Attention

    assert world.run(step) == [True] * 4


def test_shards_made_with_one_seed_are_a_trap(world):
    """What linear.py warns of: a small layer on each rank, made with the same seed, is the same features n times."""

    def step():
        naive = seeded(0, lambda: nn.Linear(8, 2, bias=False))
        ours = ColumnParallelLinear(seeded(0, lambda: nn.Linear(8, 8, bias=False)))
        whole = [gather_from_group(weight.detach(), 0) for weight in (naive.weight, ours.weight)]  # each (8, 8)
        return [int(torch.linalg.matrix_rank(weight)) for weight in whole]

    assert world.run(step) == [[2, 8]] * 4


# ---- ranks that share a key and value head ---------------------------------------------------------------------------


def test_models_on_a_mesh_share_the_groups_of_ranks_with_the_same_head(world):
    """Two models, one group of two ranks for both; it is gone with the mesh. All four ranks are a group already."""

    def groups_made(kv_heads):
        from torch.distributed import distributed_c10d

        before = len(distributed_c10d._world.pg_names)
        mesh = Mesh(tp=4)
        models = [Transformer(**SIZES | {"kv_heads": kv_heads}) for _ in range(2)]
        attentions = [ParallelTransformer(model, mesh).stages[0][1].attention for model in models]
        shared = {dist.get_process_group_ranks(part.replicas)[0] for a in attentions for part in (a.key, a.value)}
        made = len(distributed_c10d._world.pg_names) - before
        mesh.close()
        return made, shared, len(distributed_c10d._world.pg_names) - before

    assert world.run(groups_made, 2) == [(1, {0}, 0)] * 2 + [(1, {2}, 0)] * 2
    assert world.run(groups_made, 1) == [(0, {0}, 0)] * 4


def test_groups_that_a_mesh_gave_back_can_be_made_again(world):
    """torch names a group that its own ranks make together after how many there are: a second one may get the name of
    the first. The mesh's are numbered."""

    def train(axes, kv_heads):
        mesh = Mesh(**axes)
        model = ParallelTransformer(seeded(0, lambda: Transformer(**SIZES | {"kv_heads": kv_heads})), mesh)
        loss = model.step(*seeded(1, lambda: torch.randint(72, (2, 4, 8))))
        mesh.close()
        return loss.item()

    def several():
        return [train(*way) for way in [(dict(dp_replicate=2, tp=2), 1), (dict(tp=4), 2), (dict(tp=4), 2)]]

    for _, before, again in world.run(several):
        assert before == again
