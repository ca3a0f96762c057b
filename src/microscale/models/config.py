"""What the configs of all families share: layer kinds, checks of sizes, and the strict reading of a config.json.

Every error names the file. This module does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, ParamSpec, Protocol, Self, TypeVar

from microscale.errors import BadCheckpoint, BadConfig, BadSetting, Unsupported
from microscale.models.json_object import JsonObject, read_json_object
from microscale.models.known_checkpoints import refuse_files
from microscale.parallel.sharding import Shard

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"

MAX_NUMBER = 2**31 - 1
"""Upper limit of every size and constant of a model, so that each fits the kernels' 32-bit arguments."""
# The largest models have a few dozen layers; a wrong number must not become a list of a thousand million layer kinds.
MAX_LAYERS = 4096
MAX_DRAFT = 15
"""Maximum draft length in speculative decoding: with the token before it, a sequence runs 16 tokens per step."""
NO_SLIDING_LAYERS = 1
"""``sliding_window`` of a config without sliding layers: a window of the token itself. The engine then keeps the
minimum number of pages for sliding layers, and these take no memory."""

P = ParamSpec("P")
Record = TypeVar("Record")


class LoadFormat(StrEnum):
    """Where weights come from, as on the command line."""

    AUTO = "auto"
    SAFETENSORS = "safetensors"
    DUMMY = "dummy"


@dataclass(frozen=True)
class HeadFormats:
    """The formats in which a draft head's weights are held; ``None``: as its checkpoint has them."""

    quantization: str | None = None
    """All dense layers whose shapes fit the format."""
    lm_head: str | None = None
    """Its own lm_head alone."""


OWN_FORMATS = HeadFormats()


class LayerKind(StrEnum):
    """What a layer sees of the tokens before. The values are the words of ``layer_types`` in config.json."""

    FULL = "full_attention"
    SLIDING = "sliding_attention"
    LINEAR = "linear_attention"
    """A state that goes from token to token: no keys and values, and nothing that grows."""


PAGED = (LayerKind.FULL, LayerKind.SLIDING)
"""Kinds whose keys and values are in pages. Every model has pools for both, so that the engine knows one case."""


class ModelConfig(Protocol):
    """What the rest of the program needs of a family's config."""

    @property
    def num_layers(self) -> int: ...

    @property
    def hidden(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def tied(self) -> bool:
        """Whether lm_head is the embedding table."""

    @property
    def weights_only(self) -> bool:
        """Whether the checkpoint's NVFP4 weights are published for activations in BF16."""

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]: ...

    @property
    def sliding_window(self) -> int: ...

    @property
    def max_context(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def shard(self) -> Shard: ...

    def sharded(self, shard: Shard) -> Self:
        """One rank's part of the model; an error where it cannot be split like that."""

    def shortened(self) -> Self:
        """The model with one layer of each sort: all its kernels, in the time of a few layers."""


def check_number(name: str, value: float) -> None:
    """Refuse a value that is not a size."""
    if not 0 < value <= MAX_NUMBER:
        raise BadConfig(f"{name} is {value if abs(value) < 1e30 else 'huge'} and must be above 0 and below 2**31.")


def check_positive(record: object, *names: str) -> None:
    """Refuse fields that are not sizes."""
    for name in names:
        check_number(name, getattr(record, name))


def check_blocks(record: object, block: int, *names: str) -> None:
    """Refuse widths that are not a whole number of blocks."""
    for name in names:
        if getattr(record, name) % block:
            raise BadConfig(f"{name} size {getattr(record, name)} is not a multiple of the {block} values of a block.")


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int, where: str = "") -> None:
    """Refuse heads that cannot share their KV heads. ``where`` names their layers, as `` of full layers``."""
    if num_heads % num_kv_heads:
        raise BadConfig(f"{num_heads} heads{where} cannot share {num_kv_heads} KV heads evenly.")
    if head_dim % 2:
        raise BadConfig(f"head_dim {head_dim}{where} is odd, and rope rotates pairs.")


def check_top_k(top_k: int, num_experts: int) -> None:
    """Refuse more experts per token than there are."""
    if top_k > num_experts:
        raise BadConfig(f"{top_k} experts per token cannot be chosen from {num_experts}.")


def check_end_tokens(config: ModelConfig) -> None:
    for token in config.eos_token_ids:
        if not 0 <= token < config.vocab_size:
            raise BadConfig(f"end token {token} is not in the vocabulary of {config.vocab_size}.")


def last_of_each(layers: Sequence[object]) -> list[int]:
    """The last layer of each sort, in the order of the model."""
    return sorted({layer: place for place, layer in enumerate(layers)}.values())


def read_config_file(folder: Path) -> JsonObject:
    """The config.json of a model's folder."""
    try:
        if not folder.is_dir():
            raise BadCheckpoint(f"{folder} is not a folder; a model is one with config.json and *.safetensors in it.")
        if not (folder / CONFIG).is_file():
            refuse_files(str(folder), [file.name for file in folder.iterdir()])
    except OSError as exc:
        raise BadCheckpoint(f"{folder} cannot be read: {exc.strerror}.") from exc
    return read_json_object(folder / CONFIG)


def apply_overrides(file: JsonObject, overrides: Mapping[str, object], known: frozenset[str]) -> JsonObject:
    """``file`` with the values of ``overrides``; an object is merged, fewer layers cut ``layer_types`` as well."""
    data = dict(file.data)
    for key, value in overrides.items():
        if key not in known:
            raise BadSetting(f"Unknown override {key!r}; known for this model are {', '.join(sorted(known))}.")
        old = data.get(key)
        data[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, Mapping) else value
    file = replace(file, data=data, overridden=frozenset(overrides))
    kinds = data.get("layer_types")
    if "num_hidden_layers" in overrides and "layer_types" not in overrides and isinstance(kinds, list):
        num_layers = file.require("num_hidden_layers", int)
        if num_layers > len(kinds):
            raise file.fault("num_hidden_layers", f"asks for {num_layers} layers of a model that has {len(kinds)}")
        data["layer_types"] = kinds[:num_layers]
    return file


KEYS: Mapping[str, str] = {
    "num_layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "rms_epsilon": "rms_norm_eps",
    "max_context": "max_position_embeddings",
}
"""Fields of a config, with their keys in a Hugging Face config.json."""
_TYPES: Mapping[Any, type] = {"int": int, "float": float, "bool": bool}


def read_fields(file: JsonObject, record: type, keys: Mapping[str, str]) -> dict[str, Any]:
    """The values of these fields of a dataclass. The dataclass has their types, ``keys`` their keys in the file."""
    types = {field.name: field.type for field in fields(record)}
    if "num_layers" in keys:
        read_num_layers(file)
    return {name: file.require(key, _TYPES[types[name]]) for name, key in keys.items()}


def write_fields(config: object, keys: Mapping[str, str]) -> dict[str, object]:
    """The inverse of ``read_fields``."""
    return {key: getattr(config, name) for name, key in keys.items()}


def refuse_others(file: JsonObject, only: Mapping[str, object]) -> None:
    """Refuse keys whose values would mean other arithmetic. An absent key has the value in ``only``."""
    for key, value in only.items():
        given = file.data.get(key)
        if given is not None and (given != value or isinstance(given, bool) != isinstance(value, bool)):
            raise Unsupported(f"{file.source}: {key!r} {_shown(given)} is not supported; supported is {_shown(value)}.")


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, str) else json.dumps(value)


def read_num_layers(file: JsonObject) -> int:
    num_layers = file.require("num_hidden_layers", int)
    if num_layers > MAX_LAYERS:
        raise file.fault("num_hidden_layers", f"is {num_layers}, more than any model has")
    return num_layers


def read_layer_kinds(
    file: JsonObject, default: Sequence[LayerKind], known: Sequence[LayerKind] = PAGED
) -> tuple[LayerKind, ...]:
    """``default``: the kinds where the file has no ``layer_types``. ``known``: what the family computes."""
    names = file.optional("layer_types", list, list(default))
    words = ", ".join(known)
    if not all(isinstance(name, str) and name in known for name in names):
        raise file.fault("layer_types", f"may hold only {words}")
    return tuple(LayerKind(name) for name in names)


def build(file: JsonObject, record: Callable[P, Record], *args: P.args, **values: P.kwargs) -> Record:
    """The record of these values; its errors get the file's name."""
    try:
        return record(*args, **values)
    except BadConfig as exc:
        kind = BadSetting if file.overridden else BadConfig
        raise kind(f"{file.source}: {exc}") from None


def read_end_tokens(folder: Path | None, file: JsonObject, vocab_size: int) -> tuple[int, ...]:
    """The end tokens that ``generation_config.json`` in ``folder`` names, or else the config.json ``file``.

    Overridden tokens win over both, and are kept when they are outside the vocabulary, so that the config refuses them.
    Tokens of a file that a reduced vocabulary no longer has are dropped: the model cannot produce them.
    """
    if "eos_token_id" in file.overridden:
        return end_tokens(file)
    tokens = end_tokens(file)
    if folder is not None and (folder / GENERATION_CONFIG).is_file():
        generation = read_json_object(folder / GENERATION_CONFIG)
        if generation.data.get("eos_token_id") is not None:
            tokens = end_tokens(generation)
    return producible(tokens, vocab_size)


def end_tokens(file: JsonObject) -> tuple[int, ...]:
    value = file.data.get("eos_token_id")
    tokens = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise file.fault("eos_token_id", "must be a token or a list of tokens")
    return tuple(tokens)


def producible(tokens: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """The tokens that are in the vocabulary."""
    return tuple(token for token in tokens if token < vocab_size)
