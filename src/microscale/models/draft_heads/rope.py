"""Rotary positions of draft heads: those of the families, and Llama 3's, which heads made from Llama layers have."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from microscale.backends.ops import RopeTable
from microscale.errors import BadConfig, Unsupported
from microscale.models.config import build, check_positive
from microscale.models.json_object import JsonObject
from microscale.models.rope import (
    PlainRope,
    Rope,
    computing_on,
    find_rope,
    plain_table,
    read_plain,
    read_yarn,
    rope_table,
)

if TYPE_CHECKING:
    import torch

THETA = 10000.0
"""What Llama's and Qwen3's config formats define where a file has no ``rope_theta``."""


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones stay, those between are blended."""

    theta: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __post_init__(self) -> None:
        PlainRope(self.theta)
        for name in ("factor", "low_freq_factor", "original_context"):
            check_positive(self, name)
        if self.low_freq_factor >= self.high_freq_factor:
            raise BadConfig(f"low_freq_factor {self.low_freq_factor} is not below {self.high_freq_factor}.")


HeadRope = Rope | Llama3Rope


def head_rope_table(rope: HeadRope, head_dim: int, device: torch.device) -> RopeTable:
    return llama3_table(rope, head_dim, device) if isinstance(rope, Llama3Rope) else rope_table(rope, head_dim, device)


def llama3_table(rope: Llama3Rope, head_dim: int, device: torch.device) -> RopeTable:
    """A pair turns ``original_context / wavelength`` times over the original context: up to ``low_freq_factor`` turns
    it is stretched, from ``high_freq_factor`` on it stays."""
    plain = plain_table(PlainRope(rope.theta), head_dim, computing_on(device)).inverse_frequencies
    turns = rope.original_context * plain / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return RopeTable((plain * kept + plain / rope.factor * (1 - kept)).to(device), 1.0)


def read_head_rope(file: JsonObject) -> HeadRope:
    file = replace(file, data={"rope_theta": THETA, **file.data})
    found = find_rope(file)
    if found is None or found[0] == "default":
        return read_plain(file, None if found is None else found[1])
    kind, rope = found
    if kind == "yarn":
        return read_yarn(file, rope)
    if kind != "llama3":
        raise Unsupported(f"{rope.source}: rope type {kind!r} is not supported; supported are default, yarn, llama3.")
    return build(
        file,
        Llama3Rope,
        theta=(rope if "rope_theta" in rope.data else file).require("rope_theta", float),
        factor=rope.require("factor", float),
        low_freq_factor=rope.require("low_freq_factor", float),
        high_freq_factor=rope.require("high_freq_factor", float),
        original_context=rope.require("original_max_position_embeddings", int),
    )
