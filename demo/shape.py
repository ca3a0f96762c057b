"""The architecture of the embedded model: gpt-oss in every respect but size."""

from __future__ import annotations

from dataclasses import replace

from microscale.models.gpt_oss.config import GptOssConfig, alternating
from microscale.models.rope import YarnRope

VOCAB_SIZE = 4096
SPECIAL_TOKENS = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
)
"""Harmony's control tokens; they have the first ids, in this order."""

# 30 million parameters, of which 25 in the experts: 13.4 MB of MXFP4, 9.4 MB of BF16 for the rest. As in the real ones:
# query width twice the hidden size, hidden and intermediate equal, 4 experts used, window far shorter than the context.
SHAPE = GptOssConfig(
    num_layers=8,
    hidden=256,
    intermediate=256,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    num_experts=16,
    top_k=4,
    vocab_size=VOCAB_SIZE,
    sliding_window=128,
    layer_kinds=alternating(8),
    # Trained on documents of up to 1,024 tokens; YaRN stretches that to 4,096.
    rope=YarnRope(150000.0, 4.0, beta_fast=32.0, beta_slow=1.0, original_context=1024, truncate=False),
    rms_epsilon=1e-5,
    swiglu_limit=7.0,
    max_context=4096,
    eos_token_ids=tuple(SPECIAL_TOKENS.index(name) for name in ("<|return|>", "<|endoftext|>", "<|call|>")),
)

# For tests and trials on a CPU: the same kinds of parts, one sixtieth of the size.
TINY = replace(
    SHAPE,
    num_layers=2,
    hidden=96,
    intermediate=96,
    num_heads=4,
    num_kv_heads=1,
    head_dim=32,
    num_experts=4,
    top_k=2,
    layer_kinds=alternating(2),
)
TRIAL = replace(TINY, num_layers=4, hidden=128, intermediate=128, num_kv_heads=2, layer_kinds=alternating(4))
SHAPES = {"demo": SHAPE, "trial": TRIAL, "tiny": TINY}
