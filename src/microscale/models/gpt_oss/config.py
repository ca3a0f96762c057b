"""What a gpt-oss model is: sizes, layer kinds, rope and activation constants, checked for consistency once.

Files in any of the published forms are turned into these records by ``config_file``; nobody else reads a config.json.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from microscale.errors import BadConfig
from microscale.formats import BLOCK
from microscale.models.config import LayerKind, check_positive, last_of_each
from microscale.models.rope import YarnRope
from microscale.parallel.sharding import WHOLE, Shard, split_heads, split_width


@dataclass(frozen=True)
class GptOssConfig:
    """The architecture of one gpt-oss model."""

    num_layers: int
    hidden: int
    intermediate: int
    """Width of one expert after the gate; ``gate_up`` has twice as many rows, gate even, up odd."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    vocab_size: int
    sliding_window: int
    """How many positions a sliding layer sees, the token itself included."""
    layer_kinds: tuple[LayerKind, ...]
    rope: YarnRope
    rms_epsilon: float
    swiglu_limit: float
    max_context: int
    eos_token_ids: tuple[int, ...]
    swiglu_alpha: float = 1.702
    shard: Shard = WHOLE
    """Of which rank this is the part: heads and widths above are that rank's own."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden", "intermediate", "num_heads", "num_kv_heads", "head_dim", "num_experts"):
            check_positive(self, name)
        for name in (
            "top_k",
            "vocab_size",
            "sliding_window",
            "rms_epsilon",
            "swiglu_limit",
            "max_context",
            "swiglu_alpha",
        ):
            check_positive(self, name)
        if len(self.layer_kinds) != self.num_layers:
            raise BadConfig(f"{len(self.layer_kinds)} layer kinds do not describe {self.num_layers} layers.")
        if self.num_heads % self.num_kv_heads:
            raise BadConfig(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly.")
        if self.head_dim % 2:
            raise BadConfig(f"head_dim {self.head_dim} is odd, and rope turns pairs.")
        for name in ("hidden", "intermediate"):
            if getattr(self, name) % BLOCK:
                raise BadConfig(f"{name} size {getattr(self, name)} is no multiple of the {BLOCK} values of a block.")
        if self.top_k > self.num_experts:
            raise BadConfig(f"{self.top_k} experts per token cannot be chosen from {self.num_experts}.")
        for token in self.eos_token_ids:
            if not 0 <= token < self.vocab_size:
                raise BadConfig(f"end token {token} is not in the vocabulary of {self.vocab_size}.")

    @property
    def qkv_rows(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def sharded(self, shard: Shard) -> GptOssConfig:
        """One rank's part: its heads, and its width of every expert."""
        heads = split_heads(self.num_heads, self.num_kv_heads, shard)
        return replace(
            self,
            num_heads=len(heads.heads),
            num_kv_heads=len(heads.kv_heads),
            intermediate=split_width(self.intermediate, BLOCK, shard).size,
            shard=shard,
        )

    def shortened(self) -> GptOssConfig:
        """The model with one layer of each kind: all kernels, in the time of two layers. With one kind two of it: the
        first layer reads the embedding, the other a sum."""
        kinds = tuple(self.layer_kinds[place] for place in last_of_each(self.layer_kinds))
        if len(kinds) == 1:
            kinds *= min(2, self.num_layers)
        return replace(self, num_layers=len(kinds), layer_kinds=kinds)


def alternating(num_layers: int) -> tuple[LayerKind, ...]:
    """gpt-oss's own order: layer 0 slides, layer 1 sees everything, and so on."""
    return tuple(LayerKind.FULL if i % 2 else LayerKind.SLIDING for i in range(num_layers))
