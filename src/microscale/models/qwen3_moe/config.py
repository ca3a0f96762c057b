"""What a Qwen3-MoE model is: sizes, rope and the experts' format, checked for consistency once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from microscale.errors import BadConfig
from microscale.formats import BLOCK, FORMATS
from microscale.models.config import NO_SLIDING_LAYERS, LayerKind, check_positive
from microscale.models.rope import Rope
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
    """Checkpoints have BF16; random weights may have a block format at once."""
    shard: Shard = WHOLE
    """Of which rank this is the part: heads and widths above are that rank's own."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden", "intermediate", "num_heads", "num_kv_heads", "head_dim", "num_experts"):
            check_positive(self, name)
        for name in ("top_k", "vocab_size", "rms_epsilon", "max_context"):
            check_positive(self, name)
        if self.num_heads % self.num_kv_heads:
            raise BadConfig(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly.")
        if self.head_dim % 2:
            raise BadConfig(f"head_dim {self.head_dim} is odd, and rope turns pairs.")
        for name in ("hidden", "intermediate"):
            if getattr(self, name) % BLOCK:
                raise BadConfig(f"{name} size {getattr(self, name)} is no multiple of the {BLOCK} values of a block.")
        if self.top_k > self.num_experts:
            raise BadConfig(f"{self.top_k} experts per token cannot be chosen from {self.num_experts}.")
        if self.expert_format not in EXPERT_FORMATS:
            raise BadConfig(f"experts in {self.expert_format!r} are unknown; known are {', '.join(EXPERT_FORMATS)}.")
        for token in self.eos_token_ids:
            if not 0 <= token < self.vocab_size:
                raise BadConfig(f"end token {token} is not in the vocabulary of {self.vocab_size}.")

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
