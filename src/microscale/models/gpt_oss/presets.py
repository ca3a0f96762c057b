"""Published shapes of gpt-oss, and a tiny one."""

from __future__ import annotations

from collections.abc import Mapping

from microscale.models.gpt_oss.config import GptOssConfig, alternating
from microscale.models.gpt_oss.config_file import from_hugging_face, override_hugging_face, to_hugging_face
from microscale.models.json_object import JsonObject
from microscale.models.rope import YarnRope


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


def preset(name: str, config: GptOssConfig, overrides: Mapping[str, object]) -> GptOssConfig:
    """A preset with ``overrides`` of the keys that its config.json would have."""
    file = JsonObject(f"Preset {name}", to_hugging_face(config))
    return from_hugging_face(override_hugging_face(file, overrides))
