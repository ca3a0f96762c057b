"""Random Qwen3-MoE checkpoints of a few hundred kB, written to disk in the published layout and as transformers 5 holds
them, and transformers' own model of the numbers in them.

The numbers are chosen to be unkind: norms far from 1, values far smaller than a norm would make them, a router that
decides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3MoeConfig as TheirConfig
from transformers import Qwen3MoeForCausalLM

from microscale.formats import block_format, decode, encode
from microscale.models.config import LayerKind
from microscale.models.qwen3_moe.config import Qwen3MoeConfig, to_hugging_face
from microscale.models.rope import PlainRope, Rope, YarnRope


def tiny_qwen3_moe(
    *,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: tuple[int, int, int],
    experts: tuple[int, int],
    rope: Rope,
    tied: bool = False,
    vocab: int = 256,
) -> Qwen3MoeConfig:
    """``heads``: heads, KV heads, size of a head; ``experts``: all of them, and how many a token uses."""
    return Qwen3MoeConfig(
        num_layers=layers,
        layer_kinds=(LayerKind.FULL,) * layers,
        hidden=hidden,
        intermediate=intermediate,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        num_experts=experts[0],
        top_k=experts[1],
        vocab_size=vocab,
        rope=rope,
        rms_epsilon=1e-6,
        max_context=256,
        eos_token_ids=(),
        tied=tied,
    )


CASES: dict[str, Qwen3MoeConfig] = {
    # Eight query heads to a KV head and top 8, as in the real one; query width above hidden.
    "as_published": tiny_qwen3_moe(
        layers=3, hidden=64, intermediate=32, heads=(8, 1, 32), experts=(16, 8), rope=PlainRope(1e6)
    ),
    # Odd groups: three query heads to each of three KV heads; heads narrower than hidden; one tensor for both ends.
    "odd_groups_tied": tiny_qwen3_moe(
        layers=2, hidden=96, intermediate=96, heads=(9, 3, 6), experts=(5, 1), rope=PlainRope(1e4), tied=True, vocab=320
    ),
    # All experts used, one KV head for each query head, and a ramp of YaRN within the head.
    "yarn_all_experts": tiny_qwen3_moe(
        layers=2, hidden=160, intermediate=64, heads=(5, 5, 64), experts=(3, 3),
        rope=YarnRope(1e4, 4.0, beta_fast=4.0, beta_slow=1.0, original_context=64, truncate=True), vocab=200,
    ),
}  # fmt: skip


def random_qwen3_moe(c: Qwen3MoeConfig, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor in BF16, experts as transformers 5 holds them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float, mean: float = 0.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * std + mean).to(torch.bfloat16)

    def linear(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return normal(rows, columns, std=gain * columns**-0.5)

    q_rows, kv_rows = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    tensors = {"model.embed_tokens.weight": normal(c.vocab_size, c.hidden, std=0.5)}
    for layer_idx in range(c.num_layers):
        layer = {
            "input_layernorm.weight": normal(c.hidden, std=0.3, mean=1.0),
            "post_attention_layernorm.weight": normal(c.hidden, std=0.3, mean=1.0),
            # Keys would be three times as large as values, if they were not normed; values far from a norm of 1.
            "self_attn.q_proj.weight": linear(q_rows, c.hidden),
            "self_attn.k_proj.weight": linear(kv_rows, c.hidden, gain=3.0),
            "self_attn.v_proj.weight": linear(kv_rows, c.hidden, gain=0.4),
            "self_attn.o_proj.weight": linear(c.hidden, q_rows, gain=2.0),
            "self_attn.q_norm.weight": normal(c.head_dim, std=0.4, mean=1.5),
            "self_attn.k_norm.weight": normal(c.head_dim, std=0.4, mean=0.8),
            "mlp.gate.weight": linear(c.num_experts, c.hidden, gain=1.5),
            "mlp.experts.gate_up_proj": normal(c.num_experts, 2 * c.intermediate, c.hidden, std=2 * c.hidden**-0.5),
            "mlp.experts.down_proj": normal(c.num_experts, c.hidden, c.intermediate, std=c.intermediate**-0.5),
        }
        tensors |= {f"model.layers.{layer_idx}.{name}": tensor for name, tensor in layer.items()}
    tensors["model.norm.weight"] = normal(c.hidden, std=0.3, mean=1.0)
    if not c.tied:
        tensors["lm_head.weight"] = normal(c.vocab_size, c.hidden, std=2 * c.hidden**-0.5)
    return tensors


EXPERTS = re.compile(r"model\.layers\.\d+\.mlp\.experts\.")


def rounded(tensors: Mapping[str, Tensor], fmt: str) -> dict[str, Tensor]:
    """``tensors`` in float32, experts after a turn through ``fmt``."""
    block = block_format(fmt)
    return {name: decode(encode(t.float(), block)) if EXPERTS.match(name) else t.float() for name, t in tensors.items()}


def published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as they are published: each matrix of each expert by itself."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not EXPERTS.match(name):
            found[name] = tensor
            continue
        stem, _, kind = name.rpartition(".")
        for expert, matrix in enumerate(tensor):
            parts = {"down": matrix} if kind == "down_proj" else dict(zip(("gate", "up"), matrix.chunk(2), strict=True))
            found |= {f"{stem}.{expert}.{part}_proj.weight": half.contiguous() for part, half in parts.items()}
    return found


def write_qwen3_moe(folder: Path, config: Qwen3MoeConfig, tensors: Mapping[str, Tensor]) -> Path:
    """A checkpoint in ``folder``, with config.json as published."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(to_hugging_face(config)))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def transformers_qwen3_moe(config: Qwen3MoeConfig, tensors: Mapping[str, Tensor]) -> Qwen3MoeForCausalLM:
    """transformers' own model of these tensors, in pure float32."""
    model = Qwen3MoeForCausalLM(TheirConfig(**to_hugging_face(config), attn_implementation="eager")).float().eval()
    missing, unexpected = model.load_state_dict({name: t.float() for name, t in tensors.items()}, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.tied else set())
    model.tie_weights()
    return model
