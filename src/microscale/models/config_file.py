"""What the readers of all families' config.json share: overrides, layers, end tokens, and errors that name the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ParamSpec, TypeVar

from microscale.errors import BadConfig, BadSetting
from microscale.models.config import LayerKind
from microscale.models.json_object import JsonObject

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"

# The largest in use have a few dozen; a wrong figure must not become a list of a thousand million kinds.
MAX_LAYERS = 4096

P = ParamSpec("P")
Record = TypeVar("Record")


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


def read_num_layers(file: JsonObject) -> int:
    num_layers = file.require("num_hidden_layers", int)
    if num_layers > MAX_LAYERS:
        raise file.fault("num_hidden_layers", f"is {num_layers}, more than any model has")
    return num_layers


def read_layer_kinds(file: JsonObject, default: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """``default``: where the file does not say."""
    names = file.optional("layer_types", list, list(default))
    words = ", ".join(LayerKind)
    if not all(isinstance(name, str) and name in set(LayerKind) for name in names):
        raise file.fault("layer_types", f"may hold only {words}")
    return tuple(LayerKind(name) for name in names)


def build(file: JsonObject, record: Callable[P, Record], *args: P.args, **values: P.kwargs) -> Record:
    """The record of these values; what it finds inconsistent is said with the file's name."""
    try:
        return record(*args, **values)
    except BadConfig as exc:
        kind = BadSetting if file.overridden else BadConfig
        raise kind(f"{file.source}: {exc}") from None


def end_tokens(file: JsonObject) -> tuple[int, ...]:
    value = file.data.get("eos_token_id")
    tokens = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise file.fault("eos_token_id", "must be a token or a list of tokens")
    return tuple(tokens)


def producible(tokens: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """Without the end tokens that a cut vocabulary no longer has: the model cannot produce them."""
    return tuple(token for token in tokens if token < vocab_size)
