"""The two models that every chapter trains: a deep MLP and a small decoder-only transformer.

They know nothing of ranks. Data and sharded parallelism wrap them, tensor parallelism replaces their linear layers by
shards (so the attention below asks the weights how many heads it has), pipelines cut their list of layers.

The transformer is that of Llama (Touvron et al. 2023, LLaMA, section 2.2; Llama 2, section 2.2): RMSNorm before each
part, rotary positions, grouped-query attention, SwiGLU.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def deep_mlp(width: int = 1024, layers: int = 4) -> nn.Sequential:
    """The MLP of the lecture: ``layers`` square matrices, each followed by GELU. (batch, width) -> (batch, width)"""
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width, bias=False), nn.GELU())]
    return nn.Sequential(*parts)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats. logits: (batch, seq, vocab), targets: int64 (batch, seq) -> ()"""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rotate(x: Tensor, theta: float = 10_000.0, positions: Tensor | None = None) -> Tensor:
    """Rotary positions: turn each pair of features by an angle that grows with the position (Su et al. 2021, RoFormer).

    x: (batch, heads, seq, head_dim), head_dim even. Features i and i + head_dim/2 are a pair; its angle at position t
    is t theta^(-2i/head_dim). positions: int64 (seq,), where in the sequence these tokens stand; 0, 1, 2, ... if None.
    """
    seq, head_dim = x.shape[-2:]
    frequency = theta ** (-torch.arange(0, head_dim, 2, device=x.device) / head_dim)  # (head_dim/2,)
    t = torch.arange(seq) if positions is None else positions
    angle = t.to(x.device)[:, None] * frequency  # (seq, head_dim/2)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)  # (batch, heads, seq, head_dim/2) each
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention. Several query heads may share one key and value head (Ainslie et al. 2023, GQA).

    query: hidden -> heads * head_dim, key and value: hidden -> kv_heads * head_dim, output: heads * head_dim -> hidden
    """

    def __init__(self, hidden: int, heads: int, kv_heads: int):
        super().__init__()
        if heads < 1 or hidden % heads or (hidden // heads) % 2:
            raise ValueError(f"hidden={hidden} over heads={heads} must be an even number: the features of one head.")
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"{heads} query heads cannot share {kv_heads} key and value heads equally.")
        self.head_dim = hidden // heads
        self.query = nn.Linear(hidden, heads * self.head_dim, bias=False)
        self.key = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.output = nn.Linear(heads * self.head_dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, hidden) -> (batch, seq, hidden)
        q, k, v = self.heads_of(self.query(x)), self.heads_of(self.key(x)), self.heads_of(self.value(x))
        y = self.attend(q, k, v)
        return self.output(y.transpose(1, 2).flatten(2))  # (batch, heads, seq, head_dim) -> (batch, seq, hidden)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: (batch, heads, seq, head_dim), k and v: (batch, kv_heads, seq, head_dim), not rotated yet -> as q"""
        return F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)

    def heads_of(self, x: Tensor) -> Tensor:
        """(batch, seq, n * head_dim) -> (batch, n, seq, head_dim), for as many heads n as x holds."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x) (Shazeer 2020, GLU Variants Improve Transformer)."""

    def __init__(self, hidden: int, ffn_hidden: int):
        super().__init__()
        self.gate = nn.Linear(hidden, ffn_hidden, bias=False)
        self.up = nn.Linear(hidden, ffn_hidden, bias=False)
        self.down = nn.Linear(ffn_hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, hidden) -> (batch, seq, hidden)
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, ffn_hidden: int):
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.attention = Attention(hidden, heads, kv_heads)
        self.mlp_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.mlp = SwiGLU(hidden, ffn_hidden)

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, hidden) -> (batch, seq, hidden)
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Predicts the next token at every position. int64 (batch, seq) -> logits (batch, seq, vocab)

    tied: the embedding and the head are one parameter (Press and Wolf 2017), named ``embedding.weight``.
    """

    def __init__(
        self,
        *,
        layers: int = 4,
        hidden: int = 256,
        heads: int = 8,
        kv_heads: int = 4,
        ffn_hidden: int = 768,
        vocab: int = 256,
        tied: bool = False,
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, kv_heads, ffn_hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.head = nn.Linear(hidden, vocab, bias=False)
        nn.init.normal_(self.embedding.weight, std=hidden**-0.5)
        if tied:
            self.head.weight = self.embedding.weight

    def layers(self) -> list[nn.Module]:
        """What forward() calls, one after the other, each with one tensor: what a pipeline cuts into stages."""
        return [self.embedding, *self.blocks, self.norm, self.head]

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens
        for layer in self.layers():
            x = layer(x)
        return x
