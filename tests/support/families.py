"""Presets, weights and models with their own family's types: a test that names a model knows its family."""

from __future__ import annotations

from typing import Any

from microscale.engine.config import EngineConfig
from microscale.models.families import PRESETS, open_weights
from microscale.models.gemma4.config import Gemma4Config
from microscale.models.gemma4.dummy_weights import DummyGemma4
from microscale.models.gemma4.weights import Gemma4Checkpoint
from microscale.models.gpt_oss.config import GptOssConfig
from microscale.models.gpt_oss.dummy_weights import DummyWeights
from microscale.models.gpt_oss.model import GptOss
from microscale.models.gpt_oss.weights import CheckpointWeights
from support.loading import load_model


def gpt_oss_preset(name: str) -> GptOssConfig:
    config = PRESETS[name]
    assert isinstance(config, GptOssConfig)
    return config


def gemma4_preset(name: str) -> Gemma4Config:
    config = PRESETS[name]
    assert isinstance(config, Gemma4Config)
    return config


def gpt_oss_weights(model: str, **options: Any) -> CheckpointWeights | DummyWeights:
    weights = open_weights(model, **options)
    assert isinstance(weights, CheckpointWeights | DummyWeights)
    return weights


def gemma4_weights(model: str, **options: Any) -> Gemma4Checkpoint | DummyGemma4:
    weights = open_weights(model, **options)
    assert isinstance(weights, Gemma4Checkpoint | DummyGemma4)
    return weights


def load_gpt_oss(options: EngineConfig) -> GptOss:
    model = load_model(options)
    assert isinstance(model, GptOss)
    return model
