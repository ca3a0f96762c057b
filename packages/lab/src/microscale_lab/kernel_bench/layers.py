"""The layers that benchmarks time: those of presets, as the models themselves bind them."""

from __future__ import annotations

from functools import cache
from typing import TypeVar

from microscale.models.families import PRESETS
from microscale.models.outline import outline
from microscale.planning.ops import Activations, Use

PAGE_SIZE = 16
SpecT = TypeVar("SpecT")


def layer_spec(model: str, layer: str, kind: type[SpecT]) -> SpecT:
    """The spec of one layer of a preset, for one token in bf16."""
    spec = next(use.spec for use in _uses(model) if use.layer == layer)
    assert isinstance(spec, kind), f"{layer} of {model} is {spec}"
    return spec


@cache
def _uses(model: str) -> tuple[Use, ...]:
    config = PRESETS[model]
    return outline(model, config, Activations.BF16, PAGE_SIZE, config.max_context).uses
