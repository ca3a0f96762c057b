"""The config of a Gemma 4 mixture-of-experts model: sizes, heads and rope by layer kind, formats by layer.

Every layer has a dense MLP next to its experts. Full layers have fewer and wider heads and may have no ``v_proj``: keys
and values come from one projection, and both are cached, since norms and rope make them differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from microscale.errors import BadConfig
from microscale.formats import BLOCK
from microscale.models.config import (
    MAX_NUMBER,
    LayerKind,
    check_blocks,
    check_end_tokens,
    check_heads,
    check_number,
    check_positive,
    check_top_k,
    last_of_each,
)
from microscale.parallel.sharding import WHOLE, Shard, split_heads, split_width


@dataclass(frozen=True)
class AttentionHeads:
    """The heads of one kind of layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    shared_kv: bool
    """Keys and values are one projection."""

    @property
    def qkv_rows(self) -> int:
        return (self.num_heads + (1 if self.shared_kv else 2) * self.num_kv_heads) * self.head_dim

    def sharded(self, shard: Shard) -> AttentionHeads:
        share = split_heads(self.num_heads, self.num_kv_heads, shard)
        return replace(self, num_heads=len(share.heads), num_kv_heads=len(share.kv_heads))


@dataclass(frozen=True)
class PartialRope:
    """Rotary positions of one kind of layer: the first ``fraction`` of the pairs is rotated, the rest is not."""

    theta: float
    fraction: float = 1.0


@dataclass(frozen=True)
class LayerFormats:
    """The formats of one layer's weights in the checkpoint: ``bf16``, ``nvfp4`` … All else is bf16."""

    qkv: str
    o: str
    gate_up: str
    """Format of the dense MLP's gate and up; ``down`` is that of its second matrix."""
    down: str
    experts: str

    @classmethod
    def all(cls, fmt: str) -> LayerFormats:
        return cls(**{field.name: fmt for field in fields(cls)})


@dataclass(frozen=True)
class Gemma4Config:
    """The architecture of one Gemma 4 model with experts."""

    hidden: int
    mlp: int
    """Width of the dense MLP after the gate."""
    intermediate: int
    """Width of one expert after the gate; ``gate_up`` has all gate rows, then all up rows."""
    num_experts: int
    top_k: int
    vocab_size: int
    sliding_window: int
    """How many positions a sliding layer sees, the token itself included."""
    layer_kinds: tuple[LayerKind, ...]
    heads: Mapping[LayerKind, AttentionHeads]
    rope: Mapping[LayerKind, PartialRope]
    rms_epsilon: float
    softcap: float | None
    """Logits become ``softcap * tanh(logits / softcap)``."""
    max_context: int
    eos_token_ids: tuple[int, ...]
    formats: tuple[LayerFormats, ...]
    tied: bool
    """lm_head is the embedding table."""
    weights_only: bool = False
    """NVFP4 weights are published for activations in BF16."""
    shard: Shard = WHOLE
    """The rank whose part of the model this is: heads and widths above are the rank's own."""

    def __post_init__(self) -> None:
        check_positive(self, "hidden", "mlp", "intermediate", "num_experts", "top_k", "vocab_size", "sliding_window")
        check_positive(self, "max_context", "rms_epsilon")
        check_number("final softcap", 1.0 if self.softcap is None else self.softcap)
        if not self.layer_kinds or len(self.formats) != len(self.layer_kinds):
            raise BadConfig(f"{len(self.formats)} layers' formats do not describe {len(self.layer_kinds)} layers.")
        for kind in self.layer_kinds:
            _check_attention(kind, self.heads[kind], self.rope[kind])
        check_blocks(self, BLOCK, "hidden", "mlp", "intermediate")
        check_top_k(self.top_k, self.num_experts)
        check_end_tokens(self)

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    def use(self, part: str, layer_idx: int) -> str:
        """What plans call this part (a field of ``LayerFormats``) of this layer: ``qkv.sliding``, ``mlp.down`` …

        A plan holds one decision for one name. Layers whose format is not that of the first layer of their name, such
        as those that the checkpoint left in bf16, have names of their own: ``o.full-bf16``.
        """
        name = self._base(part, layer_idx)
        first = next(i for i in range(self.num_layers) if self._base(part, i) == name)
        fmt = getattr(self.formats[layer_idx], part)
        return name if fmt == getattr(self.formats[first], part) else f"{name}{'-' if '.' in name else '.'}{fmt}"

    def _base(self, part: str, layer_idx: int) -> str:
        if part == "experts":
            return part
        return f"{part}.{short_name(self.layer_kinds[layer_idx])}" if part in ("qkv", "o") else f"mlp.{part}"

    def sharded(self, shard: Shard) -> Gemma4Config:
        """One rank's part: its heads in every layer, and its width of the MLP and of every expert."""
        return replace(
            self,
            heads={kind: heads.sharded(shard) for kind, heads in self.heads.items()},
            mlp=split_width(self.mlp, BLOCK, shard).size,
            intermediate=split_width(self.intermediate, BLOCK, shard).size,
            shard=shard,
        )

    def shortened(self) -> Gemma4Config:
        """The model with one layer of each kind and format: all kernels, in the time of a few layers."""
        layers = tuple(zip(self.layer_kinds, self.formats, strict=True))
        kept = [layers[place] for place in last_of_each(layers)]
        return replace(self, layer_kinds=tuple(kind for kind, _ in kept), formats=tuple(used for _, used in kept))


def short_name(kind: LayerKind) -> str:
    """``full`` or ``sliding``."""
    return kind.value.partition("_")[0]


def _check_attention(kind: LayerKind, heads: AttentionHeads, rope: PartialRope) -> None:
    where = f" of {short_name(kind)} layers"
    for name in ("num_heads", "num_kv_heads", "head_dim"):
        check_number(f"{name}{where}", getattr(heads, name))
    check_heads(heads.num_heads, heads.num_kv_heads, heads.head_dim, where)
    if heads.num_heads * heads.head_dim % BLOCK:
        raise BadConfig(f"{heads.num_heads} heads of {heads.head_dim}{where} do not fill blocks of {BLOCK}.")
    if not 1 < rope.theta <= MAX_NUMBER or not 0 < rope.fraction <= 1:
        raise BadConfig(f"rope theta {rope.theta}{where} must be above 1, and the part that rotates up to 1.")


_26B_A4B = Gemma4Config(
    hidden=2816,
    mlp=2112,
    intermediate=704,
    num_experts=128,
    top_k=8,
    vocab_size=262144,
    sliding_window=1024,
    layer_kinds=(*(LayerKind.SLIDING,) * 5, LayerKind.FULL) * 5,
    heads={
        LayerKind.SLIDING: AttentionHeads(16, 8, 256, shared_kv=False),
        LayerKind.FULL: AttentionHeads(16, 2, 512, shared_kv=True),
    },
    rope={LayerKind.SLIDING: PartialRope(1e4), LayerKind.FULL: PartialRope(1e6, 0.25)},
    rms_epsilon=1e-6,
    softcap=30.0,
    max_context=262144,
    # <eos>, <turn|>, <|tool_response>
    eos_token_ids=(1, 106, 50),
    formats=(LayerFormats.all("mxfp8"),) * 30,
    tied=True,
)

# 1.2 million parameters. As in the real one: five sliding layers to a full one, with wider heads, fewer KV heads and
# K = V there; hidden, MLP and experts no multiples of 128; window far shorter than the context.
_TINY = Gemma4Config(
    hidden=160,
    mlp=96,
    intermediate=32,
    num_experts=8,
    top_k=4,
    vocab_size=512,
    sliding_window=16,
    layer_kinds=(*(LayerKind.SLIDING,) * 5, LayerKind.FULL),
    heads={
        LayerKind.SLIDING: AttentionHeads(4, 2, 32, shared_kv=False),
        LayerKind.FULL: AttentionHeads(4, 1, 64, shared_kv=True),
    },
    rope={LayerKind.SLIDING: PartialRope(1e4), LayerKind.FULL: PartialRope(1e6, 0.25)},
    rms_epsilon=1e-6,
    softcap=30.0,
    max_context=8192,
    eos_token_ids=(511,),
    formats=(LayerFormats.all("mxfp8"),) * 6,
    tied=True,
)

_EXPERTS_NVFP4 = replace(LayerFormats.all("bf16"), experts="nvfp4")
PRESETS = {
    "gemma-4-26b-a4b": _26B_A4B,
    # NVIDIA quantised the experts, RedHat all but router, embeddings and lm_head.
    "gemma-4-26b-a4b-nvfp4": replace(_26B_A4B, formats=(_EXPERTS_NVFP4,) * 30),
    "gemma-4-26b-a4b-it-nvfp4": replace(_26B_A4B, formats=(LayerFormats.all("nvfp4"),) * 30),
    "gemma-4-tiny": _TINY,
}
