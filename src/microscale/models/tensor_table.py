"""The one table of a model's tensors. A family lists them; reading, checking, dummy weights and shards follow from it.

A row is one field of the record that a model file takes: the checkpoint tensors that it is made of, their shapes, how
they are stored, how ranks share them, and how dummy weights are drawn. Sources of one row are joined one below the
other, as q, k and v; with ``experts`` they are a pattern for each expert, and the experts are stacked.

A family knows names and shapes only. What a matrix looks like on disk, which tensors with which suffixes and types, is
a ``Storage``: a new checkpoint format is a new one in ``storage.py``, and no change to a family's table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from microscale.models.checkpoint import TensorSpec
from microscale.models.config import ModelConfig
from microscale.models.dummy_weights import TensorMaker
from microscale.models.reading.parts import RankPart
from microscale.models.sharding import RankSplit, gate_then_up, vocabulary, width
from microscale.models.storage import BF16, BF16_MODULE, BF16_OR_F32, Storage, Weight, in_blocks
from microscale.parallel.sharding import Shard, split_vocabulary

if TYPE_CHECKING:
    from torch import Tensor

Layer = TypeVar("Layer")


@dataclass(frozen=True)
class Draw:
    """The distribution of a tensor in dummy weights. Only tensors of numbers have one; block formats have their own."""

    std: float = 0.02
    mean: float = 0.0
    float32: bool = False
    """The model holds the tensor in float32."""


MATRIX = Draw()
NEAR_ONE = Draw(std=0.05, mean=1.0)


@dataclass(frozen=True)
class TensorSource:
    """A tensor of the checkpoint, with its values' shape."""

    name: str
    """Without the layer's prefix. In a row of experts ``{}`` is the expert's number."""
    shape: tuple[int, ...]
    split: RankSplit | None = None
    """``None``: every rank reads all of it."""


@dataclass(frozen=True)
class TensorRow:
    """One field of a layer's record, or one of the tensors before and after the layers."""

    field: str
    sources: tuple[TensorSource, ...]
    storage: Storage = BF16
    draw: Draw = MATRIX
    experts: int | None = None
    """The sources are those of each expert."""
    last: tuple[TensorSource, ...] = ()
    """The sources of one expert more, which has names of its own (a shared one)."""
    number: float | None = None
    """The tensor is a single number, and the model takes a float. Dummy weights have this one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the joined values."""
        first = self.sources[0].shape
        joined = (sum(source.shape[0] for source in self.sources), *first[1:])
        if self.experts is not None:
            return (self.experts + bool(self.last), *joined)
        return (joined[0] + bool(self.last), *joined[1:])

    def specs(self, prefix: str) -> Iterator[TensorSpec]:
        for expert in range(self.experts or 1):
            for source, tensor in product(self.sources, self.storage.tensors):
                yield tensor.spec(prefix + self._name(source, expert), source.shape)
        for source, tensor in product(self.last, self._storage_of_last.tensors):
            yield tensor.spec(prefix + source.name, source.shape)

    def parts(self, prefix: str, shard: Shard) -> Iterator[tuple[str, RankPart]]:
        """What one rank reads of the tensors of which it does not read all."""
        of_all = [(source, range(self.experts or 1), self.storage) for source in self.sources]
        of_last = [(source, None, self._storage_of_last) for source in self.last]
        for source, experts, storage in (*of_all, *of_last):
            for tensor in storage.tensors:
                split, num_axes = source.split, len(source.shape)
                part = None if split is None else tensor.part(split, num_axes, shard)
                if part is not None:
                    names = [source.name] if experts is None else [self._name(source, expert) for expert in experts]
                    yield from ((prefix + name + tensor.suffix, part) for name in names)

    def read(self, prefix: str, read: Callable[[str], Tensor]) -> Weight | float:
        if self.experts is not None:
            return self.storage.weight(self._stacked(self.experts, prefix, read))
        joined = self._joined(self.sources, self.storage, prefix, read)
        if self.last:
            of_last = self._joined(self.last, self._storage_of_last, prefix, read)
            joined = [torch.cat((most, one[None])) for most, one in zip(joined, of_last, strict=True)]
        return self.storage.weight(joined) if self.number is None else float(joined[0])

    @staticmethod
    def _joined(
        sources: Sequence[TensorSource], storage: Storage, prefix: str, read: Callable[[str], Tensor]
    ) -> list[Tensor]:
        parts = [storage.read(prefix + source.name, read) for source in sources]
        return [torch.cat(tensors) if len(parts) > 1 else tensors[0] for tensors in zip(*parts, strict=True)]

    @property
    def _storage_of_last(self) -> Storage:
        """It is a module, also where the other experts are one tensor."""
        return BF16_MODULE if self.experts is None else self.storage

    def dummy(self, prefix: str, make: TensorMaker, device: torch.device | str) -> Weight | float:
        name = prefix + self.field
        if self.number is not None:
            return self.number
        if self.storage.format is not None:
            return make.blocks(name, self.shape, self.storage.format, device)
        if self.storage.channels:
            return make.channels(name, self.shape, device)
        return make.normal(name, self.shape, device, self.draw.std, self.draw.mean, float32=self.draw.float32)

    def _name(self, source: TensorSource, expert: int) -> str:
        return source.name if self.experts is None else source.name.format(expert)

    def _stacked(self, num_experts: int, prefix: str, read: Callable[[str], Tensor]) -> list[Tensor]:
        """The stack is allocated once; only one matrix exists next to it."""
        stacks: list[Tensor] = []
        num_all = num_experts + bool(self.last)
        for expert in range(num_all):
            row = 0
            for source in self.sources if expert < num_experts else self.last:
                name = self._name(source, expert) if expert < num_experts else source.name
                tensors = self.storage.read(prefix + name, read)
                if not stacks:
                    # All sources have equally many rows: a rank's share of gate and of up is the same.
                    sizes = (num_all, tensors[0].shape[0] * len(self.sources))
                    stacks = [tensor.new_empty((*sizes, *tensor.shape[1:])) for tensor in tensors]
                for stack, tensor in zip(stacks, tensors, strict=True):
                    stack[expert, row : row + tensor.shape[0]] = tensor
                row += tensors[0].shape[0]
        return stacks


def vector(field: str, name: str, size: int, storage: Storage = BF16_OR_F32, draw: Draw = NEAR_ONE) -> TensorRow:
    """A norm, or another vector that every rank has."""
    return TensorRow(field, (TensorSource(name, (size,)),), storage, draw)


@dataclass(frozen=True)
class ExpertTensorShape:
    """The experts of a layer: ``gate_up`` is ``[num, 2 * width, hidden]``, ``down`` is ``[num, hidden, width]``."""

    num: int
    width: int
    hidden: int


def expert_rows(
    fields: tuple[str, str], module: str, shape: ExpertTensorShape, storage: Storage, *, fused: bool, shared: str = ""
) -> tuple[TensorRow, TensorRow]:
    """``gate_up`` (all gate rows, then all up rows) and ``down`` of a layer's experts without biases.

    Each matrix of each expert is a module, ``experts.7.gate_proj``; or they are two tensors, ``experts.gate_up_proj``
    and ``experts.down_proj`` (``fused``). ``shared``: the module of one expert more, which becomes the last.
    """
    num, size, hidden = shape.num, shape.width, shape.hidden
    last_gate_up = tuple(
        TensorSource(f"{shared}.{part}_proj", (size, hidden), width(size, 0)) for part in ("gate", "up") if shared
    )
    last_down = (TensorSource(f"{shared}.down_proj", (hidden, size), width(size, 1)),) if shared else ()
    if fused:
        gate_up = TensorSource(f"{module}.gate_up_proj", (num, 2 * size, hidden), gate_then_up(size, 1))
        down = TensorSource(f"{module}.down_proj", (num, hidden, size), width(size, 2))
        return (
            TensorRow(fields[0], (gate_up,), BF16, last=last_gate_up),
            TensorRow(fields[1], (down,), BF16, last=last_down),
        )
    gate, up = (TensorSource(f"{module}.{{}}.{part}_proj", (size, hidden), width(size, 0)) for part in ("gate", "up"))
    down = TensorSource(f"{module}.{{}}.down_proj", (hidden, size), width(size, 1))
    storage = in_blocks(storage) if storage.channels else storage
    return (
        TensorRow(fields[0], (gate, up), storage, experts=num, last=last_gate_up),
        TensorRow(fields[1], (down,), storage, experts=num, last=last_down),
    )


@dataclass(frozen=True)
class EndRows:
    """The tensors before and after the layers."""

    embed: TensorRow
    norm: TensorRow
    lm_head: TensorRow | None
    """``None``: it is the embedding table."""


@dataclass(frozen=True)
class TensorTable(Generic[Layer]):
    """All tensors of a model, in the order in which it takes them."""

    record: Callable[..., Layer]
    """Makes a layer of its fields."""
    prefix: str
    """Precedes the names of a layer's tensors; ``{}`` is the layer's number."""
    layers: Sequence[Sequence[TensorRow]]
    ends: EndRows

    def specs(self) -> list[TensorSpec]:
        return [spec for prefix, row in self._rows() for spec in row.specs(prefix)]

    def parts(self, shard: Shard) -> dict[str, RankPart]:
        return dict(part for prefix, row in self._rows() for part in row.parts(prefix, shard))

    def _rows(self) -> Iterator[tuple[str, TensorRow]]:
        yield "", self.ends.embed
        for layer_idx, rows in enumerate(self.layers):
            for row in rows:
                yield self.prefix.format(layer_idx), row
        yield "", self.ends.norm
        if self.ends.lm_head is not None:
            yield "", self.ends.lm_head


def end_rows(
    config: ModelConfig,
    embed: str,
    norm: str,
    lm_head: str,
    norm_storage: Storage = BF16_OR_F32,
    head_storage: Storage = BF16,
    norm_draw: Draw = NEAR_ONE,
) -> EndRows:
    """The tensors before and after the layers of any model, by their names in the checkpoint."""
    vocab, hidden = config.vocab_size, config.hidden
    own_rows = len(split_vocabulary(vocab, config.shard))
    head = TensorRow("lm_head", (TensorSource(lm_head, (own_rows, hidden), vocabulary(vocab)),), head_storage)
    return EndRows(
        TensorRow("embed", (TensorSource(embed, (vocab, hidden)),)),
        vector("norm", norm, hidden, norm_storage, norm_draw),
        None if config.tied else head,
    )
