"""The weights of an MTP layer: from the target's own checkpoint, random, or as shapes alone.

They are BF16 or FP8 blocks, module by module, whatever the target's format is: tools that quantise a model mostly leave
``mtp.*`` as it is. Tensor names tell which, since no config does.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from microscale.errors import BadSetting
from microscale.models.checkpoint import Checkpoint, FromCheckpoint, TensorSpec
from microscale.models.config import LayerKind
from microscale.models.draft_heads.config import MtpConfig
from microscale.models.draft_heads.weights import HeadTensors
from microscale.models.dummy_weights import TensorMaker
from microscale.models.qwen3_5.config import Formats, Qwen35Config
from microscale.models.qwen3_5.weights import NEAR_ZERO, Qwen35Layer, attention_rows, feed_forward_rows
from microscale.models.storage import KV_SCALES, storages
from microscale.models.tensor_table import TensorRow, TensorSource, vector
from microscale.parallel.sharding import WHOLE, Shard

if TYPE_CHECKING:
    import torch

PREFIX, LAYER = "mtp.", "mtp.layers.0."
"""What comes before the names of the head's tensors, and of its layer's."""
MODULES = storages("fp8")
Rows = dict[str, list[TensorRow]]
"""By prefix: fields of ``HeadTensors`` and of ``Qwen35Layer``."""


def mtp_config(target: Qwen35Config, names: Collection[str] | None = None) -> MtpConfig:
    """The head of this target or of one rank's part of it. ``names``: of the tensors in its checkpoint, which tell the
    formats. ``None``: they are not known; then FP8 blocks where the target has these."""
    if names is None:
        fmt = "fp8_block" if target.formats.experts == "fp8_block" else "bf16"
        formats, fc_format = Formats(experts=fmt, qkv=fmt, o=fmt), "bf16"
    else:
        if not any(name.startswith(PREFIX) for name in names):
            raise BadSetting(
                "--speculative-config: the checkpoint has no MTP layer (mtp.*); start it without --speculative-config, "
                "or with method ngram."
            )
        modules = ("mlp.experts.0.gate_proj", "self_attn.q_proj", "self_attn.o_proj")
        experts, qkv, o = (_format(f"{LAYER}{module}", names) for module in modules)
        formats, fc_format = Formats(experts=experts, qkv=qkv, o=o), _format(f"{PREFIX}fc", names)
    layer = replace(target, num_layers=1, layer_kinds=(LayerKind.FULL,), formats=formats, shard=WHOLE)
    return MtpConfig(layer, target.num_layers, fc_format, target.shard)


def _format(module: str, names: Collection[str]) -> str:
    return "fp8_block" if f"{module}.weight_scale_inv" in names else "bf16"


def mtp_rows(c: MtpConfig, *, fused: bool = False) -> Rows:
    """The table of its tensors. ``fused``: BF16 experts are two tensors, and not a module each."""
    layer, hidden = c.layer, c.layer.hidden
    assert isinstance(layer, Qwen35Config)
    ends = [
        TensorRow("fc", (TensorSource("fc", (hidden, 2 * hidden)),), MODULES[c.fc_format]),
        vector("embedding_norm", "pre_fc_norm_embedding.weight", hidden, draw=NEAR_ZERO),
        vector("hidden_norm", "pre_fc_norm_hidden.weight", hidden, draw=NEAR_ZERO),
        vector("norm", "norm.weight", hidden, draw=NEAR_ZERO),
    ]
    return {PREFIX: ends, LAYER: [*attention_rows(layer, MODULES), *feed_forward_rows(layer, MODULES, fused)]}


def _named(rows: Rows) -> list[tuple[str, TensorRow]]:
    return [(prefix, row) for prefix in rows for row in rows[prefix]]


def _specs(rows: Rows) -> list[TensorSpec]:
    return [spec for prefix, row in _named(rows) for spec in row.specs(prefix)]


class CheckpointMtp(FromCheckpoint):
    """Weights from a checkpoint. A rank reads its own heads and widths, and all of ``fc``."""

    def __init__(self, config: MtpConfig, rows: Rows, checkpoint: Checkpoint) -> None:
        """``rows``: of the whole layer."""
        self.config = config
        self._rows = rows
        super().__init__(checkpoint, _specs(rows))

    def tensors(self, device: torch.device) -> HeadTensors:
        return HeadTensors(**self._all(PREFIX, device))

    def layer(self, layer_idx: int, device: torch.device) -> Qwen35Layer:
        return Qwen35Layer(**self._all(LAYER, device))

    def _all(self, prefix: str, device: torch.device) -> dict[str, Any]:
        return {row.field: row.read(prefix, lambda name: self.read_one(name, device)) for row in self._rows[prefix]}


def open_mtp(folder: Path, target: Qwen35Config, shard: Shard = WHOLE) -> CheckpointMtp:
    """The head in the checkpoint of ``target``, or one rank's part of it, checked against the target's config."""
    checkpoint = Checkpoint(folder).under(PREFIX)
    names = checkpoint.entries
    rows = mtp_rows(mtp_config(target, names), fused=f"{LAYER}mlp.experts.gate_up_proj" in names)
    checkpoint.check(_specs(rows), unread=(*MODULES["fp8_block"].unread, *KV_SCALES))
    if not shard.is_whole:
        checkpoint = checkpoint.of_rank(dict(part for prefix, row in _named(rows) for part in row.parts(prefix, shard)))
    return CheckpointMtp(mtp_config(target.sharded(shard), names), rows, checkpoint)


class DummyMtp:
    """Weights without a checkpoint: random numbers, or shapes alone. ``config`` is the rank's own."""

    def __init__(self, config: MtpConfig, make: TensorMaker) -> None:
        self.config = config
        self._rows = mtp_rows(config)
        self._make = make

    def tensors(self, device: torch.device) -> HeadTensors:
        return HeadTensors(**self._all(PREFIX, device))

    def layer(self, layer_idx: int, device: torch.device) -> Qwen35Layer:
        return Qwen35Layer(**self._all(LAYER, device))

    def _all(self, prefix: str, device: torch.device) -> dict[str, Any]:
        return {row.field: row.dummy(prefix, self._make, device) for row in self._rows[prefix]}
