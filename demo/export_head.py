"""The trained draft head as a checkpoint in EAGLE's own layout, as SpecForge writes it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from demo.draft_head import DraftHead
from microscale.models.draft_heads.config import Eagle3Config
from microscale.models.rope import to_json

FILE = "model.safetensors"
_LAYER = "midlayer."
_NAMES = {
    "fc": "fc",
    **{name: f"{_LAYER}self_attn.{name}_proj" for name in "qkvo"},
    "down": f"{_LAYER}mlp.down_proj",
    "input_norm": f"{_LAYER}input_layernorm",
    "hidden_norm": f"{_LAYER}hidden_norm",
    "mlp_norm": f"{_LAYER}post_attention_layernorm",
    "norm": "norm",
    "lm_head": "lm_head",
}


def tensors(head: DraftHead) -> dict[str, Tensor]:
    """The checkpoint's tensors, on the CPU."""
    made: dict[str, Tensor] = {theirs: head.get_parameter(ours) for ours, theirs in _NAMES.items()}
    gate, up = head.gate_up.chunk(2)
    made |= {f"{_LAYER}mlp.gate_proj": gate, f"{_LAYER}mlp.up_proj": up}
    numbers = {f"{name}.weight": tensor.detach().cpu().bfloat16().contiguous() for name, tensor in made.items()}
    ids = head.get_buffer("draft_ids").cpu()
    known = torch.zeros(head.config.reads.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return {**numbers, "d2t": ids - torch.arange(ids.shape[0]), "t2d": known}


def config_json(config: Eagle3Config) -> dict[str, object]:
    """Layers are counted from 0 there."""
    layer = config.layer
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in config.reads.taps]},
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "hidden_size": layer.hidden,
        "intermediate_size": layer.intermediate,
        "max_position_embeddings": layer.max_context,
        "model_type": "llama",
        "num_attention_heads": layer.num_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": layer.num_kv_heads,
        "rms_norm_eps": layer.rms_epsilon,
        **to_json(layer.rope),  # type: ignore[arg-type]
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": config.reads.vocab_size,
    }


def export_head(head: DraftHead, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors(head), folder / FILE, metadata={"format": "pt"})
    (folder / FILE).chmod(0o644)  # it is made for its owner alone
    (folder / "config.json").write_text(json.dumps(config_json(head.config), indent=2) + "\n")
