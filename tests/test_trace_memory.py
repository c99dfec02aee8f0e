"""The memory counter: exact bytes of programs whose tensors can be counted by hand."""

import copy
import gc
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from lecture_lib.parallel.model import Transformer, deep_mlp, next_token_loss
from lecture_lib.trace import Memory, memory
from lecture_lib.trace.memory import KINDS


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two that wait for each other take longer on a busy machine
    yield
    torch.set_num_threads(threads)


EMPTY = dict.fromkeys(KINDS, 0)
K = 1024  # bytes of 256 float32


def activations(program, *args):
    """Peak bytes of what a program makes."""
    with memory(nn.Module()) as held:
        kept = program(*args)  # noqa: F841 (alive until the block has ended)
    assert {**held.peak, "activations": 0} == EMPTY and held.total == held.peak["activations"]
    return held.total


def test_what_was_there_before_is_left_out():
    x = torch.ones(256)
    assert activations(lambda: x) == activations(lambda: x.view(16, 16).t()[2:]) == 0
    assert activations(lambda: x.add_(1).mul_(2)) == 0
    assert activations(lambda: x.contiguous()) == 0


def test_what_is_made_counts_once():
    x = torch.ones(256)
    assert activations(lambda: x + 1) == K
    assert activations(lambda: (x + 1).view(16, 16)[3]) == K  # the view keeps the whole storage
    assert activations(lambda: [x + 1, x.double()]) == 3 * K
    assert activations(lambda: torch.empty(256).copy_(x)) == K
    assert activations(lambda: x.split(64)) == 0
    assert activations(lambda: torch.cat([x, x]).chunk(2)) == 2 * K
    assert activations(lambda: torch.topk(x, 128)) == K // 2 + K  # values, and int64 indices
    assert activations(lambda: torch.empty(0)) == 0


def test_frees_are_seen():
    x = torch.ones(256)

    def chain():
        y = x
        for _ in range(9):
            y = y + 1  # the one before is there until the next is made
        return y

    assert activations(chain) == 2 * K

    def dropped():
        y = [x + 1 for _ in range(4)]
        y.clear()
        return x + 1, x + 1

    assert activations(dropped) == 4 * K
    assert activations(lambda: [(x + 1, None)[1] for _ in range(4)]) == K


def test_a_storage_that_is_resized():
    def grows():
        y = torch.empty(256)
        y.untyped_storage().resize_(0)
        return y, torch.ones(2)

    assert activations(grows) == K  # not 1024 and 8
    module = nn.Linear(16, 16, bias=False)
    whole = nn.Parameter(torch.ones(1024).data)
    with memory(module) as held:
        module.weight = whole
        torch.ones(1).add(1)
        whole.untyped_storage().resize_(0)
        torch.ones(1).add(1)
    assert held.peak["parameters"] == 4 * K  # in the place of 1024 bytes, for a while
    with memory(module) as held:
        whole.untyped_storage().resize_(4 * K)
    assert held.peak["parameters"] == 4 * K


def test_frees_by_another_thread():
    """A backend's thread drops tensors while this one counts."""
    x, stop = torch.ones(256), threading.Event()
    given: list = []

    def drop():
        while not stop.is_set():
            given.clear()

    thread = threading.Thread(target=drop)
    with memory(nn.Module()) as held:
        thread.start()
        for _ in range(500):
            given.append(x + 1)
        stop.set()
        thread.join()
        given.clear()
        before = held.peak["activations"]
        many = [x + 1 for _ in range(500)]
    assert before < held.peak["activations"] == len(many) * K


# ---- kinds -----------------------------------------------------------------------------------------------------------


def test_parameters_buffers_and_state_that_were_there():
    module = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16, bias=False))
    module[2].weight = module[0].weight  # counts once
    optimizer = torch.optim.Adam(module.parameters())
    with memory(module, optimizer) as held:
        pass
    parameters = 4 * (256 + 16 + 4 * 16) + 8  # weight, bias, norm and its running means, a count of batches
    assert held.peak == {**EMPTY, "parameters": parameters} == held.at_peak
    module(torch.ones(2, 16)).sum().backward()
    trained = 4 * (256 + 16 + 2 * 16)
    with memory(module, optimizer) as held:
        optimizer.step()
    assert held.peak["gradients"] == trained
    assert held.peak["optimizer"] == 2 * trained + 4 * 4  # two moments, and a count of steps for each of 4


@pytest.mark.parametrize("fused", [True, False])
def test_one_step_of_one_layer(fused):
    """x (4, 16) -> loss. Forward: y, y^2, their mean. Backward: ds (1), d(y^2) = an expanded view made a tensor by the
    product with 2 y, and dW."""
    module = nn.Linear(16, 16, bias=False)
    optimizer = torch.optim.AdamW(module.parameters(), fused=fused)
    x = torch.ones(4, 16)
    for _ in range(2):
        with memory(module, optimizer) as held:
            module(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert held.peak["parameters"] == K
        assert held.peak["gradients"] == K
        assert held.peak["optimizer"] == 2 * K + 4
    with memory(module) as forward:
        y = module(x)
        z = y.square().sum()
    assert forward.peak["activations"] == 2 * y.nbytes + z.nbytes


def test_a_gradient_is_one_from_the_moment_that_it_is_grad():
    module = nn.Linear(16, 16, bias=False)
    with memory(module) as held:
        gradient = torch.ones(16, 16)
        assert held.peak == {**EMPTY, "parameters": K, "activations": K}
        module.weight.grad = gradient
        torch.ones(1).add(1)
        module.weight.grad = None
        del gradient
        torch.ones(256)
    assert held.peak == {"parameters": K, "gradients": K, "optimizer": 0, "activations": K}
    assert held.total == 2 * K + 8  # never all three at once


def test_recomputed_activations_are_held_one_piece_at_a_time():
    x = torch.ones(256, requires_grad=True)

    def run(pieces):
        def piece(y):
            for _ in range(16 // pieces):
                y = torch.tanh(y)
            return y

        y = x * 1
        for _ in range(pieces):
            y = piece(y) if pieces == 1 else checkpoint(piece, y, use_reentrant=False)
        y.sum().backward()
        x.grad = None

    plain, recomputed = activations(run, 1), activations(run, 4)
    # The 16 outputs, and gradients on their way; or the 4 inputs of pieces, and the 4 outputs of one of them.
    assert 16 * K <= plain <= 19 * K
    assert 8 * K <= recomputed <= 12 * K


def test_recomputation_of_a_transformer_and_the_same_numbers():
    torch.manual_seed(0)
    module, tokens = Transformer(layers=4, hidden=32, heads=4, kv_heads=2, ffn_hidden=64), torch.randint(256, (2, 32))
    lean = copy.deepcopy(module)
    for block in lean.blocks:
        block.forward = lambda x, forward=block.forward: checkpoint(forward, x, use_reentrant=False)
    plain = copy.deepcopy(module)
    next_token_loss(plain(tokens), tokens).backward()
    peaks = []
    for model in (module, lean):
        with memory(model) as held:
            next_token_loss(model(tokens), tokens).backward()
        peaks.append(held.peak["activations"])
        for p, q in zip(model.parameters(), plain.parameters()):
            assert torch.equal(p.grad, q.grad)  # counting changes nothing
    assert peaks[1] < 0.6 * peaks[0]


# ---- blocks ----------------------------------------------------------------------------------------------------------


def test_blocks_may_be_nested():
    x = torch.ones(256)
    with memory(nn.Module()) as outer:
        y = x + 1
        with memory(nn.Module()) as inner:
            z = y + 1
        del z
        kept = [y + 1, y + 1, y + 1]  # noqa: F841
    assert (inner.total, outer.total) == (K, 4 * K)


def test_a_block_ends_its_count_and_lets_go():
    module = deep_mlp(16, 2)
    with memory(module) as held:
        module(torch.ones(4, 16)).sum().backward()
    before = copy.deepcopy(held)
    kept = torch.ones(1 << 16) + 1  # noqa: F841
    module.zero_grad()
    gc.collect()
    assert held == before and isinstance(held, Memory) and held.total == sum(held.at_peak.values())


def test_the_same_number_every_time():
    def once():
        torch.manual_seed(0)
        module, tokens = Transformer(layers=2, hidden=16, heads=2, kv_heads=1, ffn_hidden=24), torch.arange(6)[None]
        optimizer = torch.optim.AdamW(module.parameters())
        with memory(module, optimizer) as held:
            next_token_loss(module(tokens), tokens).backward()
            optimizer.step()
        return held

    assert once() == once()


def test_what_a_backends_thread_still_holds_does_not_count(world):
    """gloo's threads let go of a tensor a moment after the rank goes on, and long after on a busy machine."""

    def most_and_left():
        with memory(nn.Identity()) as held:
            for _ in range(3):
                x = torch.ones(256)
                dist.all_reduce(x)
                total = x.sum()
                del x
                work = dist.all_reduce(y := torch.ones(512), async_op=True)
                work.wait()
                del work, y
                total = total + torch.ones(1)
        return held.total, held.at_end["activations"]

    def many():
        return {most_and_left() for _ in range(100)}

    for found in world.run(many):
        assert found == {(2 * K + 4, 4)}
