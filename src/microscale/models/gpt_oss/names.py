"""What gpt-oss checkpoints call their tensors, in the Hugging Face and in the original layout."""

from __future__ import annotations

from dataclasses import dataclass

from microscale.models.gpt_oss.config_file import Layout

BF16 = ("BF16",)
NORM = ("BF16", "F32")
"""The published norms are BF16; OpenAI's own model keeps them in float32, and so may what is saved from it."""


@dataclass(frozen=True)
class Names:
    """What a layout calls its tensors. Those of a layer follow ``layer``, which takes the layer's number."""

    embed: str
    norm: str
    lm_head: str
    layer: str
    attn_norm: str
    qkv: tuple[str, ...]
    """One tensor with all rows, or q, k and v."""
    sinks: str
    o: str
    mlp_norm: str
    router: str
    gate_up: str
    down: str
    packed: str
    """What stands between an expert tensor's name and ``blocks`` or ``scales``."""
    norm_dtypes: tuple[str, ...]


NAMES: dict[Layout, Names] = {
    Layout.HUGGING_FACE: Names(
        embed="model.embed_tokens.weight",
        norm="model.norm.weight",
        lm_head="lm_head.weight",
        layer="model.layers.{}.",
        attn_norm="input_layernorm.weight",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        sinks="self_attn.sinks",
        o="self_attn.o_proj",
        mlp_norm="post_attention_layernorm.weight",
        router="mlp.router",
        gate_up="mlp.experts.gate_up_proj",
        down="mlp.experts.down_proj",
        packed="_",
        norm_dtypes=BF16,
    ),
    Layout.ORIGINAL: Names(
        embed="embedding.weight",
        norm="norm.scale",
        lm_head="unembedding.weight",
        layer="block.{}.",
        attn_norm="attn.norm.scale",
        qkv=("attn.qkv",),
        sinks="attn.sinks",
        o="attn.out",
        mlp_norm="mlp.norm.scale",
        router="mlp.gate",
        gate_up="mlp.mlp1",
        down="mlp.mlp2",
        packed="_weight.",
        norm_dtypes=NORM,
    ),
}
