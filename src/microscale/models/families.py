"""The model families, and the one place that tells them apart: by a preset's name or by a config's ``model_type``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path

import torch

from microscale.backends.ops import Ops
from microscale.errors import BadCheckpoint, BadSetting
from microscale.models import hub
from microscale.models.config import GptOssConfig
from microscale.models.config_file import CONFIG, read_config
from microscale.models.dummy_weights import DummyWeights
from microscale.models.gemma4 import Gemma4
from microscale.models.gemma4_config import MODEL_TYPES, read_gemma4
from microscale.models.gemma4_dummy import DummyGemma4
from microscale.models.gemma4_weights import Gemma4Checkpoint, open_gemma4
from microscale.models.gpt_oss import GptOss
from microscale.models.gpt_oss_weights import CheckpointWeights, open_gpt_oss
from microscale.models.json_object import read_json_object
from microscale.models.presets import PRESETS, ModelConfig, preset

ModelWeights = CheckpointWeights | DummyWeights | Gemma4Checkpoint | DummyGemma4
AnyModel = GptOss | Gemma4


class LoadFormat(StrEnum):
    """Where weights come from."""

    AUTO = "auto"
    SAFETENSORS = "safetensors"
    DUMMY = "dummy"


def read_model_config(folder: Path, overrides: Mapping[str, object] | None = None) -> ModelConfig:
    """The config in ``folder``, with ``overrides`` applied to its keys."""
    return read_gemma4(folder, overrides) if _is_gemma4(folder) else read_config(folder, overrides).config


def open_weights(
    model: str,
    *,
    load_format: LoadFormat | str = LoadFormat.AUTO,
    overrides: Mapping[str, object] | None = None,
    offline: bool = False,
    seed: int = 0,
) -> ModelWeights:
    """The weights of ``model``: a folder, a hub id, or with ``dummy`` the name of a preset.

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
        return dummy_weights(preset(model, overrides), seed)
    folder = hub.resolve(model, offline=offline, config_only=load_format == LoadFormat.DUMMY)
    if load_format == LoadFormat.DUMMY:
        return dummy_weights(read_model_config(folder, overrides), seed)
    return open_gemma4(folder, overrides) if _is_gemma4(folder) else open_gpt_oss(folder, overrides)


def build_model(
    weights: ModelWeights, ops: Ops, device: torch.device, page_size: int, on_layer: Callable[[], None]
) -> AnyModel:
    """The model of these weights, loaded. ``on_layer`` hears each layer as it is ready."""
    if isinstance(weights, Gemma4Checkpoint | DummyGemma4):
        return Gemma4(weights, ops, device, page_size, on_layer)
    return GptOss(weights, ops, device, page_size, on_layer)


def _is_gemma4(folder: Path) -> bool:
    """A folder that cannot be read is gpt-oss's to complain of."""
    if not (folder / CONFIG).is_file():
        return False
    return read_json_object(folder / CONFIG).data.get("model_type") in MODEL_TYPES


def dummy_weights(config: ModelConfig, seed: int = 0) -> ModelWeights:
    """Random weights of the right shapes; on ``meta`` the shapes alone."""
    return DummyWeights(config, seed) if isinstance(config, GptOssConfig) else DummyGemma4(config, seed)
