"""What a draft head is: its layers, what it reads from its target, and how it ends. Checked for consistency once.

``config_file`` turns published files into these records; ``PRESETS`` has published shapes. Every kind of head has the
same few properties (``HeadConfig``), so the engine need not know which kind it has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from microscale.errors import BadConfig
from microscale.models.config import ModelConfig, check_heads, check_positive
from microscale.models.pre_norm import PreNormConfig
from microscale.models.rope import PlainRope, Rope, computing_on, plain_table, rope_table
from microscale.parallel.sharding import WHOLE, Shard, split_vocabulary
from microscale.planning.ops import RopeTable

if TYPE_CHECKING:
    import torch

# ---- rotary positions ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones stay, those between are blended."""

    theta: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __post_init__(self) -> None:
        PlainRope(self.theta)
        for name in ("factor", "low_freq_factor", "original_context"):
            check_positive(self, name)
        if self.low_freq_factor >= self.high_freq_factor:
            raise BadConfig(f"low_freq_factor {self.low_freq_factor} is not below {self.high_freq_factor}.")


HeadRope = Rope | Llama3Rope


def head_rope_table(rope: HeadRope, head_dim: int, device: torch.device) -> RopeTable:
    """The frequencies of a head. Llama 3: a pair of numbers turns ``original_context / wavelength`` times over the
    original context; up to ``low_freq_factor`` turns it is stretched, from ``high_freq_factor`` on it stays."""
    if not isinstance(rope, Llama3Rope):
        return rope_table(rope, head_dim, device)
    plain = plain_table(PlainRope(rope.theta), head_dim, computing_on(device)).inverse_frequencies
    turns = rope.original_context * plain / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return RopeTable((plain * kept + plain / rope.factor * (1 - kept)).to(device), 1.0)


# ---- heads -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerShape:
    """A decoder layer with a dense MLP (Llama's, or Qwen3's with norms of the heads)."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: HeadRope
    rms_epsilon: float
    head_norms: bool
    """Queries and keys have a norm for each attention head."""
    attention_bias: bool
    """q, k, v and o have a bias."""
    max_context: int
    """The context it was trained for. Longer ones work."""

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "num_heads", "num_kv_heads", "head_dim", "rms_epsilon", "max_context"):
            check_positive(self, name)
        check_heads(self.num_heads, self.num_kv_heads, self.head_dim)

    @property
    def qkv_rows(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True)
class HeadReads:
    """What a head reads from its target."""

    taps: tuple[int, ...]
    """Layers after which it reads the residual stream (``models/taps.py``)."""
    target_hidden: int
    vocab_size: int  # the target's

    def __post_init__(self) -> None:
        for name in ("target_hidden", "vocab_size"):
            check_positive(self, name)
        if not self.taps or min(self.taps) < 0 or len(set(self.taps)) < len(self.taps):
            raise BadConfig(f"taps {list(self.taps)} are not layers, each once.")

    @property
    def width(self) -> int:
        """Columns of ``fc``."""
        return len(self.taps) * self.target_hidden


@dataclass(frozen=True)
class Eagle3Config:
    """An EAGLE3 head: one layer, which reads the embedding of a token next to the hidden state before it."""

    method: ClassVar[str] = "eagle3"
    num_layers: ClassVar[int] = 1
    most_drafts: ClassVar[int | None] = None

    layer: LayerShape
    reads: HeadReads
    draft_vocab_size: int
    """Rows of its lm_head."""
    maps_vocabulary: bool
    """Its vocabulary is a selection of the target's: ``d2t`` has, for each of its tokens, the target's id minus its
    own."""
    norm_before_fc: bool
    """There is one norm over all taps together, before ``fc``."""
    norm_of_each_tap: bool
    """There is a norm for each tap, before ``fc`` (``fc_norm``)."""
    norm_before_residual: bool
    """The layer adds to the normed hidden state, not to the state itself."""
    norm_output: bool
    """The next step reads the hidden state after the last norm, not before it."""
    own_embedding: bool
    """``False``: it uses the target's."""
    own_lm_head: bool
    """``False``: it uses the target's."""
    shard: Shard = WHOLE
    """The target's: a rank has some rows of lm_head and all of everything else."""

    def __post_init__(self) -> None:
        check_positive(self, "draft_vocab_size")
        if self.norm_before_fc and self.norm_of_each_tap:
            raise BadConfig("'norm_before_fc' and 'fc_norm' exclude each other.")
        if self.maps_vocabulary and not self.own_lm_head:
            raise BadConfig("a vocabulary of its own needs an lm_head of its own.")

    @property
    def own_rows(self) -> range:
        """The draft tokens whose logits this rank has."""
        return split_vocabulary(self.draft_vocab_size, self.shard)

    def for_target(self, target: ModelConfig) -> Eagle3Config:
        """The same head with the sizes that ``target`` needs."""
        reads = HeadReads(self.reads.taps, target.hidden, target.vocab_size)
        vocab_size = self.draft_vocab_size if self.maps_vocabulary else target.vocab_size
        return replace(self, reads=reads, draft_vocab_size=vocab_size)


@dataclass(frozen=True)
class DFlashConfig:
    """A DFlash head: several layers, which see the target's context through ``fc`` and draft a block in one pass.

    The block is the last token and a mask for each token to draft. Its tokens see each other, also those after them.
    """

    method: ClassVar[str] = "dflash"
    own_embedding: ClassVar[bool] = False
    own_lm_head: ClassVar[bool] = False

    layer: LayerShape
    num_layers: int
    reads: HeadReads
    block_size: int
    mask_token: int
    shard: Shard = WHOLE
    """The target's, whose lm_head it uses. Every rank has all of the head itself."""

    def __post_init__(self) -> None:
        check_positive(self, "num_layers")
        if self.block_size < 2:
            raise BadConfig(f"a block of {self.block_size} has no token to draft.")
        if not 0 <= self.mask_token < self.reads.vocab_size:
            raise BadConfig(f"mask token {self.mask_token} is not in the vocabulary of {self.reads.vocab_size}.")

    @property
    def most_drafts(self) -> int | None:
        """The maximum number of tokens that it can draft; ``None``: any number."""
        return self.block_size - 1

    @property
    def own_rows(self) -> range:
        """The tokens whose logits this rank has."""
        return split_vocabulary(self.reads.vocab_size, self.shard)

    def for_target(self, target: ModelConfig) -> DFlashConfig:
        """The same head with the sizes that ``target`` needs."""
        reads = HeadReads(self.reads.taps, target.hidden, target.vocab_size)
        return replace(self, reads=reads, mask_token=min(self.mask_token, target.vocab_size - 1))


@dataclass(frozen=True)
class MtpConfig:
    """A layer for drafts in the target's own checkpoint: one like the target's last, behind ``fc``."""

    method: ClassVar[str] = "mtp"
    num_layers: ClassVar[int] = 1
    most_drafts: ClassVar[int | None] = None
    own_embedding: ClassVar[bool] = False
    own_lm_head: ClassVar[bool] = False

    layer: PreNormConfig
    """Its family's config of a model with this layer alone. Heads and widths are the rank's own; ``shard`` in it is
    not set."""
    target_layers: int
    fc_format: str = "bf16"
    shard: Shard = WHOLE
    """The target's."""

    @property
    def reads(self) -> HeadReads:
        return HeadReads((self.target_layers,), self.layer.hidden, self.layer.vocab_size)

    @property
    def own_rows(self) -> range:
        """The tokens whose logits this rank has."""
        return split_vocabulary(self.layer.vocab_size, self.shard)


SeparateHeadConfig = Eagle3Config | DFlashConfig
"""Of heads that have a checkpoint of their own."""
HeadConfig = SeparateHeadConfig | MtpConfig

# ---- published shapes ------------------------------------------------------------------------------------------------

_LAYER = LayerShape(
    hidden=2880,
    intermediate=17280,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    rope=PlainRope(10000.0),
    rms_epsilon=1e-5,
    head_norms=False,
    attention_bias=False,
    max_context=4096,
)
_20B = Eagle3Config(
    layer=_LAYER,
    # The published 1, 11, 21, counted from 0.
    reads=HeadReads(taps=(2, 12, 22), target_hidden=2880, vocab_size=201088),
    draft_vocab_size=32000,
    maps_vocabulary=True,
    norm_before_fc=False,
    norm_of_each_tap=False,
    norm_before_residual=False,
    norm_output=False,
    own_embedding=False,
    own_lm_head=True,
)
_120B = replace(_20B, reads=replace(_20B.reads, taps=(2, 18, 34)))
_120B_V3 = replace(
    _20B,
    reads=replace(_20B.reads, taps=(24, 30, 36)),
    draft_vocab_size=201088,
    maps_vocabulary=False,
    norm_before_fc=True,
)
_TINY_LAYER = LayerShape(
    hidden=160,
    intermediate=320,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    rope=PlainRope(10000.0),
    rms_epsilon=1e-5,
    head_norms=True,
    attention_bias=False,
    max_context=4096,
)
_TINY_DFLASH = DFlashConfig(
    layer=_TINY_LAYER,
    num_layers=2,
    reads=HeadReads(taps=(1, 2), target_hidden=160, vocab_size=512),
    block_size=8,
    mask_token=500,
)

PRESETS: dict[str, SeparateHeadConfig] = {
    "gpt-oss-20b-eagle3": _20B,
    "gpt-oss-120b-eagle3": _120B,
    "gpt-oss-120b-eagle3-v3": _120B_V3,
    "dflash-tiny": _TINY_DFLASH,
}
"""Heads without a checkpoint, by name. ``…-eagle3`` are SpecForge's configs for gpt-oss (``configs/gpt-oss-20B-
eagle3.json`` and the one for 120b). Taps, norm and vocabulary of NVIDIA's v3 are published; the sizes of its layer are
assumed to be SpecForge's."""
