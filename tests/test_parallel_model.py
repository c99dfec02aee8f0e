"""The models of the course against formulas written out by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lecture_lib.parallel.model import Attention, Block, SwiGLU, Transformer, deep_mlp, next_token_loss, rotate

SMALL = dict(layers=2, hidden=24, heads=6, kv_heads=2, ffn_hidden=40, vocab=11)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two that wait for each other take longer on a busy machine
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def test_the_lectures_mlp():
    model = deep_mlp()
    assert [tuple(p.shape) for p in model.parameters()] == [(1024, 1024)] * 4
    assert [type(part) for part in model] == [nn.Linear, nn.GELU] * 4
    small, x = deep_mlp(width=6, layers=3).double(), torch.randn(5, 6, dtype=torch.float64)
    expected = x
    for weight in small.parameters():
        z = expected @ weight.T
        expected = z * 0.5 * (1 + torch.erf(z / math.sqrt(2)))
    torch.testing.assert_close(small(x), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_shapes_names_and_number_of_parameters(tied):
    model = Transformer(**SMALL, tied=tied)
    logits = model(torch.randint(11, (3, 7)))
    assert logits.shape == (3, 7, 11) and logits.dtype == torch.float32
    # query and output: hidden^2 each; key and value: hidden * kv_heads * head_dim each; SwiGLU: three; two norms
    block = 2 * 24 * 24 + 2 * 24 * (2 * 4) + 3 * 24 * 40 + 2 * 24
    assert sum(p.numel() for p in model.parameters()) == 2 * block + 24 + (1 if tied else 2) * 11 * 24
    assert (model.head.weight is model.embedding.weight) == tied
    assert len(model.layers()) == 2 + 3 and model.layers()[0] is model.embedding
    names = [name for name, _ in model.named_parameters()]
    assert ("head.weight" in names) != tied and "embedding.weight" in names
    assert "blocks.1.attention.key.weight" in names and "blocks.0.mlp.gate.weight" in names


def test_layers_one_after_the_other_are_the_model():
    model, tokens = Transformer(**SMALL), torch.randint(11, (2, 5))
    x = tokens
    for layer in model.layers():
        x = layer(x)
    assert torch.equal(x, model(tokens))


@given(st.integers(0, 8), st.integers(0, 3))
@settings(deadline=None, max_examples=20)
def test_a_later_token_changes_no_earlier_logit(position, tied):
    model, tokens = Transformer(**SMALL, tied=tied > 0), torch.randint(11, (2, 9))
    changed = tokens.clone()
    changed[0, position] = (changed[0, position] + 1) % 11
    before, after = model(tokens), model(changed)
    assert torch.equal(before[1], after[1])  # nor any in another sequence
    torch.testing.assert_close(before[0, :position], after[0, :position], rtol=0, atol=1e-6)
    assert not torch.allclose(before[0, position], after[0, position], atol=1e-3)


# ---- rotary positions ------------------------------------------------------------------------------------------------


def test_rotate_is_a_product_with_complex_numbers():
    x = torch.randn(2, 3, 7, 8, dtype=torch.float64)
    pairs = torch.complex(x[..., :4], x[..., 4:])
    angles = torch.tensor([[t * 10_000 ** (-2 * i / 8) for i in range(4)] for t in range(7)], dtype=torch.float64)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    # the angles are computed in float32
    torch.testing.assert_close(rotate(x), torch.cat([turned.real, turned.imag], -1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rotate(x).norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=0)
    assert torch.equal(rotate(x)[:, :, 0], x[:, :, 0]) and rotate(x.bfloat16()).dtype == torch.bfloat16


def test_only_the_distance_between_positions_matters():
    q, k = torch.randn(16, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    at_each = rotate(torch.stack([q, k])[None, :, None].expand(1, 2, 10, 16))  # (1, 2, seq, head_dim)
    products = at_each[0, 0] @ at_each[0, 1].T  # (seq, seq)
    for distance in range(-9, 10):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-5, atol=1e-5)
    assert products.diagonal(1)[0] != products.diagonal(2)[0]


# ---- attention, SwiGLU, a block --------------------------------------------------------------------------------------


def attention_by_hand(layer: Attention, x, heads, kv_heads):
    """Head by head and query by query, with the loops of the formula."""
    batch, seq, hidden = x.shape
    d = hidden // heads
    q, k, v = (x @ w.weight.T for w in (layer.query, layer.key, layer.value))
    y = torch.zeros(batch, seq, hidden, dtype=x.dtype)
    for head in range(heads):
        shared = head // (heads // kv_heads)
        mine, theirs = slice(head * d, (head + 1) * d), slice(shared * d, (shared + 1) * d)
        qh, kh = rotate(q[:, None, :, mine])[:, 0], rotate(k[:, None, :, theirs])[:, 0]
        for t in range(seq):
            scores = torch.einsum("bd,bsd->bs", qh[:, t], kh[:, : t + 1]) / math.sqrt(d)
            y[:, t, mine] = torch.einsum("bs,bsd->bd", scores.softmax(-1), v[:, : t + 1, theirs])
    return y @ layer.output.weight.T


@pytest.mark.parametrize("heads, kv_heads", [(6, 6), (6, 3), (6, 2), (6, 1), (1, 1)])
def test_attention_is_the_formula(heads, kv_heads):
    layer, x = Attention(24, heads, kv_heads).double(), torch.randn(2, 5, 24, dtype=torch.float64)
    torch.testing.assert_close(layer(x), attention_by_hand(layer, x, heads, kv_heads))


def test_grouped_heads_are_repeated_ones():
    """Fewer key and value heads give what plain attention gives whose heads repeat them."""
    grouped, plain = Attention(24, 6, 2), Attention(24, 6, 6)
    for name in ("key", "value"):
        few = getattr(grouped, name).weight.view(2, 4, 24)
        getattr(plain, name).weight.data = few.repeat_interleave(3, dim=0).reshape(24, 24)
    plain.query, plain.output = grouped.query, grouped.output
    x = torch.randn(2, 5, 24)
    torch.testing.assert_close(grouped(x), plain(x))


def test_attention_asks_its_weights_how_many_heads_there_are():
    """Half of the heads, as tensor parallelism keeps them: two halves add up to the whole."""
    layer, x = Attention(24, 6, 2), torch.randn(2, 5, 24)
    halves = []
    for half in range(2):
        part = Attention(24, 6, 2)
        for name in ("query", "key", "value"):
            getattr(part, name).weight.data = getattr(layer, name).weight.data.chunk(2)[half]
        part.output.weight.data = layer.output.weight.data.chunk(2, dim=1)[half]
        halves.append(part(x))
    torch.testing.assert_close(halves[0] + halves[1], layer(x))


def test_a_block_is_the_formula():
    block, x = Block(24, 6, 2, 40).double(), torch.randn(2, 5, 24, dtype=torch.float64)
    for p in block.parameters():  # norms begin with ones
        p.data += 0.1 * torch.randn_like(p)

    def norm(x, weight):
        return x / torch.sqrt((x * x).sum(-1, keepdim=True) / 24 + 1e-5) * weight

    h = x + attention_by_hand(block.attention, norm(x, block.attention_norm.weight), 6, 2)
    n = norm(h, block.mlp_norm.weight)
    gate, up = n @ block.mlp.gate.weight.T, n @ block.mlp.up.weight.T
    torch.testing.assert_close(block(x), h + (gate / (1 + torch.exp(-gate)) * up) @ block.mlp.down.weight.T)
    assert isinstance(block.mlp, SwiGLU)


def test_next_token_loss_is_the_mean_of_minus_log_probabilities():
    logits, targets = torch.randn(2, 3, 11), torch.randint(11, (2, 3))
    expected = -sum(F.log_softmax(logits[b, t], -1)[targets[b, t]] for b in range(2) for t in range(3)) / 6
    torch.testing.assert_close(next_token_loss(logits, targets), expected)


def test_it_begins_near_a_uniform_guess_and_learns():
    model, tokens = Transformer(**SMALL, tied=True), torch.arange(44).view(4, 11) % 11
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(30):
        loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert abs(losses[0] - math.log(11)) < 1 and losses[-1] < 0.1


@pytest.mark.parametrize(
    "sizes, text",
    [
        ((24, 5, 5), "hidden=24 over heads=5 must be an even number"),
        ((24, 8, 8), "hidden=24 over heads=8 must be an even number"),
        ((24, 6, 4), "6 query heads cannot share 4 key and value heads equally."),
        ((24, 6, 0), "6 query heads cannot share 0 key and value heads equally."),
        ((24, 0, 0), "hidden=24 over heads=0 must be an even number"),
    ],
)
def test_sizes_that_do_not_divide(sizes, text):
    with pytest.raises(ValueError, match=text):
        Attention(*sizes)
