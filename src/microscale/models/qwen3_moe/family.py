"""Qwen3-MoE as a ``Family``."""

from __future__ import annotations

from microscale.models.family import Family
from microscale.models.qwen3_moe.config import Qwen3MoeConfig
from microscale.models.qwen3_moe.config_file import MODEL_TYPE, preset_qwen3_moe, read_qwen3_moe
from microscale.models.qwen3_moe.dummy_weights import DummyQwen3Moe
from microscale.models.qwen3_moe.model import Qwen3Moe
from microscale.models.qwen3_moe.presets import PRESETS
from microscale.models.qwen3_moe.weights import Qwen3MoeCheckpoint, open_qwen3_moe

QWEN3_MOE: Family[Qwen3MoeConfig, Qwen3MoeCheckpoint | DummyQwen3Moe, Qwen3Moe] = Family(
    model_types=(MODEL_TYPE,),
    config=Qwen3MoeConfig,
    presets=PRESETS,
    preset=preset_qwen3_moe,
    read=read_qwen3_moe,
    open=open_qwen3_moe,
    dummy=DummyQwen3Moe,
    build=Qwen3Moe,
)
