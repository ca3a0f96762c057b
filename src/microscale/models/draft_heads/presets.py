"""Published shapes of draft heads, for heads without a checkpoint and for the list of kernels.

``…-eagle3`` are SpecForge's configs for gpt-oss (``configs/gpt-oss-20B-eagle3.json`` and its sibling). Of NVIDIA's v3
taps, norm and vocabulary are known; the widths of its layer are taken to be SpecForge's.
"""

from __future__ import annotations

from dataclasses import replace

from microscale.models.draft_heads.config import DFlashConfig, Eagle3Config, HeadConfig, LayerShape, Reads
from microscale.models.rope import PlainRope

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
    reads=Reads(taps=(2, 12, 22), target_hidden=2880, vocab_size=201088),
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
    reads=Reads(taps=(1, 2), target_hidden=160, vocab_size=512),
    block_size=8,
    mask_token=500,
)

PRESETS: dict[str, HeadConfig] = {
    "gpt-oss-20b-eagle3": _20B,
    "gpt-oss-120b-eagle3": _120B,
    "gpt-oss-120b-eagle3-v3": _120B_V3,
    "dflash-tiny": _TINY_DFLASH,
}
