"""A transformer on paper: how many parameters, how many FLOP for each token.

Sizes: L layers, h hidden, a heads of d numbers, g key/value heads, f the width of the MLP, V the vocabulary, s the
sequence. A layer multiplies with these matrices, and FLOP are 2 for each parameter and token that meet:

    query, key, value    h x (a + 2 g) d
    attention's output   a d x h
    MLP                  h x f and f x h; gated (SwiGLU): a second h x f
    head                 h x V, once

The scores of attention meet no parameter: 2 a d s FLOP per token for Q K^T, and as many for the product with V. Two
conventions count them. "full" takes all s keys for each query, as Megatron-LM, PaLM and MosaicML do; "causal" takes the
half that a causal mask leaves, which is what FlashAttention computes. The backward pass is twice the forward pass.

Sources: Narayanan et al., 2021, https://arxiv.org/abs/2104.04473, appendix (FLOP); Chowdhery et al., PaLM, 2022,
https://arxiv.org/abs/2204.02311, appendix B (model FLOP and MFU).
"""

import functools
from dataclasses import dataclass, replace

from lecture_lib.planner.numbers import missing, whole

CONVENTIONS = ("full", "causal")
_WHOLE = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn_hidden",
    "vocab",
    "seq",
    "experts",
    "active_experts",
    "head_dim",
)


@dataclass(frozen=True)
class Transformer:
    """A decoder-only transformer.

    layers, hidden, heads, vocab, seq: see above. kv_heads: as many as heads, if not given. ffn_hidden: 4 hidden, if not
    given; in a mixture, of one expert. gated: SwiGLU. tied: the head is the embedding's matrix. bias: all matrices but
    the head have one, and norms too. positions: how many learned position embeddings. head_dim: hidden / heads, if not
    given. experts, active_experts: a mixture of experts has so many MLPs in a layer, and a token visits so many.

    Numbers may be strings, as in a CSV file. Raises ValueError for sizes that are not whole and positive, and for heads
    that do not divide.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int | None = None
    ffn_hidden: int | None = None
    gated: bool = False
    vocab: int = 50304
    seq: int = 2048
    tied: bool = False
    bias: bool = False
    positions: int = 0
    head_dim: int | None = None
    experts: int = 1
    active_experts: int = 1
    name: str = "transformer"

    def __post_init__(self):
        hidden, heads = whole("hidden", self.hidden), whole("heads", self.heads)
        if missing(self.head_dim) and hidden % heads:
            raise ValueError(f"hidden must be a multiple of heads, and {hidden} is none of {heads}; or say head_dim.")
        default = {"kv_heads": heads, "ffn_hidden": 4 * hidden, "head_dim": hidden // heads}
        for field in _WHOLE:
            value = getattr(self, field)
            value = default[field] if field in default and missing(value) else value
            object.__setattr__(self, field, whole(field, value))
        for field in ("gated", "tied", "bias"):
            object.__setattr__(self, field, bool(whole(field, getattr(self, field), least=0)))
        object.__setattr__(self, "positions", whole("positions", self.positions, least=0))
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, and {self.heads} is none of {self.kv_heads}.")
        if self.active_experts > self.experts:
            raise ValueError(f"a token cannot visit {self.active_experts} experts of {self.experts}.")

    def with_(self, **changes) -> "Transformer":
        """The same with other sizes."""
        return replace(self, **changes)

    # ---- parameters --------------------------------------------------------------------------------------------------

    @functools.cached_property
    def query_width(self) -> int:
        """a d: as wide as hidden, in most models."""
        return self.heads * self.head_dim

    @functools.cached_property
    def kv_width(self) -> int:
        """g d: numbers in the keys of one token."""
        return self.kv_heads * self.head_dim

    @functools.cached_property
    def mlp_matrices(self) -> int:
        return 3 if self.gated else 2

    @functools.cached_property
    def attention_parameters(self) -> int:
        """Of one layer."""
        q, kv = self.query_width, self.kv_width
        return self.hidden * (2 * q + 2 * kv) + self.bias * (q + 2 * kv + self.hidden)

    @functools.cached_property
    def mlp_parameters(self) -> int:
        """Of one MLP; a mixture has ``experts`` of them in a layer, and a router."""
        h, f = self.hidden, self.ffn_hidden
        return self.mlp_matrices * h * f + self.bias * ((self.mlp_matrices - 1) * f + h)

    @functools.cached_property
    def router_parameters(self) -> int:
        return self.hidden * self.experts if self.experts > 1 else 0

    @functools.cached_property
    def norm_parameters(self) -> int:
        """Of one norm; a layer has two, and one stands before the head."""
        return self.hidden * (1 + self.bias)

    @functools.cached_property
    def layer_parameters(self) -> int:
        """Of one layer, with all experts."""
        mlp = self.experts * self.mlp_parameters + self.router_parameters
        return self.attention_parameters + mlp + 2 * self.norm_parameters

    def parameters_by_part(self) -> dict[str, int]:
        """Exact counts, of all layers together."""
        return {
            "embedding": (self.vocab + self.positions) * self.hidden,
            "attention": self.layers * self.attention_parameters,
            "mlp": self.layers * (self.experts * self.mlp_parameters + self.router_parameters),
            "norms": (2 * self.layers + 1) * self.norm_parameters,
            "head": 0 if self.tied else self.vocab * self.hidden,
        }

    @functools.cached_property
    def parameters(self) -> int:
        """All of them."""
        return sum(self.parameters_by_part().values())

    @functools.cached_property
    def active_parameters(self) -> int:
        """Those that a token meets."""
        return self.parameters - self.layers * (self.experts - self.active_experts) * self.mlp_parameters

    # ---- FLOP --------------------------------------------------------------------------------------------------------

    def forward_flops(self, attention: str = "full") -> dict[str, float]:
        """FLOP of the forward pass for each token, by part; the backward pass has twice as many in each.

        ``attention``: "full" or "causal", see above. Norms, activations, softmax and the embedding are not counted, as
        in the papers. Raises ValueError for another convention.
        """
        if attention not in CONVENTIONS:
            raise ValueError(f"attention is counted {' or '.join(CONVENTIONS)}, and not {attention!r}.")
        h, q = self.hidden, self.query_width
        keys = self.seq if attention == "full" else self.seq / 2
        mlp = self.active_experts * self.mlp_matrices * h * self.ffn_hidden + self.router_parameters
        return {
            "attention projections": self.layers * 2 * h * (2 * q + 2 * self.kv_width),
            "attention scores": self.layers * 4 * q * keys,
            "mlp": self.layers * 2 * mlp,
            "head": 2 * h * self.vocab,
        }

    def flops_per_token(self, attention: str = "full") -> float:
        """Forward and backward: model FLOP, which count nothing twice."""
        return 3 * sum(self.forward_flops(attention).values())


# ---- models that people know -----------------------------------------------------------------------------------------

_LLAMA2 = dict(gated=True, vocab=32000, seq=4096)
_LLAMA3 = dict(gated=True, vocab=128256, seq=8192, kv_heads=8)
_MPT = dict(vocab=50432, seq=2048, tied=True)
_GPT3 = dict(vocab=50257, seq=2048, tied=True, bias=True, positions=2048)

PRESETS = {
    model.name: model
    for model in (
        # Brown et al., 2020, https://arxiv.org/abs/2005.14165, table 2.1
        Transformer(12, 768, 12, name="gpt3-125m", **_GPT3),
        Transformer(40, 5120, 40, name="gpt3-13b", **_GPT3),
        Transformer(96, 12288, 96, name="gpt3-175b", **_GPT3),
        # https://github.com/mosaicml/llm-foundry: no biases, ALiBi in place of learned positions
        Transformer(32, 4096, 32, name="mpt-7b", **_MPT),
        Transformer(48, 7168, 64, name="mpt-30b", **_MPT | dict(seq=8192)),
        # Touvron et al., 2023, https://arxiv.org/abs/2307.09288
        Transformer(32, 4096, 32, ffn_hidden=11008, name="llama2-7b", **_LLAMA2),
        Transformer(40, 5120, 40, ffn_hidden=13824, name="llama2-13b", **_LLAMA2),
        Transformer(80, 8192, 64, kv_heads=8, ffn_hidden=28672, name="llama2-70b", **_LLAMA2),
        # Llama team, 2024, https://arxiv.org/abs/2407.21783, table 3
        Transformer(32, 4096, 32, ffn_hidden=14336, name="llama3-8b", **_LLAMA3),
        Transformer(80, 8192, 64, ffn_hidden=28672, name="llama3-70b", **_LLAMA3),
        Transformer(126, 16384, 128, ffn_hidden=53248, name="llama3-405b", **_LLAMA3),
        # Jiang et al., 2024, https://arxiv.org/abs/2401.04088, table 1
        Transformer(
            32, 4096, 32, 8, 14336, gated=True, vocab=32000, seq=4096, experts=8, active_experts=2, name="mixtral-8x7b"
        ),
    )
}


def preset(name: str) -> Transformer:
    """A model by its name: "llama3-405b". Raises ValueError."""
    if name not in PRESETS:
        raise ValueError(f"there is no model {name!r}; known are {', '.join(PRESETS)}.")
    return PRESETS[name]
