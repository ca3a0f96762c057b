"""The model families, and the one place that lists them. A model's is known by a preset's name, by a config's
``model_type``, or by its config's type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from microscale.backends.ops import Ops
from microscale.errors import BadCheckpoint, BadSetting, Unsupported
from microscale.models import hub
from microscale.models.config_file import CONFIG
from microscale.models.dummy_weights import RandomTensors, TensorMaker
from microscale.models.family import AnyModel, Family, ModelConfig, ModelWeights
from microscale.models.gemma4.family import GEMMA4
from microscale.models.gpt_oss.family import GPT_OSS
from microscale.models.json_object import read_json_object
from microscale.models.load_format import LoadFormat
from microscale.models.qwen3_moe.family import QWEN3_MOE
from microscale.models.random_checkpoint import write_random
from microscale.parallel.sharding import WHOLE, Shard

if TYPE_CHECKING:
    import torch

FAMILIES: tuple[Family[Any, Any, Any], ...] = (GPT_OSS, GEMMA4, QWEN3_MOE)
PRESETS: Mapping[str, ModelConfig] = {name: config for family in FAMILIES for name, config in family.presets.items()}
"""Known architectures, for models without a checkpoint (``--load-format dummy``) and for plans made ahead."""


def read_model_config(folder: Path, overrides: Mapping[str, object] | None = None) -> ModelConfig:
    """The config in ``folder``, with ``overrides`` applied to its keys."""
    config: ModelConfig = _family_in(folder).read(folder, overrides or {})
    return config


def preset(name: str, overrides: Mapping[str, object]) -> ModelConfig:
    """The preset of this name; ``overrides`` name the keys of a published config.json, as for a real checkpoint."""
    config: ModelConfig = _family_of(PRESETS[name]).preset(name, PRESETS[name], overrides)
    return config


def open_weights(
    model: str,
    *,
    load_format: LoadFormat | str = LoadFormat.AUTO,
    overrides: Mapping[str, object] | None = None,
    offline: bool = False,
    seed: int = 0,
    shard: Shard = WHOLE,
) -> ModelWeights:
    """The weights of ``model``, or one rank's part: a folder, a hub id, or with ``dummy`` the name of a preset.

    A checkpoint is checked against its own config in full before this returns. Overrides may then leave layers out or
    change constants, but not the shape of a tensor.
    """
    overrides = overrides or {}
    if load_format not in list(LoadFormat):
        raise BadSetting(f"Unknown load format {load_format!r}; known are {', '.join(LoadFormat)}.")
    # A folder comes first, so that one that is called like a preset can be opened.
    if model in PRESETS and not Path(model).is_dir():
        if load_format != LoadFormat.DUMMY:
            raise BadCheckpoint(
                f"{model} is a preset without weights: add --load-format dummy, or give a folder or a hub id such as "
                f"openai/gpt-oss-20b."
            )
        return dummy_weights(preset(model, overrides).sharded(shard), seed)
    folder = hub.resolve(model, offline=offline, config_only=load_format == LoadFormat.DUMMY)
    if load_format == LoadFormat.DUMMY:
        return dummy_weights(read_model_config(folder, overrides).sharded(shard), seed)
    weights: ModelWeights = _family_in(folder).open(folder, overrides, shard)
    return weights


def build_model(
    weights: ModelWeights, ops: Ops, device: torch.device, page_size: int, on_layer: Callable[[], None]
) -> AnyModel:
    """The model of these weights, loaded. ``on_layer`` hears each layer as it is ready."""
    model: AnyModel = _family_of(weights.config).build(weights, ops, device, page_size, on_layer)
    return model


def _family_in(folder: Path) -> Family[Any, Any, Any]:
    """By ``model_type``. A folder that cannot be read, or whose file has none, is the first family's to complain of."""
    if not (folder / CONFIG).is_file():
        return FAMILIES[0]
    file = read_json_object(folder / CONFIG)
    model_type = file.data.get("model_type")
    found = next((family for family in FAMILIES if model_type in family.model_types), None)
    if found is None and isinstance(model_type, str):
        known = ", ".join(repr(name) for family in FAMILIES for name in family.model_types)
        raise Unsupported(f"{file.source}: 'model_type' {model_type!r} is not supported; supported are {known}.")
    return FAMILIES[0] if found is None else found


def _family_of(config: ModelConfig) -> Family[Any, Any, Any]:
    return next(family for family in FAMILIES if isinstance(config, family.config))


def dummy_weights(config: ModelConfig, seed: int = 0) -> ModelWeights:
    """Random weights of the right shapes."""
    weights: ModelWeights = _family_of(config).dummy(config, RandomTensors(seed))
    return weights


def write_random_checkpoint(name: str, folder: Path, overrides: Mapping[str, object]) -> int:
    """Write random weights of a preset's shapes to ``folder``, as its family is published; returns their bytes."""
    if name not in PRESETS:
        raise BadSetting(f"{name!r} is not a preset; presets are {', '.join(PRESETS)}.")
    config = preset(name, overrides)
    published = _family_of(config).published
    if published is None:
        raise Unsupported(f"Random checkpoints of {name} cannot be written; those of gpt-oss can.")
    return write_random(published(config), folder)


def shape_weights(config: ModelConfig, tensors: TensorMaker) -> ModelWeights:
    """Weights that are shapes alone, made by ``tensors``."""
    weights: ModelWeights = _family_of(config).dummy(config, tensors)
    return weights


__all__ = [
    "FAMILIES",
    "PRESETS",
    "AnyModel",
    "LoadFormat",
    "ModelConfig",
    "ModelWeights",
    "build_model",
    "dummy_weights",
    "open_weights",
    "preset",
    "read_model_config",
    "shape_weights",
    "write_random_checkpoint",
]
