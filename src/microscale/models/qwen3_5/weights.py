"""The tensors of Qwen3.5-MoE and Qwen3.6: BF16, or quantised in any container of ``models/storage``.

BF16 experts are two tensors, ``experts.gate_up_proj`` [E, 2I, H] and ``experts.down_proj`` [E, H, I], as published, or
a module each, as transformers saves them and as every quantised checkpoint has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from microscale.errors import BadCheckpoint
from microscale.models.checkpoint import Checkpoint
from microscale.models.config import LayerKind, read_config_file
from microscale.models.quantization import read_quantisation
from microscale.models.qwen3_5.config import PREFIXES, LinearHeads, Qwen35Config, read_config
from microscale.models.reading.parts import AxisPiece
from microscale.models.sharding import RankSplit, kv_heads, q_heads
from microscale.models.storage import BF16_MODULE, BF16_OR_F32, DUMMY, Storage, Weight, storages
from microscale.models.tensor_table import (
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

NEAR_ZERO = Draw(std=0.05)
"""Norms whose weight is added to 1."""
LEFT_OUT = ("model.visual.", "visual.", "mtp.")
"""Pictures, and the draft head."""


@dataclass(frozen=True)
class Qwen35Layer:
    """The tensors of one decoder layer. H hidden, I width of an expert, E experts, the last of them shared."""

    attn_norm: Tensor  # [H], added to 1
    mlp_norm: Tensor  # [H], added to 1
    router: Tensor  # [E, H]: of the last expert it is the gate
    gate_up: Weight  # [E, 2I, H], all gate rows, then all up rows
    down: Weight  # [E, H, I]
    # Layers with attention:
    qkv: Weight | None = None  # [2 * (heads + kv_heads) * head_dim, H]: of each head q and its gate, then k, then v
    q_norm: Tensor | None = None  # [head_dim], added to 1
    k_norm: Tensor | None = None  # [head_dim], added to 1
    o: Weight | None = None  # [H, heads * head_dim]
    # Layers with states:
    linear_in: Weight | None = None  # [channels + width, H]: q, k, v, z
    linear_gates: Tensor | None = None  # [2 * heads, H]: b, a
    conv: Tensor | None = None  # [channels, 1, taps]
    a_log: Tensor | None = None  # [heads]
    dt_bias: Tensor | None = None  # [heads]
    linear_norm: Tensor | None = None  # [value_dim]
    linear_out: Weight | None = None  # [H, width]


def tensor_table(
    c: Qwen35Config, modules: Mapping[str, Storage] = DUMMY, prefix: str = PREFIXES[1], *, fused: bool = False
) -> TensorTable[Qwen35Layer]:
    """``modules``: how those of each format are stored. ``prefix`` precedes all names but lm_head's. ``fused``: the
    experts of a layer are two tensors."""
    ends = end_rows(
        c,
        f"{prefix}embed_tokens.weight",
        f"{prefix}norm.weight",
        "lm_head",
        head_storage=modules[c.formats.lm_head],
        norm_draw=NEAR_ZERO,
    )
    mixers = {LayerKind.FULL: attention_rows(c, modules), LayerKind.LINEAR: _linear(c, modules)}
    feed_forward = feed_forward_rows(c, modules, fused)
    layers = [[*mixers[kind], *feed_forward] for kind in c.layer_kinds]
    return TensorTable(Qwen35Layer, prefix + "layers.{}.", layers, ends)


def attention_rows(c: Qwen35Config, modules: Mapping[str, Storage]) -> list[TensorRow]:
    q_rows, kv_rows = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    heads = (c.num_heads, c.num_kv_heads, c.head_dim)
    q = TensorSource("self_attn.q_proj", (2 * q_rows, c.hidden), q_heads(c.num_heads, c.num_kv_heads, 2 * c.head_dim))
    k, v = (TensorSource(f"self_attn.{part}_proj", (kv_rows, c.hidden), kv_heads(*heads)) for part in "kv")
    o = TensorSource("self_attn.o_proj", (c.hidden, q_rows), q_heads(*heads, axis=1))
    return [
        vector("attn_norm", "input_layernorm.weight", c.hidden, draw=NEAR_ZERO),
        TensorRow("qkv", (q, k, v), modules[c.formats.qkv]),
        vector("q_norm", "self_attn.q_norm.weight", c.head_dim, draw=NEAR_ZERO),
        vector("k_norm", "self_attn.k_norm.weight", c.head_dim, draw=NEAR_ZERO),
        TensorRow("o", (o,), modules[c.formats.o]),
    ]


def _linear(c: Qwen35Config, modules: Mapping[str, Storage]) -> list[TensorRow]:
    heads = c.linear

    def source(name: str, shape: tuple[int, ...], split: RankSplit) -> TensorSource:
        return TensorSource(f"linear_attn.{name}", shape, split)

    def of_heads(name: str, draw: Draw) -> TensorRow:
        sources = (source(name, (heads.num_heads,), _share(heads.num_heads)),)
        return TensorRow(name.lower(), sources, BF16_OR_F32, draw)

    width = _share(heads.width)
    qkv = source("in_proj_qkv", (heads.channels, c.hidden), _channels(heads))
    z = source("in_proj_z", (heads.width, c.hidden), width)
    gates = tuple(source(f"in_proj_{part}", (heads.num_heads, c.hidden), _share(heads.num_heads)) for part in "ba")
    conv = source("conv1d.weight", (heads.channels, 1, heads.taps), _channels(heads))
    out = source("out_proj", (c.hidden, heads.width), _share(heads.width, axis=1))
    return [
        vector("attn_norm", "input_layernorm.weight", c.hidden, draw=NEAR_ZERO),
        TensorRow("linear_in", (qkv, z), modules[c.formats.linear_in]),
        TensorRow("linear_gates", gates, BF16_MODULE),
        TensorRow("conv", (conv,), BF16_OR_F32, Draw(std=0.3)),
        of_heads("A_log", Draw(std=1.0, float32=True)),
        of_heads("dt_bias", Draw(std=1.0, float32=True)),
        vector("linear_norm", "linear_attn.norm.weight", heads.value_dim),
        TensorRow("linear_out", (out,), modules[c.formats.linear_out]),
    ]


def feed_forward_rows(c: Qwen35Config, modules: Mapping[str, Storage], fused: bool) -> list[TensorRow]:
    routed = c.num_experts - 1
    router = TensorSource("mlp.gate.weight", (routed, c.hidden))
    shared_gate = TensorSource("mlp.shared_expert_gate.weight", (1, c.hidden))
    return [
        vector("mlp_norm", "post_attention_layernorm.weight", c.hidden, draw=NEAR_ZERO),
        TensorRow("router", (router, shared_gate), BF16_OR_F32),
        *expert_rows(
            ("gate_up", "down"),
            "mlp.experts",
            ExpertTensorShape(routed, c.intermediate, c.hidden),
            modules[c.formats.experts],
            fused=fused and c.formats.experts == "bf16",
            shared="mlp.shared_expert",
        ),
    ]


def _share(size: int, axis: int = 0) -> RankSplit:
    """An equal share of an axis, whole heads of it."""

    def pieces(shard: Shard) -> tuple[AxisPiece, ...]:
        each = size // shard.world
        return (AxisPiece(shard.rank * each, (shard.rank + 1) * each, each),)

    return RankSplit(axis, pieces)


def _channels(heads: LinearHeads) -> RankSplit:
    """A rank's heads of q, of k and of v."""

    def pieces(shard: Shard) -> tuple[AxisPiece, ...]:
        found, first = [], 0
        for size in (heads.num_key_heads * heads.key_dim,) * 2 + (heads.width,):
            each = size // shard.world
            found.append(AxisPiece(first + shard.rank * each, first + (shard.rank + 1) * each, each))
            first += size
        return tuple(found)

    return RankSplit(0, pieces)


def open_qwen3_5(
    folder: Path, overrides: Mapping[str, object], shard: Shard = WHOLE
) -> CheckpointWeights[Qwen35Config, Qwen35Layer]:
    """One rank's part of the checkpoint in ``folder``."""
    config = read_config(folder, overrides)
    checkpoint = Checkpoint(folder)
    prefix = _find_prefix(checkpoint)
    fused = f"{prefix}layers.0.mlp.experts.gate_up_proj" in checkpoint.entries
    modules = storages(read_quantisation(folder, read_config_file(folder), PREFIXES).container)
    table = partial(tensor_table, modules=modules, prefix=prefix, fused=fused)
    return open_checkpoint(checkpoint, read_config(folder), config, table, overrides, shard, LEFT_OUT, modules)


def _find_prefix(checkpoint: Checkpoint) -> str:
    for prefix in PREFIXES:
        if f"{prefix}embed_tokens.weight" in checkpoint.entries:
            return prefix
    names = ", ".join(repr(f"{prefix}embed_tokens.weight") for prefix in PREFIXES)
    raise BadCheckpoint(f"{checkpoint.folder} lacks the embedding table; it would be called {names}.")
