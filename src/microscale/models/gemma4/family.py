"""Gemma 4 as a ``Family``."""

from __future__ import annotations

from microscale.models.family import Family
from microscale.models.gemma4.config import Gemma4Config
from microscale.models.gemma4.config_file import MODEL_TYPES, preset_gemma4, read_gemma4
from microscale.models.gemma4.dummy_weights import DummyGemma4
from microscale.models.gemma4.model import Gemma4
from microscale.models.gemma4.presets import PRESETS
from microscale.models.gemma4.weights import Gemma4Checkpoint, open_gemma4

GEMMA4: Family[Gemma4Config, Gemma4Checkpoint | DummyGemma4, Gemma4] = Family(
    model_types=MODEL_TYPES,
    config=Gemma4Config,
    presets=PRESETS,
    preset=preset_gemma4,
    read=read_gemma4,
    open=open_gemma4,
    dummy=DummyGemma4,
    build=Gemma4,
)
