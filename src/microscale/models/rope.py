"""Rotary positions that families share: plain and YaRN, as records, from a config.json, and as tables."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from microscale.errors import BadConfig, Unsupported
from microscale.models.config import MAX_NUMBER, build, check_positive
from microscale.models.json_object import JsonObject
from microscale.planning.ops import RopeTable

_YARN_KEYS = frozenset({
    "rope_type", "type", "factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "truncate",
    "rope_theta",
})  # fmt: skip


@dataclass(frozen=True)
class PlainRope:
    """Pair i of a head turns by ``theta ** (-2 i / head_dim)`` a position."""

    theta: float

    def __post_init__(self) -> None:
        if not 1 < self.theta <= MAX_NUMBER:
            raise BadConfig(f"rope theta {self.theta} must be above 1.")


@dataclass(frozen=True)
class YarnRope:
    """YaRN: dimensions that turn often within ``original_context`` keep their frequency, slow ones are stretched."""

    theta: float
    factor: float
    beta_fast: float
    """Dimensions with at least this many turns keep their frequency."""
    beta_slow: float
    """Dimensions with at most this many turns are stretched by ``factor``; in between is a linear ramp."""
    original_context: int
    truncate: bool
    """Whether the ends of the ramp are rounded outwards to whole dimensions (gpt-oss: no)."""

    def __post_init__(self) -> None:
        check_positive(self, "original_context", "beta_fast", "beta_slow")
        if not 1 < self.theta <= MAX_NUMBER or not 1 <= self.factor <= MAX_NUMBER:
            raise BadConfig(f"rope theta {self.theta} must be above 1 and factor {self.factor} at least 1.")
        if self.beta_slow >= self.beta_fast:
            raise BadConfig(f"rope beta_slow {self.beta_slow} must be below beta_fast {self.beta_fast}.")


Rope = PlainRope | YarnRope


def plain_table(rope: PlainRope, head_dim: int, device: torch.device) -> RopeTable:
    index = torch.arange(0, head_dim, 2, dtype=torch.float32, device=computing_on(device))
    return RopeTable((1.0 / rope.theta ** (index / head_dim)).to(device), 1.0)


def yarn_table(rope: YarnRope, head_dim: int, device: torch.device) -> RopeTable:
    """YaRN: high frequencies stay, low ones are divided by ``factor``, those between are blended.

    A dimension turns ``original_context / wavelength`` times over the original context; ``beta_fast`` turns or more
    count as high, ``beta_slow`` or fewer as low. Cosine and sine grow by ``0.1 ln(factor) + 1``.
    """

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    index = torch.arange(0, head_dim, 2, dtype=torch.float32, device=computing_on(device))
    plain = 1.0 / rope.theta ** (index / head_dim)
    # 0 where the frequency stays, 1 where it is divided; 0.001 keeps a ramp of no width from dividing by zero.
    ramp = ((index / 2 - low) / max(high - low, 0.001)).clamp(0, 1)
    blended = plain * (1 - ramp) + plain / rope.factor * ramp
    return RopeTable(blended.to(device), 0.1 * math.log(rope.factor) + 1.0)


def computing_on(device: torch.device) -> torch.device:
    """Where a table is computed: on its device, and for ``meta`` on the CPU. For its first product there torch would
    import its compiler, 800 modules."""
    return torch.device("cpu") if device.type == "meta" else device


def rope_table(rope: Rope, head_dim: int, device: torch.device) -> RopeTable:
    """The frequencies of either kind."""
    return plain_table(rope, head_dim, device) if isinstance(rope, PlainRope) else yarn_table(rope, head_dim, device)


def rope_keys(file: JsonObject) -> frozenset[str]:
    """The keys under which this config.json has its rope, for overrides."""
    new = file.data.get("rope_parameters") is not None
    return frozenset({"rope_parameters"} if new else {"rope_scaling", "rope_theta"})


def find_rope(file: JsonObject) -> tuple[str, JsonObject] | None:
    """``rope_type`` and the object that has it: transformers 5 calls it ``rope_parameters``, published files
    ``rope_scaling``. ``None`` where the file has neither, which is plain rope."""
    present = [key for key in ("rope_scaling", "rope_parameters") if file.data.get(key) is not None]
    if len(present) == 2:
        raise BadConfig(f"{file.source} has both 'rope_scaling' and 'rope_parameters'; only one can be meant.")
    if not present:
        return None
    rope = file.nested(present[0])
    return rope.require("type" if "rope_type" not in rope.data and "type" in rope.data else "rope_type", str), rope


def read_plain(file: JsonObject, rope: JsonObject | None) -> PlainRope:
    """``rope``: the result of ``find_rope``; the theta may be in it or next to it."""
    if rope is not None:
        _refuse_others(rope, frozenset({"rope_type", "type", "rope_theta"}))
    return build(file, PlainRope, _theta(file, rope))


def read_yarn(file: JsonObject, rope: JsonObject) -> YarnRope:
    _refuse_others(rope, _YARN_KEYS)
    return build(
        file,
        YarnRope,
        theta=_theta(file, rope),
        factor=rope.require("factor", float),
        beta_fast=rope.optional("beta_fast", float, 32.0),
        beta_slow=rope.optional("beta_slow", float, 1.0),
        original_context=rope.require("original_max_position_embeddings", int),
        # transformers' default when the key is absent; gpt-oss's published files say false.
        truncate=rope.optional("truncate", bool, True),
    )


def _theta(file: JsonObject, rope: JsonObject | None) -> float:
    return (rope if rope is not None and "rope_theta" in rope.data else file).require("rope_theta", float)


def _refuse_others(rope: JsonObject, known: frozenset[str]) -> None:
    for key, value in rope.data.items():
        # mscale, attention_factor and the like change the arithmetic; null means that they do not.
        if key not in known and value is not None and (key, value) != ("partial_rotary_factor", 1.0):
            raise Unsupported(f"{rope.source}: {key!r} is not supported; it would change the frequencies.")


def to_json(rope: Rope) -> dict[str, object]:
    """The published keys of either kind."""
    if isinstance(rope, PlainRope):
        return {"rope_scaling": None, "rope_theta": rope.theta}
    return {
        "rope_scaling": {
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_context,
            "rope_type": "yarn",
            "truncate": rope.truncate,
        },
        "rope_theta": rope.theta,
    }
