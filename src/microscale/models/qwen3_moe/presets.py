"""Published shapes of Qwen3-MoE, and a tiny one.

Their experts are random numbers in MXFP8: what ``--layer-format experts=mxfp8`` makes of the published BF16.
"""

from __future__ import annotations

from microscale.models.qwen3_moe.config import Qwen3MoeConfig
from microscale.models.rope import PlainRope

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
