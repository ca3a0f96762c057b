"""The weights of draft heads: from checkpoints in their published layouts, random, or as shapes alone.

``head_tensors`` and ``layer_tensors`` are the one table of a head's tensors. Reading, checking and making dummy weights
follow it. See ``config_file`` for who publishes heads. Numbers may be stored as BF16, F16 or F32 and are held in BF16.
``t2d``, the inverse of ``d2t``, is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from microscale.errors import BadCheckpoint
from microscale.models.checkpoint import Checkpoint, FromCheckpoint, TensorSpec
from microscale.models.config import ModelConfig
from microscale.models.draft_heads.config import DFlashConfig, HeadConfig, SeparateHeadConfig
from microscale.models.dummy_weights import TensorMaker
from microscale.models.sharding import vocabulary
from microscale.models.storage import Weight

if TYPE_CHECKING:
    from torch import Tensor

_NUMBERS = ("BF16", "F16", "F32")
MIDLAYER, LAYER = "midlayer.", "layers.{}."
"""What comes before the names of the only layer in EAGLE's own layout, and of each layer in the others."""
EMBED, LM_HEAD, D2T, T2D = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"


@dataclass(frozen=True)
class LayerTensors:
    """One decoder layer. H hidden, I intermediate, C the columns that it reads: 2H in an EAGLE3 head."""

    qkv: Tensor  # [(heads + 2 * kv_heads) * head_dim, C], all of q, then k, then v
    o: Tensor  # [H, heads * head_dim]
    mlp_norm: Tensor  # [H]
    gate_up: Tensor  # [2I, H], all of gate, then up
    down: Tensor  # [H, I]
    input_norm: Tensor  # [H]: norm of what the layer reads; in an EAGLE3 head, of the embedding
    qkv_bias: Tensor | None = None  # [(heads + 2 * kv_heads) * head_dim]
    q_norm: Tensor | None = None  # [head_dim]
    k_norm: Tensor | None = None  # [head_dim]
    o_bias: Tensor | None = None  # [H]


@dataclass(frozen=True)
class HeadTensors:
    """A head without its layers. What is ``None`` is absent, or the target's is used."""

    fc: Weight  # [H, taps * target's hidden]; in an MTP head [H, 2H]
    hidden_norm: Tensor  # [H]
    norm: Tensor  # [H]
    fc_norm: Tensor | None = None  # [taps * target's hidden]: one norm, or one for each tap
    lm_head: Tensor | None = None  # [draft vocabulary, H]
    embed: Tensor | None = None  # [vocabulary, H]
    d2t: Tensor | None = None  # [draft vocabulary] int64
    embedding_norm: Tensor | None = None  # [H]


class HeadWeights(Protocol):
    """The weights of a head of any kind, read or made when they are asked for."""

    @property
    def config(self) -> HeadConfig: ...

    def tensors(self, device: torch.device) -> HeadTensors: ...

    def layer(self, layer_idx: int, device: torch.device) -> Any:
        """``LayerTensors``, or in an MTP head the record of its family's layers."""


class HeadTensor(NamedTuple):
    """One entry of the table: a tensor whose parts are joined along the first dimension."""

    parts: Mapping[str, int]
    """Name in a checkpoint → rows, or length of a vector."""
    columns: int | None = None
    dtypes: tuple[str, ...] = _NUMBERS

    @property
    def shape(self) -> tuple[int, ...]:
        rows = sum(self.parts.values())
        return (rows,) if self.columns is None else (rows, self.columns)

    def specs(self) -> list[TensorSpec]:
        end = () if self.columns is None else (self.columns,)
        return [TensorSpec(name, (rows, *end), self.dtypes) for name, rows in self.parts.items()]


def head_tensors(config: SeparateHeadConfig, prefix: str = LAYER) -> dict[str, HeadTensor]:
    """Fields of ``HeadTensors`` that this head has, in about the order in which they are read."""
    c, hidden, width = config, config.layer.hidden, config.reads.width
    table = {"fc": HeadTensor({"fc.weight": hidden}, width)}
    if isinstance(c, DFlashConfig):
        table["hidden_norm"] = HeadTensor({"hidden_norm.weight": hidden})
    else:
        if c.norm_before_fc:
            table["fc_norm"] = HeadTensor({"input_norm.weight": width})
        elif c.norm_of_each_tap:
            table["fc_norm"] = HeadTensor(
                {f"fc_norm.{i}.weight": c.reads.target_hidden for i in range(len(c.reads.taps))}
            )
        table["hidden_norm"] = HeadTensor({prefix.format(0) + "hidden_norm.weight": hidden})
    table["norm"] = HeadTensor({"norm.weight": hidden})
    if not isinstance(c, DFlashConfig):
        if c.own_lm_head:
            table["lm_head"] = HeadTensor({LM_HEAD: c.draft_vocab_size}, hidden)
        if c.own_embedding:
            table["embed"] = HeadTensor({EMBED: c.reads.vocab_size}, hidden)
        if c.maps_vocabulary:
            table["d2t"] = HeadTensor({D2T: c.draft_vocab_size}, dtypes=("I64", "I32"))
    return table


def layer_tensors(config: SeparateHeadConfig, layer_idx: int, prefix: str = LAYER) -> dict[str, HeadTensor]:
    """Fields of ``LayerTensors`` that a layer of this head has."""
    c, before = config.layer, prefix.format(layer_idx)
    columns = c.hidden if isinstance(config, DFlashConfig) else 2 * c.hidden
    heads = {"q": c.num_heads, "k": c.num_kv_heads, "v": c.num_kv_heads}

    def qkv(kind: str) -> dict[str, int]:
        return {f"{before}self_attn.{part}_proj.{kind}": count * c.head_dim for part, count in heads.items()}

    table = {"qkv": HeadTensor(qkv("weight"), columns)}
    if c.attention_bias:
        table["qkv_bias"] = HeadTensor(qkv("bias"))
    if c.head_norms:
        table |= {f"{part}_norm": HeadTensor({f"{before}self_attn.{part}_norm.weight": c.head_dim}) for part in "qk"}
    table["o"] = HeadTensor({f"{before}self_attn.o_proj.weight": c.hidden}, c.num_heads * c.head_dim)
    if c.attention_bias:
        table["o_bias"] = HeadTensor({f"{before}self_attn.o_proj.bias": c.hidden})
    table["mlp_norm"] = HeadTensor({f"{before}post_attention_layernorm.weight": c.hidden})
    gate_up = {f"{before}mlp.{part}_proj.weight": c.intermediate for part in ("gate", "up")}
    table["gate_up"] = HeadTensor(gate_up, c.hidden)
    table["down"] = HeadTensor({f"{before}mlp.down_proj.weight": c.hidden}, c.intermediate)
    table["input_norm"] = HeadTensor({f"{before}input_layernorm.weight": c.hidden})
    return table


def tensor_specs(config: SeparateHeadConfig, prefix: str = LAYER) -> list[TensorSpec]:
    """Every tensor in the checkpoint of such a head."""
    tables = [head_tensors(config, prefix), *(layer_tensors(config, i, prefix) for i in range(config.num_layers))]
    return [spec for table in tables for tensor in table.values() for spec in tensor.specs()]


class CheckpointHead(FromCheckpoint):
    """Weights from a checkpoint. A rank reads its own rows of lm_head, and all of everything else."""

    def __init__(self, config: SeparateHeadConfig, checkpoint: Checkpoint) -> None:
        self.config = config
        self.prefix = MIDLAYER if any(name.startswith(MIDLAYER) for name in checkpoint.entries) else LAYER
        if config.own_lm_head and not config.shard.is_whole:
            rows = head_tensors(config)["lm_head"].shape[0]
            part = vocabulary(rows).part(config.shard)
            checkpoint = checkpoint.of_rank({} if part is None else {LM_HEAD: part})
        super().__init__(checkpoint, tensor_specs(config, self.prefix))

    def check(self) -> None:
        """Compare every tensor with the head's own config."""
        self._checkpoint.check(tensor_specs(self.config, self.prefix), left_out=(T2D,))

    def tensors(self, device: torch.device) -> HeadTensors:
        table = head_tensors(self.config, self.prefix)
        tensors = {field: self._read(tensor, device) for field, tensor in table.items() if field != "d2t"}
        return HeadTensors(**tensors, d2t=self._d2t(device) if "d2t" in table else None)

    def layer(self, layer_idx: int, device: torch.device) -> LayerTensors:
        table = layer_tensors(self.config, layer_idx, self.prefix)
        return LayerTensors(**{field: self._read(tensor, device) for field, tensor in table.items()})

    def _read(self, tensor: HeadTensor, device: torch.device) -> Tensor:
        parts = [self._checkpoint.read(name, device).to(torch.bfloat16) for name in tensor.parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _d2t(self, device: torch.device) -> Tensor:
        """Refused if it leads out of the target's vocabulary: a draft would be no token."""
        d2t = self._checkpoint.read(D2T, device).to(torch.int64)
        ids = d2t + torch.arange(d2t.shape[0], device=device)
        vocab = self.config.reads.vocab_size
        wrong = ((ids < 0) | (ids >= vocab)).nonzero()
        if wrong.numel():
            at = int(wrong[0])
            raise BadCheckpoint(
                f"{self._checkpoint.folder}: {D2T!r} maps draft token {at} to {int(ids[at])}, and the target has a "
                f"vocabulary of {vocab}."
            )
        return d2t


class DummyHead:
    """Weights without a checkpoint: BF16 near N(0, 0.02) and norms near 1, or shapes alone. Draft tokens are the first
    tokens of the target."""

    def __init__(self, config: SeparateHeadConfig, make: TensorMaker) -> None:
        self.config = config
        self._make = make

    def tensors(self, device: torch.device) -> HeadTensors:
        table = head_tensors(self.config)
        if "lm_head" in table:
            table["lm_head"] = HeadTensor({LM_HEAD: len(self.config.own_rows)}, self.config.layer.hidden)
        ids = table.pop("d2t", None)
        d2t = None if ids is None else self._make.zero_ids(ids.shape[0], device)
        return HeadTensors(**self._all(table, "", device), d2t=d2t)

    def layer(self, layer_idx: int, device: torch.device) -> LayerTensors:
        return LayerTensors(**self._all(layer_tensors(self.config, layer_idx), f"{layer_idx}.", device))

    def _all(self, table: Mapping[str, HeadTensor], before: str, device: torch.device) -> dict[str, Tensor]:
        before = f"draft_head.{before}"
        return {field: self._one(before + field, tensor.shape, device) for field, tensor in table.items()}

    def _one(self, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        if name.endswith("norm"):
            return self._make.normal(name, shape, device, 0.05, 1.0)
        return self._make.normal(name, shape, device)


def check_fit(config: SeparateHeadConfig, target: ModelConfig, name: str, prefix: str = LAYER) -> None:
    """Refuse a head that was made for another target: name the tensor that does not fit, and both shapes."""
    behind = [tap for tap in config.reads.taps if tap > target.num_layers]
    if behind:
        raise BadCheckpoint(
            f"{name} reads its target behind layer {behind[0]}, and the target has {target.num_layers} layers."
        )
    specs = tensor_specs(config, prefix)
    for own, wanted in zip(specs, tensor_specs(config.for_target(target), prefix), strict=True):
        if own.shape != wanted.shape:
            raise BadCheckpoint(
                f"{name} does not fit the target: tensor {own.name!r} has shape {list(own.shape)}, and a target of "
                f"{target.hidden} columns and {target.vocab_size} tokens asks for {list(wanted.shape)}."
            )
    if not (config.own_embedding and config.own_lm_head) and config.layer.hidden != target.hidden:
        norm = next(spec for spec in specs if spec.name == "norm.weight")
        raise BadCheckpoint(
            f"{name} does not fit the target: it takes the target's embedding or lm_head, tensor {norm.name!r} has "
            f"shape {list(norm.shape)}, and the target asks for {[target.hidden]}."
        )
