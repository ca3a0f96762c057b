"""The config of a gpt-oss model: sizes, layer kinds, rope and activation constants, checked for consistency once.

``config_file`` makes these records from a config.json in any of the published forms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from microscale.errors import BadConfig
from microscale.formats import BLOCK
from microscale.models.config import (
    LayerKind,
    check_blocks,
    check_end_tokens,
    check_heads,
    check_positive,
    check_top_k,
    last_of_each,
)
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
    """The rank whose part of the model this is: heads and widths above are the rank's own."""

    def __post_init__(self) -> None:
        check_positive(self, "num_layers", "hidden", "intermediate", "num_heads", "num_kv_heads", "head_dim")
        check_positive(self, "num_experts", "top_k", "vocab_size", "sliding_window", "rms_epsilon", "swiglu_limit")
        check_positive(self, "max_context", "swiglu_alpha")
        if len(self.layer_kinds) != self.num_layers:
            raise BadConfig(f"{len(self.layer_kinds)} layer kinds do not describe {self.num_layers} layers.")
        check_heads(self.num_heads, self.num_kv_heads, self.head_dim)
        check_blocks(self, BLOCK, "hidden", "intermediate")
        check_top_k(self.top_k, self.num_experts)
        check_end_tokens(self)

    @property
    def tied(self) -> bool:
        """lm_head is the embedding table: never in gpt-oss."""
        return False

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


def _published(num_layers: int, num_experts: int) -> GptOssConfig:
    return GptOssConfig(
        num_layers=num_layers,
        hidden=2880,
        intermediate=2880,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        num_experts=num_experts,
        top_k=4,
        vocab_size=201088,
        sliding_window=128,
        layer_kinds=alternating(num_layers),
        rope=YarnRope(150000.0, 32.0, beta_fast=32.0, beta_slow=1.0, original_context=4096, truncate=False),
        rms_epsilon=1e-5,
        swiglu_limit=7.0,
        max_context=131072,
        eos_token_ids=(200002, 199999, 200012),
    )


# 3.0 million parameters, 2.4 MB. As in the real ones: 8 query heads to a KV head, query width above hidden, hidden and
# intermediate equal and no multiple of 128, 4 of the experts used, window far shorter than the context.
_TINY = GptOssConfig(
    num_layers=4,
    hidden=160,
    intermediate=160,
    num_heads=8,
    num_kv_heads=1,
    head_dim=32,
    num_experts=8,
    top_k=4,
    vocab_size=512,
    sliding_window=16,
    layer_kinds=alternating(4),
    rope=YarnRope(150000.0, 32.0, beta_fast=32.0, beta_slow=1.0, original_context=256, truncate=False),
    rms_epsilon=1e-5,
    swiglu_limit=7.0,
    max_context=8192,
    eos_token_ids=(511,),
)

PRESETS = {
    "gpt-oss-20b": _published(num_layers=24, num_experts=32),
    "gpt-oss-120b": _published(num_layers=36, num_experts=128),
    "gpt-oss-tiny": _TINY,
}
