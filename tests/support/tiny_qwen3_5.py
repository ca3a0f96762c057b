"""Random Qwen3.6 checkpoints of a few hundred kB, written to disk in the published layout, and transformers' own model
of the numbers in them.

The numbers are chosen to be unkind: norms far from 1, decays from almost all to almost nothing, a router that decides.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm

from microscale.formats import block_format, decode, encode
from microscale.models.config import LayerKind
from microscale.models.qwen3_5.config import MULTIMODAL, LinearHeads, Qwen35Config, to_text_config
from microscale.models.rope import PlainRope

PREFIX = "model.language_model."
_LINEAR, _FULL = LayerKind.LINEAR, LayerKind.FULL
_AS_PUBLISHED = Qwen35Config(
    num_layers=4,
    layer_kinds=(_LINEAR, _LINEAR, _LINEAR, _FULL),
    hidden=64,
    intermediate=32,
    num_heads=8,
    num_kv_heads=1,
    head_dim=32,
    num_experts=9,
    top_k=4,
    vocab_size=256,
    rope=PlainRope(1e4),
    rotary_dim=8,
    linear=LinearHeads(num_key_heads=2, num_heads=4, key_dim=16, value_dim=32, taps=4),
    rms_epsilon=1e-6,
    max_context=512,
    eos_token_ids=(),
)
CASES = {
    "as_published": _AS_PUBLISHED,
    # As many key heads as value heads, all of a head turns, top 1 plus the shared expert, attention comes first.
    "one_group": replace(
        _AS_PUBLISHED,
        num_layers=3,
        layer_kinds=(_FULL, _LINEAR, _FULL),
        num_heads=6,
        num_kv_heads=3,
        head_dim=6,
        rotary_dim=6,
        num_experts=6,
        top_k=2,
        linear=LinearHeads(num_key_heads=3, num_heads=3, key_dim=32, value_dim=16, taps=3),
        tied=True,
    ),
}


def random_qwen3_5(c: Qwen35Config, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor in BF16, by its name without the prefix; experts as they are published, two tensors."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float, mean: float = 0.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * std + mean).to(torch.bfloat16)

    def linear(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return normal(rows, columns, std=gain * columns**-0.5)

    heads, routed = c.linear, c.num_experts - 1
    q_rows, kv_rows = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    tensors = {"embed_tokens.weight": normal(c.vocab_size, c.hidden, std=0.5)}
    for layer_idx, kind in enumerate(c.layer_kinds):
        layer = {
            "input_layernorm.weight": normal(c.hidden, std=0.3),
            "post_attention_layernorm.weight": normal(c.hidden, std=0.3),
            "mlp.gate.weight": linear(routed, c.hidden, gain=1.5),
            "mlp.shared_expert_gate.weight": linear(1, c.hidden, gain=1.5),
            "mlp.experts.gate_up_proj": normal(routed, 2 * c.intermediate, c.hidden, std=2 * c.hidden**-0.5),
            "mlp.experts.down_proj": normal(routed, c.hidden, c.intermediate, std=c.intermediate**-0.5),
            "mlp.shared_expert.gate_proj.weight": linear(c.intermediate, c.hidden, gain=2.0),
            "mlp.shared_expert.up_proj.weight": linear(c.intermediate, c.hidden, gain=2.0),
            "mlp.shared_expert.down_proj.weight": linear(c.hidden, c.intermediate),
        }
        if kind is LayerKind.FULL:
            layer |= {
                "self_attn.q_proj.weight": linear(2 * q_rows, c.hidden),
                "self_attn.k_proj.weight": linear(kv_rows, c.hidden, gain=3.0),
                "self_attn.v_proj.weight": linear(kv_rows, c.hidden),
                "self_attn.o_proj.weight": linear(c.hidden, q_rows, gain=2.0),
                "self_attn.q_norm.weight": normal(c.head_dim, std=0.4, mean=0.5),
                "self_attn.k_norm.weight": normal(c.head_dim, std=0.4, mean=-0.2),
            }
        else:
            layer |= {
                "linear_attn.in_proj_qkv.weight": linear(heads.channels, c.hidden),
                "linear_attn.in_proj_z.weight": linear(heads.width, c.hidden),
                "linear_attn.in_proj_b.weight": linear(heads.num_heads, c.hidden),
                "linear_attn.in_proj_a.weight": linear(heads.num_heads, c.hidden),
                "linear_attn.conv1d.weight": normal(heads.channels, 1, heads.taps, std=0.6),
                "linear_attn.A_log": normal(heads.num_heads, std=1.5, mean=-1.0),
                "linear_attn.dt_bias": normal(heads.num_heads, std=1.0),
                "linear_attn.norm.weight": normal(heads.value_dim, std=0.3, mean=1.0),
                "linear_attn.out_proj.weight": linear(c.hidden, heads.width, gain=2.0),
            }
        tensors |= {f"layers.{layer_idx}.{name}": tensor for name, tensor in layer.items()}
    tensors["norm.weight"] = normal(c.hidden, std=0.3)
    if not c.tied:
        tensors["lm_head.weight"] = normal(c.vocab_size, c.hidden, std=2 * c.hidden**-0.5)
    return tensors


def random_mtp(c: Qwen35Config, seed: int = 0) -> dict[str, Tensor]:
    """The tensors of its MTP layer in BF16, by their whole names."""
    tensors = random_qwen3_5(replace(c, num_layers=1, layer_kinds=(_FULL,), tied=True), seed + 100)
    generator = torch.Generator().manual_seed(seed + 200)
    del tensors["embed_tokens.weight"]
    tensors["fc.weight"] = torch.randn(c.hidden, 2 * c.hidden, generator=generator) * c.hidden**-0.5
    for part in ("embedding", "hidden"):
        tensors[f"pre_fc_norm_{part}.weight"] = torch.randn(c.hidden, generator=generator) * 0.3
    return {f"mtp.{name}": t.to(torch.bfloat16) for name, t in tensors.items()}


def often_right(c: Qwen35Config) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a model and of an MTP layer whose drafts it often accepts: in both the next token follows mostly
    from the last one. What attention and states add is small, and still shows."""
    tensors, mtp = random_qwen3_5(c), random_mtp(c)
    for name in (*tensors, *mtp):
        own = mtp if name.startswith("mtp.") else tensors
        if name.endswith(("o_proj.weight", "out_proj.weight")) or "down_proj" in name:
            own[name] = (own[name].float() * 0.02).to(own[name].dtype)
        if name in ("norm.weight", "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight"):
            own[name] = torch.zeros_like(own[name])
    noise = torch.randn(c.hidden, c.hidden, generator=torch.Generator().manual_seed(7)) * 0.01
    mtp["mtp.fc.weight"] = torch.cat((torch.eye(c.hidden), noise), dim=1).to(torch.bfloat16)
    return tensors, mtp


def rounded(tensors: Mapping[str, Tensor], fmt: str) -> dict[str, Tensor]:
    """``tensors`` in float32, experts after a turn through ``fmt``."""
    block = block_format(fmt)
    experts = (".mlp.experts.", ".mlp.shared_expert.")
    return {
        name: decode(encode(t.float(), block)) if any(part in name for part in experts) else t.float()
        for name, t in tensors.items()
    }


def config_json(config: Qwen35Config) -> dict[str, object]:
    """As published: the text model in a multimodal one."""
    text = to_text_config(config)
    return {"model_type": MULTIMODAL, "tie_word_embeddings": config.tied, "text_config": text}


def write_qwen3_5(
    folder: Path, config: Qwen35Config, tensors: Mapping[str, Tensor], mtp: Mapping[str, Tensor] | None = None
) -> Path:
    """A checkpoint in ``folder``, with config.json as published, and with tensors that are not read. ``mtp``: those of
    its MTP layer; ``None``: random ones."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json(config)))
    named = {name if name.startswith("lm_head") else PREFIX + name: t.contiguous() for name, t in tensors.items()}
    named |= random_mtp(config) if mtp is None else mtp
    named["model.visual.merger.norm.weight"] = torch.ones(4)
    save_file(named, folder / "model.safetensors")
    return folder


def transformers_qwen3_5(config: Qwen35Config, tensors: Mapping[str, Tensor]) -> Qwen3_5MoeForCausalLM:
    """transformers' own model of these tensors, in pure float32."""
    theirs = Qwen3_5MoeTextConfig(**to_text_config(config), attn_implementation="eager")
    model = Qwen3_5MoeForCausalLM(theirs).float().eval()
    named = {name if name.startswith("lm_head") else f"model.{name}": t.float() for name, t in tensors.items()}
    missing, unexpected = model.load_state_dict(named, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.tied else set())
    model.tie_weights()
    return model


class PlainMtp:
    """The MTP layer of these tensors, made of transformers' own layer and norms, in pure float32."""

    def __init__(self, config: Qwen35Config, target: Qwen3_5MoeForCausalLM, tensors: Mapping[str, Tensor]) -> None:
        text = to_text_config(replace(config, num_layers=1, layer_kinds=(_FULL,)))
        theirs = Qwen3_5MoeTextConfig(**text, attn_implementation="eager")
        self._target, self._fc = target, tensors["mtp.fc.weight"].float()
        self._layer = Qwen3_5MoeDecoderLayer(theirs, 0).float().eval()
        before = "mtp.layers.0."
        self._layer.load_state_dict({k.removeprefix(before): t for k, t in tensors.items() if k.startswith(before)})
        self._norms = {}
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self._norms[name] = Qwen3_5MoeRMSNorm(config.hidden, eps=config.rms_epsilon)
            self._norms[name].load_state_dict({"weight": tensors[f"mtp.{name}.weight"].float()})

    @torch.inference_mode()
    def rows(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and hidden states of rows with ``hidden``, each before one of ``tokens``."""
        embedded = self._norms["pre_fc_norm_embedding"](self._target.model.embed_tokens(tokens))
        x = torch.cat((embedded, self._norms["pre_fc_norm_hidden"](hidden)), dim=1) @ self._fc.T
        positions = torch.arange(len(tokens)).view(1, 1, -1)
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        x = self._layer(x[None], self._target.model.rotary_emb(x[None], positions), mask)[0]
        states = self._norms["norm"](x)
        return self._target.lm_head(states), states
