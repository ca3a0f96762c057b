"""A model's weights by its tensor table: read from a checkpoint, or made without one."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from microscale.errors import BadCheckpoint
from microscale.models.batch import KvScales
from microscale.models.checkpoint import Checkpoint, FromCheckpoint, check_overrides
from microscale.models.config import ModelConfig
from microscale.models.dummy_weights import TensorMaker
from microscale.models.storage import KV_SCALES, Storage, Weight, storages
from microscale.models.tensor_table import TensorRow, TensorTable
from microscale.parallel.sharding import Shard, split_vocabulary

if TYPE_CHECKING:
    import torch
    from torch import Tensor

log = logging.getLogger(__name__)

NOTHING_QUANTISED = storages(None)

Layer = TypeVar("Layer")
Config = TypeVar("Config", bound=ModelConfig)


class Weights(ABC, Generic[Config, Layer]):
    """Where a model gets its tensors. Each call reads or makes them again and keeps nothing."""

    def __init__(self, config: Config, table: TensorTable[Layer]) -> None:
        self.config = config
        self._table = table

    @abstractmethod
    def reading(self, device: torch.device, on_read: Callable[[int, int], None]) -> AbstractContextManager[None]:
        """The model is built inside of it. ``on_read`` gets the bytes that were read and their total."""

    @abstractmethod
    def _tensor(self, layer_idx: int | None, row: TensorRow, device: torch.device | str) -> Weight | float: ...

    def embed(self, device: torch.device | str) -> Tensor:
        """``[vocab, hidden]``"""
        return cast("Tensor", self._tensor(None, self._table.ends.embed, device))

    def layer(self, layer_idx: int, device: torch.device | str) -> Layer:
        rows = self._table.layers[layer_idx]
        return self._table.record(**{row.field: self._tensor(layer_idx, row, device) for row in rows})

    def norm(self, device: torch.device | str) -> Tensor:
        """``[hidden]``"""
        return cast("Tensor", self._tensor(None, self._table.ends.norm, device))

    def lm_head(self, device: torch.device | str) -> Tensor:
        """The rank's rows ``[rows, hidden]``, for a model whose lm_head is not the embedding table."""
        assert self._table.ends.lm_head is not None
        return cast("Tensor", self._tensor(None, self._table.ends.lm_head, device))

    def kv_scales(self) -> Sequence[KvScales]:
        """Of each layer's FP8 KV cache, where the checkpoint was calibrated for one."""
        return ()


class CheckpointWeights(FromCheckpoint, Weights[Config, Layer]):
    """Weights from a checkpoint that was checked."""

    def __init__(self, config: Config, table: TensorTable[Layer], checkpoint: Checkpoint) -> None:
        FromCheckpoint.__init__(self, checkpoint, table.specs())
        Weights.__init__(self, config, table)

    def _tensor(self, layer_idx: int | None, row: TensorRow, device: torch.device | str) -> Weight | float:
        prefix = "" if layer_idx is None else self._table.prefix.format(layer_idx)
        return row.read(prefix, lambda name: self._checkpoint.read(name, device))

    def kv_scales(self) -> Sequence[KvScales]:
        found = []
        for layer_idx in range(self.config.num_layers):
            prefix = self._table.prefix.format(layer_idx)
            scales = [scale for part in "kv" if (scale := self._kv_scale(prefix, part)) is not None]
            if len(scales) != 2:
                return ()  # those of some layers alone would be a damaged file, and 1 is right for any
            found.append((scales[0], scales[1]))
        return found

    def _kv_scale(self, prefix: str, part: str) -> float | None:
        names = (f"{prefix}self_attn.{part}_proj.{part}_scale", f"{prefix}self_attn.{part}_scale")
        name = next((name for name in names if name in self._checkpoint.entries), None)
        if name is None:
            return None
        tensor = self._checkpoint.read(name, "cpu").float()
        if tensor.numel() != 1 or not (tensor.isfinite() & (tensor > 0)).all():
            raise BadCheckpoint(
                f"{self._checkpoint.entries[name].file}: tensor {name!r} is no scale: it must be one number above 0."
            )
        return float(tensor)


class DummyWeights(Weights[Config, Layer]):
    """Weights without a checkpoint: random numbers, or shapes alone. ``config`` and ``table`` are the rank's own."""

    def __init__(self, config: Config, table: TensorTable[Layer], make: TensorMaker) -> None:
        super().__init__(config, table)
        self._make = make

    def _tensor(self, layer_idx: int | None, row: TensorRow, device: torch.device | str) -> Weight | float:
        return row.dummy("" if layer_idx is None else f"layers.{layer_idx}.", self._make, device)

    def reading(self, device: torch.device, on_read: Callable[[int, int], None]) -> AbstractContextManager[None]:
        """Nothing is read."""
        return nullcontext()


def open_checkpoint(
    checkpoint: Checkpoint,
    own: Config,
    config: Config,
    table: Callable[[Config], TensorTable[Layer]],
    overrides: Mapping[str, object],
    shard: Shard,
    left_out: tuple[str, ...] = (),
    modules: Mapping[str, Storage] = NOTHING_QUANTISED,
) -> CheckpointWeights[Config, Layer]:
    """One rank's part of a checkpoint, which is checked in full against ``own``, the config that came with it.

    ``config`` is that with overrides. These may leave layers out or change constants, but not the shape of a tensor.
    Tensors whose names begin with ``left_out`` may be in the checkpoint and are not read. ``modules``: how quantised
    modules are stored; what their storages do not read may be there too.
    """
    expected, wanted = table(own).specs(), table(config)
    unread = {suffix for storage in modules.values() for suffix in storage.unread}
    num_left_out, num_unread = checkpoint.check(expected, left_out, (*unread, *KV_SCALES))
    if overrides:
        check_overrides(checkpoint.folder, overrides, expected, wanted.specs())
    if num_left_out:
        log.info("%s: %d tensors are not part of the text model and are not read.", checkpoint.folder, num_left_out)
    if num_unread:
        log.info(
            "%s: %d calibrated scales of activations and of the KV cache: those of activations are not used, which get "
            "their scales when they are quantised; those of the KV cache are, where it is in FP8.",
            checkpoint.folder,
            num_unread,
        )
    if any(checkpoint.entries[spec.name].dtype == "F16" for spec in expected):
        log.warning("%s is in FP16; what is not quantised is rounded to BF16 as it loads.", checkpoint.folder)
    if not shard.is_whole:
        checkpoint = checkpoint.of_rank(wanted.parts(shard))
    return CheckpointWeights(config.sharded(shard), wanted, checkpoint)


def tied_lm_head(embedding: Tensor, config: ModelConfig) -> Tensor:
    """The rank's rows of an embedding table that is also lm_head: the table itself where the rank has all of them."""
    if config.shard.is_whole:
        return embedding
    rows = split_vocabulary(config.vocab_size, config.shard)
    return embedding[rows.start : rows.stop]
