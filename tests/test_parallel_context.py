"""Context parallelism against one process on 1 to 4 ranks; its exact bytes, blocks and memory."""

import copy
import functools
import importlib
import itertools
import math
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from comparing import counts, difference, error_of, seeded
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lecture_lib import RankError
from lecture_lib.parallel import DataParallel, context
from lecture_lib.parallel.context import (
    all_gather_attention,
    all_to_all_attention,
    blocks_by_rank,
    context_parallel,
    contiguous,
    positions,
    ring_attention,
    shard_sequence,
    unshard_sequence,
    zigzag,
)
from lecture_lib.parallel.data import average_gradients
from lecture_lib.parallel.model import Transformer, next_token_loss, rotate
from lecture_lib.parallel.tensor import gather_full_state_dict, parallel_cross_entropy, tensor_parallel
from lecture_lib.trace import ledger, memory

CLOSE = 1e-5  # largest difference over largest value, float32
SIZES = dict(layers=2, hidden=48, heads=12, kv_heads=4, ffn_hidden=64, vocab=40)
ATTENTIONS = (ring_attention, all_gather_attention, all_to_all_attention)


def qkvg(heads, kv_heads, seq, head_dim=8, dtype=torch.float32, batch=2):
    """q, k, v of the whole sequence, and a gradient of the output: the same on all ranks."""
    torch.manual_seed(0)
    shapes = [(batch, h, seq, head_dim) for h in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


def full(q, k, v, g, causal=True):
    """Output and gradients of one process."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
    o.backward(g)
    return [o.detach(), *(leaf.grad for leaf in leaves)]


def own(tensors, layout=zigzag, group=None):
    """This rank's tokens of each (batch, heads, seq, head_dim)."""
    at = positions(tensors[0].shape[2], group, layout)
    return [x[:, :, at] for x in tensors]


def split(attention, q, k, v, g, causal=True, layout=zigzag, group=None, **options):
    """This rank's part of the same, from this rank's part of q, k and v."""
    *leaves, g = own((q, k, v, g), layout, group)
    leaves = [x.requires_grad_() for x in leaves]
    o = attention(*leaves, causal=causal, group=group, layout=layout, **options)
    o.backward(g)
    return [o.detach(), *(leaf.grad for leaf in leaves)]


def worst(ours, theirs, layout=zigzag, group=None):
    return max(difference(a, b) for a, b in zip(ours, own(theirs, layout, group), strict=True))


# ---- who holds what --------------------------------------------------------------------------------------------------


def test_layouts_and_positions(sized):
    n = sized.size
    for layout in (zigzag, contiguous):
        held = sized.run(lambda layout: positions(48, layout=layout), layout)
        assert all(len(mine) == 48 // n for mine in held)
        assert torch.cat(held).sort().values.tolist() == list(range(48))
        for rank, (a, b) in enumerate(layout(n)):
            c = 24 // n
            assert held[rank].tolist() == [*range(a * c, a * c + c), *range(b * c, b * c + c)]
    assert zigzag(4) == [(0, 7), (1, 6), (2, 5), (3, 4)] and contiguous(4) == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_shard_and_unshard_are_inverse_and_move_gradients(sized):
    def step(layout):
        n = dist.get_world_size()
        x = seeded(0, lambda: torch.randn(2, 24, 3)).requires_grad_()
        with ledger() as led:
            mine = shard_sequence(x, layout=layout)
            whole = unshard_sequence(mine, layout=layout)
            (whole * seeded(1, lambda: torch.randn(2, 24, 3))).sum().backward()
        assert torch.equal(whole, x) and torch.equal(x.grad, seeded(1, lambda: torch.randn(2, 24, 3)))
        assert torch.equal(mine, x[:, positions(24, layout=layout)])
        S = 4 * 2 * 24 * 3
        assert led.bytes_sent == 2 * (n - 1) * S // n  # forward out of the split, backward into it
        return torch.equal(shard_sequence(torch.arange(24), 0, layout=layout), positions(24, layout=layout))

    for layout in (zigzag, contiguous):
        assert all(sized.run(step, layout))


def test_rotary_positions_are_those_of_the_tokens(sized):
    def step(layout):
        x = seeded(0, lambda: torch.randn(2, 3, 24, 8))
        mine, turned = own((x, rotate(x)), layout)
        return torch.equal(rotate(mine, positions=positions(24, layout=layout)), turned)

    assert all(sized.run(step, zigzag) + sized.run(step, contiguous))


# ---- one block -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("diagonal", [False, True])
def test_the_formulas_are_those_of_the_flash_kernel(dtype, diagonal):
    q, k, v, g = qkvg(6, 2, 10, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    close = {torch.float32: CLOSE, torch.float64: 1e-12, torch.bfloat16: 2**-7}[dtype]
    ours, theirs = context.attend(q, k, v, diagonal), context.flash_attend(q, k, v, diagonal)
    s = q.to(wide) @ k.repeat_interleave(3, 1).to(wide).mT / 8**0.5
    if diagonal:
        s = s.masked_fill(torch.ones(10, 10).triu(1) > 0, -torch.inf)
    assert difference(ours[1], s.logsumexp(-1)) < close
    ours_back = context.gradients(g, q, k, v, *theirs, diagonal)
    theirs_back = context.flash_gradients(g, q, k, v, *theirs, diagonal)
    for a, b in zip([*ours, *ours_back], [*theirs, *theirs_back], strict=True):
        assert a.dtype == wide and difference(a, b.to(wide)) < close


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("seq", [6, 10])  # of fewer than 8 keys the flash kernel itself loses it
def test_what_is_no_number_is_not_lost(seq, name, bad):
    tensors = dict(zip("qkv", qkvg(4, 2, seq)))
    tensors[name][0, 0, 3, 1] = bad
    ours, theirs = (compute(*tensors.values()) for compute in (context.attend, context.flash_attend))
    assert any(not a.isfinite().all() for a in ours)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.isfinite(), b.isfinite())


def test_blocks_are_put_together_in_any_order():
    q, k, v, _ = qkvg(4, 2, 12)
    whole = context.attend(q, k, v)
    for order in ([0, 1, 2], [2, 0, 1]):
        o, L = torch.zeros_like(q), torch.full(q.shape[:-1], -torch.inf)
        for i in order:
            context.merge(o, L, *context.attend(q, k[:, :, 4 * i : 4 * i + 4], v[:, :, 4 * i : 4 * i + 4]))
        assert difference(o, whole[0]) < CLOSE and difference(L, whole[1]) < CLOSE


# ---- equal to one process --------------------------------------------------------------------------------------------


def check_attention():
    """Largest differences: heads of each kind, both layouts, with and without a mask, in blocks of several sizes."""
    n, found = dist.get_world_size(), {}
    ways = [(attention, {}) for attention in ATTENTIONS]
    for kv_heads in (12, 6 if n == 3 else 4, 1):
        whole = qkvg(12, kv_heads, 24, 4)
        if kv_heads == 1:
            ways += [(ring_attention, {"tile": 2}), (ring_attention, {"tile": 64})]
        for causal in (True, False):
            theirs = full(*whole, causal)
            for (attention, options), layout in itertools.product(ways, (zigzag, contiguous)):
                what = f"{attention.__name__} {options}, {kv_heads} key heads, causal={causal}, {layout.__name__}"
                found[what] = worst(split(attention, *whole, causal, layout, **options), theirs, layout)
    return found


def test_attention_and_gradients_equal_one_process(sized):
    for found in sized.run(check_attention):
        assert len(found) == 44 and not {what: far for what, far in found.items() if not far < CLOSE}


def test_derivatives_of_the_ring_against_finite_differences(world):
    def step():
        q, k, v, _ = qkvg(2, 1, 8, 2, torch.float64, 1)

        def attention(q, k, v):
            return unshard_sequence(ring_attention(*(shard_sequence(x, 2) for x in (q, k, v))), 2)

        leaves = [x.requires_grad_() for x in (q, k, v)]
        return torch.autograd.gradcheck(attention, leaves, fast_mode=True)

    assert world.run(step) == [True] * 4


def test_large_scores_neither_overflow_nor_vanish(world):
    def step():
        q, k, v, g = qkvg(4, 2, 32)
        theirs, ours = full(300 * q, k, v, g), split(ring_attention, 300 * q, k, v, g, tile=4)
        assert all(x.isfinite().all() for x in ours)
        return worst(ours[:1], theirs[:1])  # the output

    assert all(value < 1e-3 for value in world.run(step))  # exp of scores near 1000: their last bits count


def test_sums_are_in_float32_whatever_the_dtype(world):
    def step(attention):
        whole = qkvg(4, 2, 64, dtype=torch.bfloat16)
        exact = full(*(x.double() for x in whole))
        ours = split(attention, *whole)
        assert {x.dtype for x in ours} == {torch.bfloat16}
        return worst([x.double() for x in ours], exact)

    for attention in ATTENTIONS:
        assert all(value < 0.02 for value in world.run(step, attention))  # bfloat16 has 8 bits
    assert max(world.run(step, ring_attention)) < 2**-7


def test_tensors_with_gaps_in_memory_and_only_some_gradients(world):
    def step():
        q, k, v, g = own(qkvg(4, 2, 16))
        expected = ring_attention(q, k, v)
        gaps = [x.mT.contiguous().mT for x in (q, k, v)]
        gaps[1].requires_grad_()
        o = ring_attention(*gaps)
        o.backward(g.mT.contiguous().mT)
        with torch.no_grad():
            ring_attention(*gaps)
        return torch.equal(o, expected) and gaps[1].grad is not None and gaps[0].grad is None

    assert world.run(step) == [True] * 4


def test_two_groups_of_two_work_side_by_side(world):
    def step():
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
        group, found = mesh.get_group("context"), []
        for attention in ATTENTIONS:
            whole = [x + mesh.get_local_rank("data") for x in qkvg(4, 2, 16)]
            with ledger() as led:
                ours = split(attention, *whole, group=group)
            found.append(worst(ours, full(*whole), group=group))
            assert {call.group for call in led.calls} == {tuple(dist.get_process_group_ranks(group))}
        return max(found)

    assert all(value < CLOSE for value in world.run(step))


# ---- bytes -----------------------------------------------------------------------------------------------------------


def sent(attention, kv_heads, dtype=torch.float32):
    q, k, v, g = own(qkvg(12, kv_heads, 48, dtype=dtype))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with ledger() as forward:
        o = attention(*leaves)
    with ledger() as backward:
        o.backward(g)
    return [{name: row for name, row in counts(led).items() if name != "recv"} for led in (forward, backward)]


def test_bytes_are_those_of_the_docstrings(sized):
    n = sized.size
    for kv_heads in {12, 6 if n == 3 else 4, 1}:
        S_q, S_k = 4 * 2 * 12 * 48 * 8, 4 * 2 * kv_heads * 48 * 8
        ring = sized.run(sent, ring_attention, kv_heads)
        gather = sized.run(sent, all_gather_attention, kv_heads)
        trade = sized.run(sent, all_to_all_attention, kv_heads)
        if n == 1:
            assert ring + gather + trade == [[{}, {}]] * 3
            continue
        once = (n - 1) * 2 * S_k // n
        assert ring == [[{"send": (n - 1, once)}, {"send": (2 * (n - 1), 2 * once)}]] * n
        assert gather == [[{"all_gather_single": (1, once)}, {"reduce_scatter_single": (1, once)}]] * n
        S_k = S_k * max(n, kv_heads) // kv_heads
        assert trade == [[{"all_to_all_single": (4, (n - 1) * (2 * S_q + 2 * S_k) // n**2)}] * 2] * n


def test_in_bfloat16_half_as_much_travels_and_gradients_in_float32(world):
    once = 3 * 2 * (2 * 2 * 4 * 48 * 8) // 4
    found = world.run(sent, ring_attention, 4, torch.bfloat16)
    assert found == [[{"send": (3, once)}, {"send": (6, 3 * once)}]] * 4


def test_the_attention_alone_asks_nobody(world):
    def step():
        q, k, v, _ = own(qkvg(4, 2, 16))
        return torch.equal(ring_attention.__wrapped__(q, k, v), ring_attention(q, k, v))

    assert world.run(step) == [True] * 4


# ---- work ------------------------------------------------------------------------------------------------------------


def flops(attention, layout, causal, seq=48, **options):
    q, k, v, g = own(qkvg(4, 2, seq), layout)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with FlopCounterMode(display=False) as forward:
        o = attention(*leaves, causal=causal, layout=layout, **options)
    with FlopCounterMode(display=False) as backward:
        o.backward(g)
    return forward.get_total_flops(), backward.get_total_flops()


def test_zigzag_gives_every_rank_the_same_blocks_to_compute(sized):
    n = sized.size
    chunk = 48 // (2 * n)
    block = 2 * 2 * 4 * chunk**2 * 8  # FLOPs of one matmul with a block of scores, all heads
    run = functools.partial(sized.run, functools.partial(flops, tile=chunk))  # torch counts no kernels for the CPU
    balanced, causal = run(ring_attention, zigzag, True), blocks_by_rank(n)
    assert causal == [[3] + [2] * (n - 1)] * n
    assert balanced == [(2 * (2 * n + 1) * block, 5 * (2 * n + 1) * block)] * n  # 2 matmuls forward, 5 backward
    uneven, by_rank = run(ring_attention, contiguous, True), blocks_by_rank(n, contiguous)
    assert [sum(steps) for steps in by_rank] == [4 * rank + 3 for rank in range(n)]
    assert uneven == [(2 * (4 * rank + 3) * block, 5 * (4 * rank + 3) * block) for rank in range(n)]
    for layout in (zigzag, contiguous):
        assert sum(map(sum, blocks_by_rank(n, layout))) == n * (2 * n + 1)
        assert blocks_by_rank(n, layout, causal=False) == [[4] * n] * n
        assert run(ring_attention, layout, False) == [(8 * n * block, 20 * n * block)] * n


def test_tiles_save_the_masked_corners_and_stay_balanced(world):
    whole = world.run(functools.partial(flops, seq=32, tile=4), ring_attention, zigzag, True)
    tiled = world.run(functools.partial(flops, seq=32, tile=2), ring_attention, zigzag, True)
    # A chunk of 4 is 2 tiles: the two diagonal blocks need 3 tiles of 4. 7 full blocks stay.
    assert tiled == [tuple(count * (7 * 4 + 2 * 3) // (9 * 4) for count in whole[0])] * 4


def test_a_failure_in_the_ring_leaves_no_message_half_received(world):
    """The next one would meet it, and wait for ever."""

    def failing(*_):
        raise ArithmeticError("in the first block")

    def run(kernel):
        with mock.patch.object(importlib.import_module(ring_attention.__module__), kernel, failing):
            return split(ring_attention, *qkvg(4, 2, 48))

    def right():
        q, k, v, g = qkvg(4, 2, 48)
        return worst(split(ring_attention, q, k, v, g), full(q, k, v, g))

    for kernel in ("flash_attend", "flash_gradients"):
        pids = world.pids
        with pytest.raises(RankError, match="ArithmeticError"):
            world.run(run, kernel)
        assert max(world.run(right)) < CLOSE and world.pids == pids


# ---- memory ----------------------------------------------------------------------------------------------------------


def held(attention, seq, **options):
    """Bytes held after the forward pass, and the most in it and in the backward pass, besides q, k, v and g."""
    *leaves, g = qkvg(4, 2, seq, 16, batch=1) if attention is full_attention else own(qkvg(4, 2, seq, 16, batch=1))
    leaves = [x.requires_grad_() for x in leaves]
    with memory(nn.Identity()) as forward:
        o = attention(*leaves, **options)
        time.sleep(0.02)  # the thread that sent the last message lets go of it a moment later
    with memory(nn.Identity()) as backward:
        o.backward(g)
    return forward.at_end["activations"], forward.total, backward.total


def full_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def test_memory_is_that_of_the_docstrings(sized):
    n, seq, tile = sized.size, 384, 8  # a rank's k and v are more than the small things together
    o, L, kv = 4 * 4 * seq * 16, 4 * 4 * seq, 2 * 4 * 2 * seq * 16  # bytes of the whole sequence's
    block = 4 * 4 * tile * max(tile, 16)  # of scores, or of their part of the output
    for kept, forward, backward in sized.run(functools.partial(held, tile=tile), ring_attention, seq):
        assert kept == (o + L) // n
        assert kept == sized.run(held, ring_attention, seq)[0][0]  # with the flash kernel too
        # o, L, two ranks' k and v
        assert (o + L + 2 * kv if n > 1 else o + L + kv) / n <= forward <= (o + L + 2 * kv) / n + 8 * block
        # dq, D, two ranks' k and v, and gradients: for those at work, those that leave and arrive, and this rank's
        assert backward <= (o + L + 6 * kv) / n + 8 * block
    for kept, *_ in sized.run(held, all_gather_attention, seq):
        assert kept >= (o + L) // n + kv + seq * seq // n  # all k and v, and the mask
    if n == 3:  # 4 heads
        return
    kv = kv * max(n, 2) // 2  # 4 ranks need 2 key and value heads twice
    for kept, *_ in sized.run(held, all_to_all_attention, seq):
        # some heads of q, k, v, o and L, and all heads of o; orders of the tokens
        assert kept <= (o + kv + o + L + o) // n + 4 * 8 * seq


def test_what_the_ring_holds_falls_with_the_number_of_ranks(world):
    one, ring, gather = (world.run(held, attention, 512)[0] for attention in (full_attention, *ATTENTIONS[:2]))
    assert ring[0] * 4 == one[0] < gather[0] * 4


# ---- the transformer -------------------------------------------------------------------------------------------------


def batch(seq=24, rows=4):
    text = seeded(7, lambda: torch.randint(SIZES["vocab"], (rows, seq + 1)))
    return text[:, :-1], text[:, 1:]


def train(model, loss_of, finish, steps=2):
    """Losses of some steps with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        finish(model)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def one_process(sizes=SIZES):
    tokens, targets = batch()
    model = seeded(0, lambda: Transformer(**sizes))
    return train(model, lambda m: next_token_loss(m(tokens), targets), lambda m: None), model


def average(losses, group=None):
    dist.all_reduce(losses, dist.ReduceOp.AVG, group)
    return losses


def check_transformer():
    """Largest differences of the losses and of the parameters, by attention and layout."""
    sizes = SIZES | {"kv_heads": 3 if dist.get_world_size() == 3 else 4}
    theirs, one = one_process(sizes)
    found = {}
    for attend, layout in [*((attend, zigzag) for attend in ATTENTIONS), (ring_attention, contiguous)]:
        mine = [shard_sequence(tensor, layout=layout) for tensor in batch()]
        model = context_parallel(seeded(dist.get_rank(), lambda: Transformer(**sizes)), attend=attend, layout=layout)
        losses = train(model, lambda m, mine=mine: next_token_loss(m(mine[0]), mine[1]), average_gradients)
        assert list(model.state_dict()) == list(one.state_dict())
        pairs = zip(model.parameters(), one.parameters(), strict=True)
        far = difference(average(losses), theirs), max(difference(a, b) for a, b in pairs)
        found[attend.__name__, layout.__name__] = far
    return found


def test_a_transformer_trains_as_on_one_process(sized):
    for found in sized.run(check_transformer):
        assert len(found) == 4
        assert all(losses < CLOSE and parameters < 1e-4 for losses, parameters in found.values()), found


def test_data_and_context_parallel_together(world):
    """A 2 x 2 mesh: half of the batch, half of the sequence. Gradients are averaged over all four ranks at once."""

    def step():
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
        group, replica = mesh.get_group("context"), mesh.get_local_rank("data")
        theirs, one = one_process()
        rows = [tensor.chunk(2)[replica] for tensor in batch()]
        x, y = (shard_sequence(tensor, 1, group) for tensor in rows)
        model = DataParallel(context_parallel(seeded(dist.get_rank(), lambda: Transformer(**SIZES)), group))
        finish = DataParallel.finish_gradient_synchronization
        losses = average(train(model, lambda m: next_token_loss(m(x), y), finish))
        pairs = zip(model.parameters(), one.parameters(), strict=True)
        # model began with the first rank's parameters: those of seed 0
        return difference(losses, theirs), max(difference(a, b) for a, b in pairs)

    for losses, parameters in world.run(step):
        assert losses < CLOSE and parameters < 1e-4


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_and_context_parallel_together(world, sequence_parallel):
    """A 2 x 2 mesh: half of the heads, half of the sequence. A ring for each half of the heads."""

    def step():
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "tensor"))
        ring, tensor = mesh.get_group("context"), mesh.get_group("tensor")
        theirs, one = one_process()
        x, y = (shard_sequence(whole, 1, ring) for whole in batch())
        model = tensor_parallel(seeded(0, lambda: Transformer(**SIZES)), tensor, sequence_parallel)
        model = context_parallel(model, ring)
        finish = functools.partial(average_gradients, group=ring)
        losses = average(train(model, lambda m: parallel_cross_entropy(m(x), y, tensor), finish), ring)
        ours = gather_full_state_dict(model)
        return difference(losses, theirs), max(difference(ours[name], p.data) for name, p in one.named_parameters())

    for losses, parameters in world.run(step):
        assert losses < CLOSE and parameters < 1e-4


def test_autocast_sends_bfloat16(world):
    def step():
        x, y = (shard_sequence(tensor) for tensor in batch())
        one = seeded(0, lambda: Transformer(**SIZES))
        model = context_parallel(copy.deepcopy(one))
        with torch.autocast("cpu", torch.bfloat16), ledger() as led:
            loss = next_token_loss(model(x), y)
        loss.backward()
        tokens, targets = batch()
        exact = next_token_loss(one(tokens), targets).detach()
        assert {call.dtype for call in led.calls} == {"bfloat16"}
        return difference(average(loss.detach()), exact)

    assert all(value < 1e-2 for value in world.run(step))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_autocast_leaves_the_dtype(world, attention):
    def step():
        exact, mine = full(*(whole := qkvg(12, 4, 24))), own(whole[:3])
        with torch.autocast("cpu", torch.bfloat16):
            return attention(*mine).dtype, difference(attention(*mine), *own(exact[:1]))

    assert all(dtype == torch.float32 and off < CLOSE for dtype, off in world.run(step))


# ---- bad input -------------------------------------------------------------------------------------------------------


def rank_two(right, wrong):
    return wrong if dist.get_rank() == 2 else right


def call(attention, q=(1, 4, 4, 2), k=(1, 4, 4, 2), v=None, **options):
    return attention(torch.ones(q), torch.ones(k), torch.ones(v or k), **options)


MISTAKES = [
    (
        lambda: shard_sequence(torch.ones(2, 20)),
        "4 ranks hold 2 chunks each, and 8 chunks cannot share 20 tokens equally; pad the sequence to 24.",
    ),
    (lambda: positions(12), "8 chunks cannot share 12 tokens equally; pad the sequence to 16."),
    (
        lambda: shard_sequence(torch.ones(2, rank_two(16, 24))),
        "shard_sequence: the ranks disagree: rank 2 brought x of shape (2, 24), float32; rank 0 brought x of shape "
        "(2, 16), float32.",
    ),
    (
        lambda: shard_sequence(torch.ones(2, 16), layout=rank_two(zigzag, contiguous)),
        "rank 2 brought dim=1, layout=contiguous; rank 0 brought dim=1, layout=zigzag.",
    ),
    (
        lambda: unshard_sequence(torch.ones(2, 3)),
        "8 chunks cannot share 12 tokens equally",
    ),
    (lambda: call(ring_attention, (1, 4, 3, 2), (1, 4, 3, 2)), "rank 0 brought 3 tokens, which are not 2 equal chunks"),
    (
        lambda: call(ring_attention, *[rank_two((1, 4, 4, 2), (1, 4, 6, 2))] * 2),
        "ring_attention: the ranks disagree: rank 2 brought q of shape (1, 4, 6, 2), float32; rank 0 brought q of",
    ),
    (
        lambda: call(all_gather_attention, causal=rank_two(True, False)),
        "all_gather_attention: the ranks disagree: rank 2 brought causal=False, layout=zigzag; rank 0 brought",
    ),
    (
        lambda: call(ring_attention, k=rank_two((1, 2, 4, 2), (1, 3, 4, 2))),
        "ring_attention: rank 2 brought 4 query heads, which cannot share 3 key and value heads equally.",
    ),
    (
        lambda: call(ring_attention, v=rank_two((1, 4, 4, 2), (1, 4, 4, 3))),
        "rank 2 brought q, k, v of shapes (1, 4, 4, 2), (1, 4, 4, 2), (1, 4, 4, 3); they have to be (batch, heads,",
    ),
    (
        lambda: call(ring_attention, tile=0),
        "ring_attention: rank 0 asked for tile=0; a block has a whole number of queries and keys, at least 1. None "
        "chooses one.",
    ),
    (lambda: call(ring_attention, tile=1.5), "ring_attention: rank 0 asked for tile=1.5; a block has a whole number"),
    (
        lambda: call(ring_attention, tile=rank_two(2, 4)),
        "rank 2 brought causal=True, layout=zigzag, tile=4; rank 0 brought causal=True, layout=zigzag, tile=2.",
    ),
    (lambda: call(ring_attention, (1, 4, 0, 2), (1, 4, 0, 2)), "rank 0 brought 0 tokens, which are not 2 equal chunks"),
    (lambda: call(ring_attention, q=(1, 4, 6, 2)), "q and k may differ in the number of heads, and in nothing else."),
    (
        lambda: call(all_to_all_attention, (1, 6, 4, 2), (1, 6, 4, 2)),
        "all_to_all_attention: 6 query heads cannot be shared equally by 4 ranks; take fewer ranks, or ring_attention",
    ),
    (
        lambda: call(all_to_all_attention, (1, 12, 4, 2), (1, 3, 4, 2)),
        "all_to_all_attention: 3 key and value heads cannot be shared equally by 4 ranks, nor can the ranks by the",
    ),
    (
        lambda: context_parallel(Transformer(**SIZES | {"vocab": rank_two(40, 41)})),
        "context_parallel: the ranks disagree: rank 2 brought embedding.weight of shape (41, 48), float32; rank 0",
    ),
    (
        lambda: context_parallel(Transformer(**SIZES), attend=rank_two(ring_attention, all_gather_attention)),
        "rank 2 brought attend=all_gather_attention, layout=zigzag; rank 0 brought attend=ring_attention",
    ),
    (
        lambda: context_parallel(context_parallel(Transformer(**SIZES))),
        "context_parallel: rank 0 brought a model with attention that is split by the sequence already; start from",
    ),
    (lambda: context_parallel(nn.Linear(2, 2)), "rank 0 brought a model with no Attention"),
    (
        lambda: context_parallel(
            Transformer(**SIZES), attend=functools.partial(ring_attention, tile=rank_two(4, 2)), layout=zigzag
        ),
        "rank 2 brought attend=ring_attention(tile=2), layout=zigzag; rank 0 brought attend=ring_attention(tile=4)",
    ),
    (
        lambda: context_parallel(Transformer(**SIZES))(torch.zeros(1, rank_two(4, 3), dtype=torch.long)),
        "context_parallel: rank 2 brought 3 tokens, which are not 2 equal chunks; cut the sequence with",
    ),
    (
        lambda: context_parallel(Transformer(**SIZES))(torch.zeros(1, rank_two(4, 6), dtype=torch.long)),
        "context_parallel: the ranks disagree: rank 2 brought q of shape (1, 12, 6, 4), float32; rank 0 brought q of",
    ),
    (lambda: shard_sequence(torch.ones(2, 16), dim=5), "brought dim=5 for x of 2 dimensions; take -2 to 1."),
    (lambda: unshard_sequence(torch.ones(2, 16), dim=-3), "brought dim=-3 for x of 2 dimensions; take -2 to 1."),
    (lambda: call(ring_attention, k=(1, 0, 4, 2)), "brought 4 query heads, which cannot share 0 key and value heads"),
    *(
        (
            lambda attention=attention, dtype=dtype: attention(*[torch.ones(1, 4, 4, 2, dtype=dtype)] * 3),
            f"{attention.__name__}: rank 0 brought q, k, v of {str(dtype)[6:]}; ",
        )
        for attention in ATTENTIONS
        for dtype in (torch.int64, torch.complex64)
    ),
    (
        lambda: call(ring_attention, layout=rank_two(lambda n: zigzag(n), lambda n: contiguous(n))),
        "rank 2 brought layout(4) = [(0, 1), (2, 3), (4, 5), (6, 7)]; rank 0 brought layout(4) = [(0, 7), (1, 6), ",
    ),
    (
        lambda: shard_sequence(torch.ones(2, 16), layout=lambda n: [(0, 1)] * n),
        "gives 4 ranks the chunks [(0, 1), (0, 1), (0, 1), (0, 1)]; each of 0 to 7 has to be there once, and each rank",
    ),
    (lambda: call(ring_attention, layout=lambda n: [(0,), (1, 2, 3), (4, 5), (6, 7)]), "and each rank has two."),
    (lambda: context_parallel(Transformer(**SIZES), layout=lambda n: zigzag(n)[1:]), "and each rank has two."),
    (
        lambda: positions(16, layout=lambda n: zigzag(n + 1)),
        "every rank brought a layout that gives 4 ranks the chunks",
    ),
]


def messages_of(mistakes):
    """What each of them raised, or None. No rank may be left waiting, so all can be made one after the other."""
    return [error_of(mistake) for mistake in mistakes]


def test_a_mistake_is_one_clear_error_on_every_rank(world):
    outs = world.run(messages_of, [mistake for mistake, _ in MISTAKES])
    for (_, says), *messages in zip(MISTAKES, *outs, strict=True):
        assert messages[0] and says in messages[0] and "\n" not in messages[0], (says, messages[0])
        assert messages[0].startswith("ValueError: ") and len(set(messages)) == 1, messages


def test_everything_public_is_in_the_module():
    assert all(hasattr(context, name) for name in context.__all__)
    assert {"ring_attention", "all_gather_attention", "all_to_all_attention", "context_parallel"} <= set(
        context.__all__
    )
