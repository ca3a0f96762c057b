"""The config of a Qwen3-MoE model: sizes, rope and the experts' format, checked for consistency once.

The experts of presets are random numbers in MXFP8: what ``--layer-format experts=mxfp8`` makes of the published BF16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from microscale.errors import BadConfig
from microscale.formats import BLOCK, FORMATS
from microscale.models.config import (
    NO_SLIDING_LAYERS,
    LayerKind,
    check_blocks,
    check_end_tokens,
    check_heads,
    check_positive,
    check_top_k,
)
from microscale.models.rope import PlainRope, Rope
from microscale.parallel.sharding import WHOLE, Shard, split_heads, split_width

EXPERT_FORMATS = ("bf16", *FORMATS)


@dataclass(frozen=True)
class Qwen3MoeConfig:
    """The architecture of one Qwen3-MoE model. Every layer sees everything and has experts."""

    num_layers: int
    hidden: int
    intermediate: int
    """Width of one expert after the gate; ``gate_up`` has all gate rows, then all up rows."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    vocab_size: int
    rope: Rope
    rms_epsilon: float
    max_context: int
    eos_token_ids: tuple[int, ...]
    tied: bool
    """lm_head is the embedding table."""
    expert_format: str = "bf16"
    """Checkpoints have BF16; dummy weights may have a block format from the start."""
    shard: Shard = WHOLE
    """The rank whose part of the model this is: heads and widths above are the rank's own."""

    def __post_init__(self) -> None:
        check_positive(self, "num_layers", "hidden", "intermediate", "num_heads", "num_kv_heads", "head_dim")
        check_positive(self, "num_experts", "top_k", "vocab_size", "rms_epsilon", "max_context")
        check_heads(self.num_heads, self.num_kv_heads, self.head_dim)
        check_blocks(self, BLOCK, "hidden", "intermediate")
        check_top_k(self.top_k, self.num_experts)
        check_end_tokens(self)
        if self.expert_format not in EXPERT_FORMATS:
            raise BadConfig(f"experts in {self.expert_format!r} are unknown; known are {', '.join(EXPERT_FORMATS)}.")

    @property
    def qkv_rows(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        return (LayerKind.FULL,) * self.num_layers

    @property
    def sliding_window(self) -> int:
        return NO_SLIDING_LAYERS

    def sharded(self, shard: Shard) -> Qwen3MoeConfig:
        """One rank's part: its heads, and its width of every expert."""
        heads = split_heads(self.num_heads, self.num_kv_heads, shard)
        return replace(
            self,
            num_heads=len(heads.heads),
            num_kv_heads=len(heads.kv_heads),
            intermediate=split_width(self.intermediate, BLOCK, shard).size,
            shard=shard,
        )

    def shortened(self) -> Qwen3MoeConfig:
        """The model with two layers: all kernels, in their time. The first reads the embedding, the other a sum."""
        return replace(self, num_layers=min(2, self.num_layers))


_30B_A3B = Qwen3MoeConfig(
    num_layers=48,
    hidden=2048,
    intermediate=768,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    num_experts=128,
    top_k=8,
    vocab_size=151936,
    rope=PlainRope(1e6),
    rms_epsilon=1e-6,
    max_context=40960,
    # <|im_end|>, <|endoftext|>
    eos_token_ids=(151645, 151643),
    tied=False,
    expert_format="mxfp8",
)

# 0.9 million parameters. As in the real one: 8 query heads to a KV head, query width above hidden, narrow experts, half
# of them used.
_TINY = Qwen3MoeConfig(
    num_layers=3,
    hidden=160,
    intermediate=32,
    num_heads=8,
    num_kv_heads=1,
    head_dim=32,
    num_experts=8,
    top_k=4,
    vocab_size=512,
    rope=PlainRope(1e6),
    rms_epsilon=1e-6,
    max_context=8192,
    eos_token_ids=(511,),
    tied=False,
    expert_format="mxfp8",
)

PRESETS = {"qwen3-30b-a3b": _30B_A3B, "qwen3-moe-tiny": _TINY}
