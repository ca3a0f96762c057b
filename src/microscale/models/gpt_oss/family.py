"""gpt-oss as a ``Family``."""

from __future__ import annotations

from microscale.models.family import Family
from microscale.models.gpt_oss.config import GptOssConfig
from microscale.models.gpt_oss.config_file import MODEL_TYPE, read_config
from microscale.models.gpt_oss.dummy_weights import DummyWeights
from microscale.models.gpt_oss.model import GptOss
from microscale.models.gpt_oss.presets import PRESETS, preset
from microscale.models.gpt_oss.weights import CheckpointWeights, open_gpt_oss, published

GPT_OSS: Family[GptOssConfig, CheckpointWeights | DummyWeights, GptOss] = Family(
    model_types=(MODEL_TYPE,),
    config=GptOssConfig,
    presets=PRESETS,
    preset=preset,
    read=lambda folder, overrides: read_config(folder, overrides).config,
    open=open_gpt_oss,
    dummy=DummyWeights,
    build=GptOss,
    published=published,
)
