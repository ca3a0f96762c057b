"""A model from its options, in one go."""

from __future__ import annotations

from microscale.engine.config import EngineConfig
from microscale.engine.loading.load import load
from microscale.engine.loading.prepare import prepare
from microscale.models.families import AnyModel


def load_model(options: EngineConfig) -> AnyModel:
    return load(prepare(options))
