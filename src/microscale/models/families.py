"""The model families, and the one place that lists them. A model's family is known by a preset's name, by
``model_type`` in its config.json, or by its config's type. Published checkpoints are in ``known_checkpoints``, chat
formats in ``text/formats``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from microscale.errors import BadCheckpoint, BadSetting, Unsupported
from microscale.models import hub
from microscale.models.config import LoadFormat, ModelConfig, read_config_file
from microscale.models.decoder import Decoder
from microscale.models.draft_heads.config import MtpConfig
from microscale.models.draft_heads.drafting import DraftHead, TargetEnds
from microscale.models.draft_heads.weights import HeadWeights
from microscale.models.dummy_weights import RandomTensors, TensorMaker
from microscale.models.gemma4 import config as gemma4
from microscale.models.gemma4 import config_file as gemma4_file
from microscale.models.gemma4 import weights as gemma4_weights
from microscale.models.gemma4.model import Gemma4
from microscale.models.gpt_oss import config as gpt_oss
from microscale.models.gpt_oss import weights as gpt_oss_weights
from microscale.models.gpt_oss.model import GptOss
from microscale.models.known_checkpoints import PUBLISHED, preset_of, refuse_architecture
from microscale.models.qwen3_5 import config as qwen3_5
from microscale.models.qwen3_5 import weights as qwen3_5_weights
from microscale.models.qwen3_5.model import Qwen35
from microscale.models.qwen3_5.mtp import Mtp
from microscale.models.qwen3_5.mtp_weights import DummyMtp, mtp_config, open_mtp
from microscale.models.qwen3_moe import config as qwen3_moe
from microscale.models.qwen3_moe import weights as qwen3_moe_weights
from microscale.models.qwen3_moe.model import Qwen3Moe
from microscale.models.tensor_table import TensorTable
from microscale.models.weights import CheckpointWeights, DummyWeights, Weights
from microscale.parallel.sharding import WHOLE, Shard
from microscale.planning.ops import Ops

if TYPE_CHECKING:
    import torch

Config = TypeVar("Config", bound=ModelConfig)
Layer = TypeVar("Layer")
Overrides = Mapping[str, object]
"""New values of keys of a published config.json."""
ModelWeights: TypeAlias = "Weights[ModelConfig, Any]"
"""Opened weights of any family."""


AnyModel: TypeAlias = "Decoder[Any]"
"""A bound model of any family."""


@dataclass(frozen=True)
class MtpFamily(Generic[Config]):
    """How a family's MTP layers are read and built."""

    config: Callable[[Config, Collection[str] | None], MtpConfig]
    """Of a target whose checkpoint has tensors of these names; ``None`` where they are not known."""
    dummy: Callable[[MtpConfig, TensorMaker], HeadWeights]
    open: Callable[[Path, Config, Shard], HeadWeights]
    """One rank's part of it from the folder of a target, whose config is that of all ranks."""
    bind: Callable[[HeadWeights, Ops, torch.device, int, TargetEnds], DraftHead]


@dataclass(frozen=True)
class ModelFamily(Generic[Config, Layer]):
    """One family: architectures that one model file computes."""

    model_types: tuple[str, ...]
    """The values of ``model_type`` in its config.json."""
    config: type[Config]
    presets: Mapping[str, Config]
    """Known shapes, for models without a checkpoint and for plans made in advance."""
    preset: Callable[[str, Config, Overrides], Config]
    """A preset by its name, with overrides."""
    read: Callable[[Path, Overrides], Config]
    """The config of a checkpoint's folder, with overrides."""
    table: Callable[[Config], TensorTable[Layer]]
    """The tensors of a model."""
    open: Callable[[Path, Overrides, Shard], CheckpointWeights[Config, Layer]]
    """One rank's part of a checkpoint, which is checked against its own config in full."""
    build: Callable[[Weights[Config, Layer], Ops, torch.device, int, Callable[[], None]], AnyModel]
    """The model of these weights, on a device, with pages of this size. Calls back after each layer."""
    mtp: MtpFamily[Config] | None = None


GPT_OSS = ModelFamily(
    model_types=(gpt_oss.MODEL_TYPE,),
    config=gpt_oss.GptOssConfig,
    presets=gpt_oss.PRESETS,
    preset=gpt_oss.preset,
    read=lambda folder, overrides: gpt_oss.read_config(folder, overrides).config,
    table=gpt_oss_weights.tensor_table,
    open=gpt_oss_weights.open_gpt_oss,
    build=GptOss,
)
GEMMA4 = ModelFamily(
    model_types=gemma4_file.MODEL_TYPES,
    config=gemma4.Gemma4Config,
    presets=gemma4.PRESETS,
    preset=gemma4_file.preset,
    read=gemma4_file.read_config,
    table=gemma4_weights.tensor_table,
    open=gemma4_weights.open_gemma4,
    build=Gemma4,
)
QWEN3_MOE = ModelFamily(
    model_types=(qwen3_moe.MODEL_TYPE,),
    config=qwen3_moe.Qwen3MoeConfig,
    presets=qwen3_moe.PRESETS,
    preset=qwen3_moe.preset,
    read=qwen3_moe.read_config,
    table=qwen3_moe_weights.tensor_table,
    open=qwen3_moe_weights.open_qwen3_moe,
    build=Qwen3Moe,
)
QWEN3_5 = ModelFamily(
    model_types=qwen3_5.MODEL_TYPES,
    config=qwen3_5.Qwen35Config,
    presets=qwen3_5.PRESETS,
    preset=qwen3_5.preset,
    read=qwen3_5.read_config,
    table=qwen3_5_weights.tensor_table,
    open=qwen3_5_weights.open_qwen3_5,
    build=Qwen35,
    mtp=MtpFamily(mtp_config, DummyMtp, open_mtp, Mtp),
)
FAMILIES: tuple[ModelFamily[Any, Any], ...] = (GPT_OSS, GEMMA4, QWEN3_MOE, QWEN3_5)
"""The first reads files without a ``model_type``."""
PRESETS: Mapping[str, ModelConfig] = {name: config for family in FAMILIES for name, config in family.presets.items()}
"""Known architectures, for models without a checkpoint (``--load-format dummy``) and for plans made in advance."""


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
    config = find_config(model, load_format, overrides, offline)
    if load_format == LoadFormat.DUMMY:
        return dummy_weights(config.sharded(shard), seed)
    folder = hub.resolve(model, offline=offline)
    return _family_in(folder).open(folder, overrides, shard)


def find_config(
    model: str, load_format: LoadFormat | str, overrides: Mapping[str, object], offline: bool
) -> ModelConfig:
    """The config of ``model``. No weights are fetched for it, and nothing for a preset with dummy weights."""
    if load_format not in list(LoadFormat):
        raise BadSetting(f"Unknown load format {load_format!r}; known are {', '.join(LoadFormat)}.")
    # A folder takes precedence, so that one with a preset's name can be opened.
    if not Path(model).is_dir():
        name = model if model in PRESETS else preset_of(model)
        if name is not None and load_format == LoadFormat.DUMMY:
            return preset(name, overrides)
        if name is not None and name not in PUBLISHED:
            raise BadCheckpoint(f"{model} is a preset without a published checkpoint: add --load-format dummy.")
    return read_model_config(hub.resolve(model, offline=offline, config_only=True), overrides)


def build_model(
    weights: ModelWeights, ops: Ops, device: torch.device, page_size: int, on_layer: Callable[[], None]
) -> AnyModel:
    """The model of these weights, loaded. ``on_layer`` is called after each layer."""
    return _family_of(weights.config).build(weights, ops, device, page_size, on_layer)


def _family_in(folder: Path) -> ModelFamily[Any, Any]:
    file = read_config_file(folder)
    model_type = file.data.get("model_type")
    family = next((family for family in FAMILIES if model_type in family.model_types), None)
    if family is None and isinstance(model_type, str):
        refuse_architecture(file.source, file.data)
    return FAMILIES[0] if family is None else family


def _family_of(config: ModelConfig) -> ModelFamily[Any, Any]:
    return next(family for family in FAMILIES if isinstance(config, family.config))


def mtp_of(config: ModelConfig) -> MtpFamily[Any]:
    """The MTP functions of a model's family."""
    found = _family_of(config).mtp
    if found is None:
        types = ", ".join(name for family in FAMILIES if family.mtp is not None for name in family.model_types)
        raise Unsupported(
            f"--speculative-config: method mtp is for models with an MTP layer, whose model_type is one of {types}; "
            f"use another method, or start this model without drafts."
        )
    return found


def dummy_weights(config: ModelConfig, seed: int = 0) -> ModelWeights:
    """Random weights of the right shapes."""
    return shape_weights(config, RandomTensors(seed))


def shape_weights(config: ModelConfig, tensors: TensorMaker) -> ModelWeights:
    """Weights that ``tensors`` makes."""
    return DummyWeights(config, _family_of(config).table(config), tensors)


__all__ = [
    "FAMILIES",
    "PRESETS",
    "AnyModel",
    "LoadFormat",
    "ModelConfig",
    "ModelWeights",
    "build_model",
    "dummy_weights",
    "find_config",
    "mtp_of",
    "open_weights",
    "preset",
    "read_model_config",
    "shape_weights",
]
