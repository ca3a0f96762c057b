"""Published shapes of Gemma 4, and a tiny one."""

from __future__ import annotations

from microscale.models.config import LayerKind
from microscale.models.gemma4.config import Gemma4Config, Heads, LayerFormats, PartialRope

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
        LayerKind.SLIDING: Heads(16, 8, 256, shared_kv=False),
        LayerKind.FULL: Heads(16, 2, 512, shared_kv=True),
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
        LayerKind.SLIDING: Heads(4, 2, 32, shared_kv=False),
        LayerKind.FULL: Heads(4, 1, 64, shared_kv=True),
    },
    rope={LayerKind.SLIDING: PartialRope(1e4), LayerKind.FULL: PartialRope(1e6, 0.25)},
    rms_epsilon=1e-6,
    softcap=30.0,
    max_context=8192,
    eos_token_ids=(511,),
    formats=(LayerFormats.all("mxfp8"),) * 6,
    tied=True,
)

PRESETS = {"gemma-4-26b-a4b": _26B_A4B, "gemma-4-tiny": _TINY}
