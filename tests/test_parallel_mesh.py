"""One model on every layout of 4 and 8 ranks: the losses, gradient norms and weights of one process."""

import functools
import gc
import os
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from lecture_lib import RankError
from lecture_lib.parallel.mesh import SCHEDULES, Mesh, ParallelTransformer, seed_of
from lecture_lib.parallel.model import Transformer, next_token_loss
from lecture_lib.trace import ledger

pytestmark = pytest.mark.timeout(400)  # a crowded machine takes many times as long
CLOSE = 1e-4  # relative
LAYERS, HIDDEN, VOCAB, BATCH, SEQ = 2, 32, 64, 8, 16
MODEL = dict(layers=LAYERS, hidden=HIDDEN, heads=4, kv_heads=2, ffn_hidden=48, vocab=VOCAB)
CLIP = 0.5  # below the norm in every step
STEPS = 20
RATE = 3e-3  # of AdamW


def batch_of(step):
    random = torch.Generator().manual_seed(step % 4)  # four batches again and again: the loss falls
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=random)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def whole_model(**changes):
    torch.manual_seed(0)
    return Transformer(**MODEL | changes)


def in_one_process(**changes):
    """(losses, norms, parameters by name) of STEPS steps"""
    model = whole_model(**changes)
    optimizer, losses, norms = torch.optim.AdamW(model.parameters(), lr=RATE), [], []
    for step in range(STEPS):
        tokens, targets = batch_of(step)
        loss = next_token_loss(model(tokens), targets)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def one_process(worlds):
    """For a model that is changed like this: what ``in_one_process`` returns, once."""

    @functools.cache
    def of(**changes):
        return worlds[1].run(in_one_process, **changes)[0]

    return of


def on_a_mesh(axes, options, steps=STEPS, **changes):
    mesh = Mesh(**axes)
    try:
        model = ParallelTransformer(whole_model(**changes), mesh, **options)
        optimizer, losses, norms = torch.optim.AdamW(model.parameters(), lr=RATE), [], []
        for step in range(steps):
            losses.append(model.step(*batch_of(step)).item())
            norms.append(model.clip_gradients(CLIP).item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, norms, model.full_state_dict() if steps == STEPS else None
    finally:
        mesh.close()


def far(ours, theirs):
    """Largest relative difference."""
    ours, theirs = torch.tensor(ours), torch.tensor(theirs)
    return ((ours - theirs).abs() / theirs.abs()).max().item()


def check_equal(outs, reference):
    losses, norms, parameters = reference
    for theirs in outs:
        assert far(theirs[0], losses[: len(theirs[0])]) < CLOSE
        assert far(theirs[1], norms[: len(theirs[1])]) < CLOSE
    if outs[-1][2] is not None:
        assert losses[-1] < 0.9 * losses[0]  # something is learnt
        assert outs[-1][2].keys() == parameters.keys()
        for name, ours in outs[-1][2].items():
            assert torch.allclose(ours, parameters[name], atol=1e-4), name


@pytest.mark.parametrize(
    "axes, options",
    [  # data x tensor x pipeline
        pytest.param(dict(dp_replicate=4), {}, id="4x1x1"),
        pytest.param(dict(tp=4), {}, id="1x4x1"),
        pytest.param(dict(pp=4), dict(micro_batches=4), id="1x1x4"),
        pytest.param(dict(dp_shard=2, tp=2), dict(sequence_parallel=True), id="2x2x1"),
        pytest.param(dict(dp_replicate=2, pp=2), dict(micro_batches=2), id="2x1x2"),
        pytest.param(dict(tp=2, pp=2), dict(micro_batches=2, sequence_parallel=True), id="1x2x2"),
        pytest.param(dict(cp=2, tp=2), {}, id="cp 2 tp 2"),
    ],
)
def test_every_layout_of_4_ranks_trains_as_one_process(world, one_process, axes, options):
    changes = dict(layers=4) if axes.get("pp") == 4 else {}
    check_equal(world.run(on_a_mesh, axes, options, **changes), one_process(**changes))


def test_2x2x2_trains_as_one_process(worlds, one_process):
    check_equal(worlds[8].run(on_a_mesh, dict(dp_replicate=2, tp=2, pp=2), dict(micro_batches=2)), one_process())


@pytest.mark.parametrize(
    "axes, options",
    [
        pytest.param(dict(dp_shard=4), {}, id="sharded"),
        pytest.param(dict(dp_replicate=2, dp_shard=2), dict(micro_batches=2), id="half sharded"),
        pytest.param(dict(dp_replicate=2, tp=2), dict(micro_batches=2), id="dp 2 tp 2"),
        pytest.param(dict(dp_shard=2, pp=2), dict(micro_batches=2), id="sharded, pp 2"),
        pytest.param(dict(cp=4), {}, id="cp 4"),
        pytest.param(dict(cp=2, tp=2), dict(sequence_parallel=True), id="cp 2 tp 2, sequence parallel"),
        pytest.param(dict(cp=2, pp=2), dict(micro_batches=2), id="cp 2 pp 2"),
        pytest.param(dict(cp=2, dp_shard=2), {}, id="cp 2 sharded"),
    ],
)
def test_the_other_layouts_begin_as_one_process_does(world, one_process, axes, options):
    check_equal(world.run(on_a_mesh, axes, options, 2), one_process())


def test_a_layout_of_8_ranks_with_another_three_axes_does_too(worlds, one_process):
    options = dict(micro_batches=2, sequence_parallel=True)
    check_equal(worlds[8].run(on_a_mesh, dict(dp_shard=2, cp=2, tp=2), options, 2), one_process())


@pytest.mark.parametrize("axes", [dict(dp_shard=4), dict(dp_shard=2, pp=2), dict(tp=2, pp=2)], ids=str)
def test_a_tied_embedding_is_one_parameter_wherever_its_two_ends_are(world, one_process, axes):
    check_equal(world.run(on_a_mesh, axes, dict(micro_batches=2), 3, tied=True), one_process(tied=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_gives_the_same(world, one_process, schedule):
    options = dict(schedule=schedule, micro_batches=4)
    check_equal(world.run(on_a_mesh, dict(pp=2, dp_replicate=2), options, 2, layers=4), one_process(layers=4))


@pytest.mark.parametrize(
    "axes, recompute",
    [
        (dict(dp_shard=2, tp=2), "selective"),
        (dict(pp=2, tp=2), "full"),
        (dict(dp_replicate=2, cp=2), "selective"),
    ],
    ids=str,
)
def test_recomputing_gives_the_same(world, one_process, axes, recompute):
    options = dict(recompute=recompute, sequence_parallel="tp" in axes, micro_batches=2)
    check_equal(world.run(on_a_mesh, axes, options, 2), one_process())


def test_the_loss_is_the_mean_over_the_ranks_that_share_the_batch(world):
    """Each rank's own loss is that of its samples; what ``step`` returns is their mean, and nothing else's."""

    def own_and_mean():
        mesh = Mesh(dp_replicate=2, tp=2)
        model, batch = ParallelTransformer(whole_model(), mesh), batch_of(0)
        mean, evaluated = model.step(*batch).item(), model.evaluate(*batch).item()
        x, y = (model.share(part) for part in batch)
        own = model._loss_of(model.stages[0](x), y).item()
        mesh.close()
        return own, mean, evaluated

    outs = world.run(own_and_mean)
    own = [out[0] for out in outs]
    assert own[0] == own[1] != own[2] == own[3]  # along tp the same, along dp another
    for _, mean, evaluated in outs:
        assert mean == evaluated == pytest.approx((own[0] + own[2]) / 2, rel=1e-6)


# ---- dropout ---------------------------------------------------------------------------------------------------------


def dropped(axes, options, steps):
    """For each step, where the first block's attention adds nothing: bool (batch, seq, hidden); and the losses."""
    mesh = Mesh(**axes)
    model = ParallelTransformer(whole_model(), mesh, dropout=0.5, **options)
    masks, losses = [], []
    block = next(part for part in model.stages[0].modules() if hasattr(part, "attention"))
    block.attention.register_forward_hook(lambda module, x, y: masks.append(y == 0))
    for step in steps:
        masks.clear()
        model.seed_dropout(7, step)
        losses.append((model.step(*batch_of(0)).item(), masks[0]))
    with_none = model.evaluate(*batch_of(0)).item()
    mesh.close()
    return losses, with_none


@pytest.mark.parametrize(
    "axes, options, alike",  # which ranks drop the same
    [
        (dict(dp_replicate=2, tp=2), {}, [{0, 1}, {2, 3}]),
        (dict(dp_shard=2, tp=2), dict(sequence_parallel=True), [{0}, {1}, {2}, {3}]),
        (dict(cp=2, tp=2), {}, [{0, 1}, {2, 3}]),
    ],
    ids=str,
)
def test_dropout_drops_the_same_where_ranks_hold_the_same_and_only_there(world, one_process, axes, options, alike):
    outs = world.run(dropped, axes, options, [3, 4, 3])
    masks = [[mask for _, mask in losses] for losses, _ in outs]
    for rank, mine in enumerate(masks):
        assert abs(mine[0].float().mean() - 0.5) < 0.05
        # The step decides, and can be redone.
        assert not torch.equal(mine[0], mine[1]) and torch.equal(mine[0], mine[2])
        same = {other for other, theirs in enumerate(masks) if torch.equal(mine[0], theirs[0])}
        assert same in alike and rank in same
    for losses, with_none in outs:
        assert [loss for loss, _ in losses] == [loss for loss, _ in outs[0][0]]
        assert losses[0][0] == losses[2][0] != losses[1][0]
        assert with_none == pytest.approx(one_process()[0][0], rel=CLOSE)


def test_stages_drop_different_numbers_and_recomputing_the_same(world):
    def seeds():
        mesh = Mesh(pp=2, tp=2)
        found = seed_of(mesh, False, 7, 3), seed_of(mesh, True, 7, 3), seed_of(mesh, False, 7, 4)
        mesh.close()
        return found

    plain, sequence, next_step = zip(*world.run(seeds))
    assert plain[0] == plain[1] != plain[2] == plain[3]
    assert len(set(sequence)) == 4 and not set(plain) & set(next_step)
    axes, ways = dict(dp_replicate=2, tp=2), ("none", "selective", "full")
    losses = [
        world.run(on_a_mesh, axes, dict(recompute=how, sequence_parallel=True, dropout=0.2), 1)[0][0] for how in ways
    ]
    assert losses[0] == pytest.approx(losses[1], rel=CLOSE) and losses[0] == pytest.approx(losses[2], rel=CLOSE)


# ---- what is sent ----------------------------------------------------------------------------------------------------


def sent_in_a_step(axes, options, **changes):
    """Bytes by axis on this rank, without what the loss and the norm take: 4 and 8 bytes a call."""
    mesh = Mesh(**axes)
    model = ParallelTransformer(whole_model(**changes), mesh, **options)
    model.step(*batch_of(0))  # a pipeline tries its stages first
    with ledger() as led:
        model.step(*batch_of(1))
    sent = mesh.bytes_by_axis(call for call in led.calls if call.elements > 1)
    parameters = sum(piece.parameter.numel() for piece in model.pieces.values())
    mesh.close()
    return {axis: float(count) for axis, count in sent.items()}, parameters


S = BATCH * SEQ * HIDDEN * 4  # bytes of a batch's activations
PARAMETERS = sum(p.numel() for p in whole_model().parameters())


def test_data_parallel_sends_the_gradients_once_whatever_the_micro_batches(world):
    for micro_batches in (1, 2):
        for sent, _ in world.run(sent_in_a_step, dict(dp_replicate=4), dict(micro_batches=micro_batches)):
            assert sent == {"dp_replicate": 2 * 3 / 4 * 4 * PARAMETERS}


def test_fully_sharded_sends_everything_for_each_micro_batch(world):
    embedding = VOCAB * HIDDEN  # stays whole: gathered once, its gradients sent once
    for micro_batches in (1, 2):
        for sent, pieces in world.run(sent_in_a_step, dict(dp_shard=4), dict(micro_batches=micro_batches)):
            assert PARAMETERS / 4 - 50 < pieces < PARAMETERS / 4 + 50
            expected = micro_batches * 3 / 4 * 4 * (3 * (PARAMETERS - embedding) + 2 * embedding)
            assert sent == {"dp_shard": pytest.approx(expected, rel=0.01)}  # padding


def test_each_axis_sends_what_its_part_does_alone(world):
    """dp 2 x tp 2: half of the gradients of half of the matrices; 4L + 2 all-reduces of half of the batch."""
    for sent, parameters in world.run(sent_in_a_step, dict(dp_replicate=2, tp=2), {}):
        assert sent["dp_replicate"] == 4 * parameters
        assert sent["tp"] == (4 * LAYERS + 2) * S / 2 + 3 * BATCH * SEQ * 4 / 2
        assert sent.keys() == {"dp_replicate", "tp"}


def test_a_pipeline_sends_activations_and_their_gradients(world):
    for rank, (sent, _) in enumerate(world.run(sent_in_a_step, dict(pp=4), dict(micro_batches=4), layers=4)):
        assert sent == {"pp": S * ((rank < 3) + (rank > 0))}


# ---- 16 bits ---------------------------------------------------------------------------------------------------------


def dtypes_in_a_step(axes):
    """How many large tensors travel in each dtype, and dtypes of the parameters and their gradients."""
    mesh = Mesh(**axes)
    model = ParallelTransformer(whole_model(), mesh, compute_dtype=torch.bfloat16)
    with ledger() as led:
        model.step(*batch_of(0))
    held = {(piece.parameter.dtype, piece.parameter.grad.dtype) for piece in model.pieces.values()}
    mesh.close()
    return Counter(call.dtype for call in led.calls if call.elements >= BATCH * SEQ * HIDDEN // 4), held


def test_bf16_computes_in_16_bits_and_keeps_32(world, one_process):
    for travels, held in world.run(dtypes_in_a_step, dict(tp=4)):
        # What leaves a layer, and the gradient that leaves the head; the residual stream is in 32 bits.
        assert travels == {"bfloat16": 2 * LAYERS + 1, "float32": 2 * LAYERS + 1}
        assert held == {(torch.float32, torch.float32)}
    for travels, held in world.run(dtypes_in_a_step, dict(dp_shard=4)):
        assert travels.keys() == {"bfloat16"} and held == {(torch.float32, torch.float32)}
    for axes in (dict(dp_replicate=2, tp=2), dict(dp_shard=2, pp=2)):
        losses, *_ = world.run(on_a_mesh, axes, dict(compute_dtype=torch.bfloat16), 3)[0]
        assert 0 < far(losses, one_process()[0][:3]) < 0.02


# ---- the mesh itself -------------------------------------------------------------------------------------------------


def test_ranks_next_to_each_other_share_a_tensor(worlds):
    def neighbours():
        mesh = Mesh(pp=2, dp_replicate=2, tp=2)
        ranks = {axis: dist.get_process_group_ranks(mesh.group(axis)) for axis in ("pp", "dp_replicate", "tp")}
        mesh.close()
        return ranks

    assert worlds[8].run(neighbours)[5] == {"pp": [1, 5], "dp_replicate": [5, 7], "tp": [4, 5]}


def test_a_closed_mesh_gives_back_its_threads_and_connections(world):
    def used():
        for _ in range(2):
            on_a_mesh(dict(dp_shard=2, tp=2), {}, 1)
        gc.collect()  # a model and its hooks hold each other, and both hold the groups
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    if not os.path.isdir("/proc/self/task"):
        pytest.skip("this system has no /proc to count threads in")
    first, again = world.run(used), world.run(used)
    for (threads, files), (threads_again, files_again) in zip(first, again):
        assert threads_again <= threads + 2 and files_again <= files + 2


# ---- bad input -------------------------------------------------------------------------------------------------------


def message_of(world, *args):
    """What all ranks raise."""
    with pytest.raises(RankError) as raised:
        world.run(on_a_mesh, *args)
    assert isinstance(raised.value.exception, ValueError)
    assert str(raised.value).count("raised the same") == world.size - 1
    return str(raised.value.exception)


@pytest.mark.parametrize(
    "axes, options, said",
    [
        (dict(tp=3), {}, ["tp 3", "3 ranks", "there are 4"]),
        (dict(dp_replicate=2, dp_shard=2, tp=2), {}, ["8 ranks", "there are 4"]),
        (dict(tp=0, dp_replicate=4), {}, ["tp 0", "at least 1"]),
        (dict(pp=4), dict(schedule="interleaved", micro_batches=4), ["2 layers", "8 stages", "8 layers would do"]),
        (dict(pp=4), dict(schedule="zigzag"), ["'zigzag'", "one_f_one_b"]),
        (dict(pp=4), dict(micro_batches=0), ["0 micro-batches"]),
        (dict(dp_replicate=4), dict(micro_batches=4), ["8 samples", "dp_replicate 4", "4 micro-batches", "16"]),
        (dict(pp=2, dp_shard=2), dict(schedule="zero_bubble_h1"), ["zero_bubble_h1 with dp_shard"]),
        (dict(pp=2, tp=2), dict(schedule="zero_bubble_h1", recompute="full"), ["zero_bubble_h1 with recompute='full'"]),
        (dict(tp=4), dict(recompute="twice"), ["recompute='twice'", "selective"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_layout_that_does_not_fit_is_one_error_with_its_numbers(world, axes, options, said):
    message = message_of(world, axes, options, 1)
    assert all(part in message for part in said), message


def test_heads_and_sequences_that_cannot_be_shared(world):
    def build(heads, axes, seq=SEQ):
        mesh = Mesh(**axes)
        try:
            model = ParallelTransformer(Transformer(**MODEL | dict(hidden=48, heads=heads)), mesh)
            model.step(*torch.zeros(2, BATCH, seq, dtype=torch.int64))
        finally:
            mesh.close()

    for args, said in [
        ((6, dict(tp=4)), ["6 query heads", "4 ranks"]),
        ((6, dict(cp=4), 12), ["12 tokens", "8 chunks", "16"]),
    ]:
        with pytest.raises(RankError) as raised:
            world.run(build, *args)
        assert all(part in str(raised.value.exception) for part in said), str(raised.value)
        assert str(raised.value).count("raised the same") == 3


def test_ranks_that_ask_for_different_things_all_hear_of_it(world):
    def differently():
        mesh = Mesh(dp_replicate=4)
        try:
            ParallelTransformer(whole_model(), mesh, micro_batches=1 + (dist.get_rank() == 2))
        finally:
            mesh.close()

    with pytest.raises(RankError, match="rank 2 brought micro_batches=2"):
        world.run(differently)
