"""The tensors of Gemma 4: BF16, quantised in any container of ``models/storage``, or a mixture of both.

Each matrix of each quantised expert is a module, ``experts.7.gate_proj``. BF16 experts are like that, or two tensors,
``experts.gate_up_proj`` [E, 2I, H] and ``experts.down_proj``. The tensors of pictures and sound are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from microscale.errors import BadCheckpoint
from microscale.models.checkpoint import Checkpoint
from microscale.models.config import read_config_file
from microscale.models.gemma4.config import Gemma4Config
from microscale.models.gemma4.config_file import PREFIXES, read_config
from microscale.models.quantization import read_quantisation
from microscale.models.sharding import RankSplit, kv_heads, q_heads, width
from microscale.models.storage import BF16_OR_F32, DUMMY, Storage, Weight, storages
from microscale.models.tensor_table import (
    NEAR_ONE,
    Draw,
    ExpertTensorShape,
    TensorRow,
    TensorSource,
    TensorTable,
    end_rows,
    expert_rows,
    vector,
)
from microscale.models.weights import CheckpointWeights, open_checkpoint
from microscale.parallel.sharding import WHOLE, Shard

if TYPE_CHECKING:
    from torch import Tensor

NOT_TEXT = ("vision_tower", "embed_vision", "audio_tower", "embed_audio", "multi_modal_projector")
"""Parts of the multimodal model that are not computed here."""


@dataclass(frozen=True)
class Gemma4Layer:
    """The tensors of one decoder layer. H hidden, M width of the dense MLP, I of an expert, E experts; heads as the
    layer's kind has.

    The norms' names say where they are applied, since the checkpoint's do not.
    """

    attn_norm: Tensor  # [H], before attention
    qkv: Weight  # [(heads + 2 * kv_heads) * head_dim, H], all of q, then k, then v; where K = V there is no v
    q_norm: Tensor  # [head_dim]
    k_norm: Tensor  # [head_dim]
    o: Weight  # [H, heads * head_dim]
    attn_out_norm: Tensor  # [H], of what attention adds
    mlp_norm: Tensor  # [H], before the dense MLP
    gate_up: Weight  # [2M, H], all gate rows, then all up rows
    down: Weight  # [H, M]
    mlp_out_norm: Tensor  # [H], of the dense MLP's result
    experts_norm: Tensor  # [H], before the experts
    router_scale: Tensor  # [H], on the plain norm that the router reads
    router: Tensor  # [E, H]
    expert_scale: Tensor  # [E], on the routing weights
    experts_gate_up: Weight  # [E, 2I, H], all gate rows, then all up rows
    experts_down: Weight  # [E, H, I]
    experts_out_norm: Tensor  # [H], of the experts' result
    both_norm: Tensor  # [H], of MLP and experts together
    scalar: float
    """Factor on the residual stream at the layer's end."""


def tensor_table(
    c: Gemma4Config, modules: Mapping[str, Storage] = DUMMY, prefix: str = PREFIXES[-1], *, fused: bool = False
) -> TensorTable[Gemma4Layer]:
    """``modules``: how those of each format are stored. ``prefix`` precedes all names but lm_head's. ``fused``: the
    BF16 experts of a layer are two tensors."""
    ends = end_rows(c, f"{prefix}embed_tokens.weight", f"{prefix}norm.weight", "lm_head.weight")
    layers = [_layer(c, layer_idx, modules, fused) for layer_idx in range(c.num_layers)]
    return TensorTable(Gemma4Layer, prefix + "layers.{}.", layers, ends)


def _layer(c: Gemma4Config, layer_idx: int, stored: Mapping[str, Storage], fused: bool) -> list[TensorRow]:
    formats, heads = c.formats[layer_idx], c.heads[c.layer_kinds[layer_idx]]
    q_rows, kv_rows = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    share = (heads.num_heads, heads.num_kv_heads, heads.head_dim)
    # Scores are not divided by a root of the head's size. With norms near 1 they spread over 16, one key takes all, and
    # bf16 moves the logits by 40 %; so they spread over 1, and it moves them by 1.3 % (6 layers, CPU).
    head_mean = heads.head_dim**-0.25
    head_norm = Draw(std=0.05 * head_mean, mean=head_mean)
    experts = ExpertTensorShape(c.num_experts, c.intermediate, c.hidden)

    def norm(field: str, name: str) -> TensorRow:
        return vector(field, f"{name}.weight", c.hidden)

    def modules(field: str, fmt: str, *sources: TensorSource) -> TensorRow:
        return TensorRow(field, sources, stored[fmt])

    def module(name: str, rows: int, columns: int, split: RankSplit) -> TensorSource:
        return TensorSource(name, (rows, columns), split)

    kv = ("k",) if heads.shared_kv else ("k", "v")
    return [
        norm("attn_norm", "input_layernorm"),
        modules(
            "qkv",
            formats.qkv,
            module("self_attn.q_proj", q_rows, c.hidden, q_heads(*share)),
            *(module(f"self_attn.{part}_proj", kv_rows, c.hidden, kv_heads(*share)) for part in kv),
        ),
        vector("q_norm", "self_attn.q_norm.weight", heads.head_dim, draw=head_norm),
        vector("k_norm", "self_attn.k_norm.weight", heads.head_dim, draw=head_norm),
        modules("o", formats.o, module("self_attn.o_proj", c.hidden, q_rows, q_heads(*share, axis=1))),
        norm("attn_out_norm", "post_attention_layernorm"),
        norm("mlp_norm", "pre_feedforward_layernorm"),
        modules(
            "gate_up",
            formats.gate_up,
            *(module(f"mlp.{part}_proj", c.mlp, c.hidden, width(c.mlp, 0)) for part in ("gate", "up")),
        ),
        modules("down", formats.down, module("mlp.down_proj", c.hidden, c.mlp, width(c.mlp, 1))),
        norm("mlp_out_norm", "post_feedforward_layernorm_1"),
        norm("experts_norm", "pre_feedforward_layernorm_2"),
        vector("router_scale", "router.scale", c.hidden),
        # The router reads its norm times the root of the width: at 0.02 all experts would be alike.
        TensorRow(
            "router", (TensorSource("router.proj.weight", (c.num_experts, c.hidden)),), BF16_OR_F32, Draw(std=1.0)
        ),
        vector("expert_scale", "router.per_expert_scale", c.num_experts, draw=replace(NEAR_ONE, float32=True)),
        *expert_rows(
            ("experts_gate_up", "experts_down"),
            "experts",
            experts,
            stored[formats.experts],
            fused=fused and formats.experts == "bf16",
        ),
        norm("experts_out_norm", "post_feedforward_layernorm_2"),
        norm("both_norm", "post_feedforward_layernorm"),
        TensorRow("scalar", (TensorSource("layer_scalar", (1,)),), BF16_OR_F32, number=1.0),
    ]


def open_gemma4(
    folder: Path, overrides: Mapping[str, object], shard: Shard = WHOLE
) -> CheckpointWeights[Gemma4Config, Gemma4Layer]:
    """One rank's part of the checkpoint in ``folder``."""
    config = read_config(folder, overrides)
    checkpoint = Checkpoint(folder)
    prefix = _find_prefix(checkpoint)
    fused = f"{prefix}layers.0.experts.0.gate_proj.weight" not in checkpoint.entries
    modules = storages(read_quantisation(folder, read_config_file(folder), PREFIXES).container)
    table = partial(tensor_table, modules=modules, prefix=prefix, fused=fused)
    left_out = tuple(f"{first}{part}." for first in ("", "model.") for part in NOT_TEXT)
    return open_checkpoint(checkpoint, read_config(folder), config, table, overrides, shard, left_out, modules)


def _find_prefix(checkpoint: Checkpoint) -> str:
    for prefix in PREFIXES:
        if f"{prefix}embed_tokens.weight" in checkpoint.entries:
            return prefix
    names = ", ".join(repr(f"{prefix}embed_tokens.weight") for prefix in PREFIXES)
    raise BadCheckpoint(f"{checkpoint.folder} lacks the embedding table; it would be called {names}.")
