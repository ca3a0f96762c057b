"""The record of a model family: all that the program must know to load and run its models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch

from microscale.backends.ops import Ops

Config = TypeVar("Config")
Weights = TypeVar("Weights")
Model = TypeVar("Model")
Overrides = Mapping[str, object]
"""Of keys of a config.json, as published."""


@dataclass(frozen=True)
class Family(Generic[Config, Weights, Model]):
    """One family: architectures that one model file computes."""

    model_types: tuple[str, ...]
    """What ``model_type`` is in a config.json of it."""
    config: type[Config]
    presets: Mapping[str, Config]
    """Known shapes, for models without a checkpoint and for plans made ahead."""
    preset: Callable[[str, Config, Overrides], Config]
    """A preset by its name, with overrides."""
    read: Callable[[Path, Overrides], Config]
    """The config of a checkpoint's folder, with overrides."""
    open: Callable[[Path, Overrides], Weights]
    """A checkpoint, checked against its own config in full."""
    dummy: Callable[[Config, int], Weights]
    """Random weights of a config, by a seed."""
    build: Callable[[Weights, Ops, torch.device, int, Callable[[], None]], Model]
    """The model of these weights, on a device, with pages of this size. Hears each layer as it is ready."""
