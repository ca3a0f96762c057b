"""What a draft head is: its layers, what it reads of its target, and how it ends. Checked for consistency once.

``config_file`` turns published files into these records.
"""

from __future__ import annotations

from dataclasses import dataclass

from microscale.errors import BadConfig
from microscale.models.config import check_positive
from microscale.models.draft_heads.rope import HeadRope
from microscale.parallel.sharding import WHOLE, Shard, split_vocabulary


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
    """Queries and keys are normed, head by head."""
    attention_bias: bool
    """Of q, k, v and o."""
    max_context: int
    """What it was trained for; rope goes on beyond it."""

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "num_heads", "num_kv_heads", "head_dim", "rms_epsilon", "max_context"):
            check_positive(self, name)
        if self.num_heads % self.num_kv_heads:
            raise BadConfig(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly.")
        if self.head_dim % 2:
            raise BadConfig(f"head_dim {self.head_dim} is odd, and rope turns pairs.")

    @property
    def qkv_rows(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True)
class Reads:
    """What a head takes from its target."""

    taps: tuple[int, ...]
    """Where it reads the residual stream (``models/taps.py``)."""
    target_hidden: int
    vocab_size: int
    """The target's."""

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
    """An EAGLE3 head: one layer, which reads the embedding of a token and the hidden state before it side by side."""

    layer: LayerShape
    reads: Reads
    draft_vocab_size: int
    """Rows of its lm_head."""
    maps_vocabulary: bool
    """Its vocabulary is a choice of the target's: ``d2t`` has, for each of its tokens, the target's id less its own."""
    norm_before_fc: bool
    """One norm over all taps side by side, before ``fc``."""
    norm_of_each_tap: bool
    """A norm for each tap, before ``fc`` (``fc_norm``)."""
    norm_before_residual: bool
    """The layer adds to the norm of the hidden state, not to the state itself."""
    norm_output: bool
    """The next step reads the hidden state after the last norm, not before it."""
    own_embedding: bool
    """``False``: the target's."""
    own_lm_head: bool
    """``False``: the target's."""
    shard: Shard = WHOLE
    """The target's: of lm_head a rank has some rows, of all else everything."""

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


@dataclass(frozen=True)
class DFlashConfig:
    """A DFlash head: several layers, which see the target's context through ``fc`` and guess a block in one pass.

    The block is the last token and a mask for each token to guess. Its tokens see each other, also those after them.
    """

    layer: LayerShape
    num_layers: int
    reads: Reads
    block_size: int
    mask_token: int
    shard: Shard = WHOLE
    """The target's, whose lm_head it takes; a rank has all of the head itself."""

    def __post_init__(self) -> None:
        check_positive(self, "num_layers")
        if self.block_size < 2:
            raise BadConfig(f"a block of {self.block_size} has no token to guess.")
        if not 0 <= self.mask_token < self.reads.vocab_size:
            raise BadConfig(f"mask token {self.mask_token} is not in the vocabulary of {self.reads.vocab_size}.")

    @property
    def own_rows(self) -> range:
        """The tokens whose logits this rank has."""
        return split_vocabulary(self.reads.vocab_size, self.shard)


HeadConfig = Eagle3Config | DFlashConfig
