"""A model as plans, memory and predictions see it: which ops it uses how often, what it caches, what else it holds.

No weights are needed. Binding the real ones asks for the same specs; ``Ops`` checks that.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from microscale.backends.ops import (
    Activations,
    AttentionSpec,
    DenseSpec,
    Gate,
    GateKind,
    MoeSpec,
    SamplingSpec,
    SmallSpec,
    Use,
)
from microscale.models.config import LayerKind
from microscale.models.gemma4.config import Gemma4Config, short_name
from microscale.models.gpt_oss.config import GptOssConfig
from microscale.models.qwen3_moe.config import Qwen3MoeConfig

AT_THE_END = ("lm_head", "sampling")
"""Behind the last decoder layer."""


@dataclass(frozen=True)
class CachedLayers:
    """Layers that cache keys and values alike."""

    kind: LayerKind
    count: int
    num_kv_heads: int
    head_dim: int
    window: int | None

    def numbers_per_position(self) -> int:
        """Numbers that one position takes in all these layers."""
        return 2 * self.count * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class Outline:
    """One model."""

    name: str
    uses: tuple[Use, ...]
    cached: tuple[CachedLayers, ...]
    vocab_size: int
    hidden: int
    tied: bool
    """The embedding table and lm_head are one tensor."""
    other_bytes: int
    """Norms, sinks and routers, which the small ops read, in bf16."""
    max_context: int
    closing: frozenset[str]
    """Layers whose last one only tokens with logits pass: lm_head, sampling, and the last decoder layer's parts behind
    its keys and values."""


def outline(
    name: str,
    config: GptOssConfig | Gemma4Config | Qwen3MoeConfig,
    activations: Activations,
    page_size: int,
    context: int,
) -> Outline:
    """The outline of a model whose attention sees up to ``context`` positions."""
    if isinstance(config, GptOssConfig):
        return _gpt_oss(name, config, activations, page_size, context)
    if isinstance(config, Gemma4Config):
        return _gemma4(name, config, activations, page_size, context)
    return _qwen3_moe(name, config, activations, page_size, context)


def _gpt_oss(name: str, c: GptOssConfig, activations: Activations, page_size: int, context: int) -> Outline:
    kinds = Counter(c.layer_kinds)
    gate = Gate(GateKind.SWIGLU_CLAMPED, interleaved=True, alpha=c.swiglu_alpha, limit=c.swiglu_limit)

    def dense(layer: str, rows: int, columns: int, count: int, bias: bool = True) -> Use:
        return Use("dense", layer, DenseSpec(rows, columns, "bf16", activations, bias, tokens=1), count)

    def attention(kind: LayerKind) -> Use:
        window = c.sliding_window if kind is LayerKind.SLIDING else None
        heads = (c.num_heads, c.num_kv_heads, c.head_dim)
        spec = AttentionSpec(*heads, window, True, page_size, activations, tokens=1, context=context)
        return Use("attention", kind.value, spec, kinds[kind])

    sizes = (c.num_experts, c.top_k, c.hidden, c.intermediate)
    uses = (
        dense("qkv", c.qkv_rows, c.hidden, c.num_layers),
        *(attention(kind) for kind in kinds),
        dense("o", c.hidden, c.num_heads * c.head_dim, c.num_layers),
        Use("moe", "experts", MoeSpec(*sizes, "mxfp4", activations, gate, bias=True, tokens=1), c.num_layers),
        Use("small", "small", _small(c, c.num_heads, c.num_kv_heads, c.head_dim, activations), c.num_layers),
        dense("lm_head", c.vocab_size, c.hidden, 1, bias=False),
        Use("sampling", "sampling", SamplingSpec(c.vocab_size, tokens=1)),
    )
    cached = tuple(
        CachedLayers(kind, count, c.num_kv_heads, c.head_dim, c.sliding_window if kind is LayerKind.SLIDING else None)
        for kind, count in kinds.items()
    )
    norms = (2 * c.num_layers + 1) * c.hidden
    other = 2 * (norms + c.num_layers * (c.num_heads + c.num_experts * (c.hidden + 1)))
    closing = frozenset({*AT_THE_END, c.layer_kinds[-1].value, "o", "experts"})
    return Outline(name, uses, cached, c.vocab_size, c.hidden, False, other, c.max_context, closing)


def _gemma4(name: str, c: Gemma4Config, activations: Activations, page_size: int, context: int) -> Outline:
    kinds = Counter(c.layer_kinds)
    gate = Gate(GateKind.GELU_TANH, interleaved=False)

    def layers(part: str, kind: LayerKind | None = None) -> Counter[tuple[str, str]]:
        """How many layers (of a kind) have this part under one name, and in which format."""
        those = [n for n in range(c.num_layers) if kind is None or c.layer_kinds[n] is kind]
        return Counter((c.use(part, n), getattr(c.formats[n], part)) for n in those)

    def dense(part: str, rows: int, columns: int, kind: LayerKind | None = None) -> list[Use]:
        return [
            Use("dense", use, DenseSpec(rows, columns, fmt, activations, False, tokens=1), count)
            for (use, fmt), count in layers(part, kind).items()
        ]

    uses: list[Use] = []
    for kind, count in kinds.items():
        heads = c.heads[kind]
        sizes = (heads.num_heads, heads.num_kv_heads, heads.head_dim)
        window = c.sliding_window if kind is LayerKind.SLIDING else None
        attention = AttentionSpec(*sizes, window, False, page_size, activations, tokens=1, context=context, scale=1.0)
        uses += [
            *dense("qkv", heads.qkv_rows, c.hidden, kind),
            Use("attention", kind.value, attention, count),
            *dense("o", c.hidden, heads.num_heads * heads.head_dim, kind),
            Use("small", f"small.{short_name(kind)}", _small(c, *sizes, activations), count),
        ]
    experts = (c.num_experts, c.top_k, c.hidden, c.intermediate)
    lm_head = DenseSpec(c.vocab_size, c.hidden, "bf16", activations, False, tokens=1, softcap=c.softcap)
    uses += [
        *dense("gate_up", 2 * c.mlp, c.hidden),
        *dense("down", c.hidden, c.mlp),
        *(
            Use("moe", use, MoeSpec(*experts, fmt, activations, gate, False, tokens=1), count)
            for (use, fmt), count in layers("experts").items()
        ),
        Use("dense", "lm_head", lm_head),
        Use("sampling", "sampling", SamplingSpec(c.vocab_size, tokens=1)),
    ]
    # Seven norms and the router's scale, two norms of a head, and the experts' scales in each layer; and the last norm.
    norms = sum(8 * c.hidden + 2 * c.heads[kind].head_dim for kind in c.layer_kinds) + c.hidden
    other = 2 * (norms + c.num_layers * c.num_experts * (c.hidden + 2))
    last = (c.use(part, c.num_layers - 1) for part in ("o", "gate_up", "down", "experts"))
    closing = frozenset({*AT_THE_END, c.layer_kinds[-1].value, *last})
    cached = _gemma4_cached(c)
    return Outline(name, tuple(uses), cached, c.vocab_size, c.hidden, c.tied, other, c.max_context, closing)


def _qwen3_moe(name: str, c: Qwen3MoeConfig, activations: Activations, page_size: int, context: int) -> Outline:
    gate = Gate(GateKind.SILU, interleaved=False)

    def dense(layer: str, rows: int, columns: int, count: int = c.num_layers) -> Use:
        return Use("dense", layer, DenseSpec(rows, columns, "bf16", activations, False, tokens=1), count)

    heads = (c.num_heads, c.num_kv_heads, c.head_dim)
    attention = AttentionSpec(*heads, None, False, page_size, activations, tokens=1, context=context)
    experts = MoeSpec(
        c.num_experts, c.top_k, c.hidden, c.intermediate, c.expert_format, activations, gate, False, tokens=1
    )
    uses = (
        dense("qkv", c.qkv_rows, c.hidden),
        Use("attention", LayerKind.FULL.value, attention, c.num_layers),
        dense("o", c.hidden, c.num_heads * c.head_dim),
        Use("moe", "experts", experts, c.num_layers),
        Use("small", "small", _small(c, *heads, activations), c.num_layers),
        dense("lm_head", c.vocab_size, c.hidden, 1),
        Use("sampling", "sampling", SamplingSpec(c.vocab_size, tokens=1)),
    )
    cached = (CachedLayers(LayerKind.FULL, c.num_layers, c.num_kv_heads, c.head_dim, None),)
    other = 2 * (c.num_layers * ((2 + c.num_experts) * c.hidden + 2 * c.head_dim) + c.hidden)
    closing = frozenset({*AT_THE_END, LayerKind.FULL.value, "o", "experts"})
    return Outline(name, uses, cached, c.vocab_size, c.hidden, c.tied, other, c.max_context, closing)


def _gemma4_cached(c: Gemma4Config) -> tuple[CachedLayers, ...]:
    return tuple(
        CachedLayers(
            kind,
            count,
            c.heads[kind].num_kv_heads,
            c.heads[kind].head_dim,
            c.sliding_window if kind is LayerKind.SLIDING else None,
        )
        for kind, count in Counter(c.layer_kinds).items()
    )


def _small(
    c: GptOssConfig | Gemma4Config | Qwen3MoeConfig,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    activations: Activations,
) -> SmallSpec:
    return SmallSpec(
        hidden=c.hidden,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_experts=c.num_experts,
        top_k=c.top_k,
        activations=activations,
        tokens=1,
    )
