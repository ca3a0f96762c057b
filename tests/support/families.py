"""Presets, weights and models with their own family's types: a test that names a model knows its family."""

from __future__ import annotations

from typing import Any, cast

from microscale.engine.config import EngineConfig
from microscale.models.dummy_weights import RandomTensors, TensorMaker
from microscale.models.families import PRESETS, open_weights
from microscale.models.gemma4.config import Gemma4Config
from microscale.models.gemma4.weights import Gemma4Layer
from microscale.models.gpt_oss.config import GptOssConfig
from microscale.models.gpt_oss.model import GptOss
from microscale.models.gpt_oss.weights import GptOssLayer, tensor_table
from microscale.models.weights import DummyWeights, Weights
from support.loading import load_model


def gpt_oss_preset(name: str) -> GptOssConfig:
    config = PRESETS[name]
    assert isinstance(config, GptOssConfig)
    return config


def gemma4_preset(name: str) -> Gemma4Config:
    config = PRESETS[name]
    assert isinstance(config, Gemma4Config)
    return config


def gpt_oss_weights(model: str, **options: Any) -> Weights[GptOssConfig, GptOssLayer]:
    weights = open_weights(model, **options)
    assert isinstance(weights.config, GptOssConfig)
    return cast("Weights[GptOssConfig, GptOssLayer]", weights)


def dummy_gpt_oss(config: GptOssConfig, make: TensorMaker | None = None) -> DummyWeights[GptOssConfig, GptOssLayer]:
    return DummyWeights(config, tensor_table(config), make or RandomTensors())


def gemma4_weights(model: str, **options: Any) -> Weights[Gemma4Config, Gemma4Layer]:
    weights = open_weights(model, **options)
    assert isinstance(weights.config, Gemma4Config)
    return cast("Weights[Gemma4Config, Gemma4Layer]", weights)


def load_gpt_oss(options: EngineConfig) -> GptOss:
    model = load_model(options)
    assert isinstance(model, GptOss)
    return model
