"""The choices that are compared: plans, single layers' formats, KV cache, activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from microscale.errors import BadSetting
from microscale.planning.precision import PRECISIONS, Precision, make_precision

LAYERS = ("qkv", "o", "lm_head", "embed")
"""Layers of gpt-oss that are not in four bits already."""
FORMATS = ("fp8", "mxfp8", "mxfp4")
REFERENCE = "float32"


@dataclass(frozen=True)
class PrecisionChoice:
    """One way to hold and compute a model."""

    name: str
    precision: Precision
    dtype: str = "auto"
    """Activations; ``auto`` is float32 on a CPU, so that a plan's weights alone are seen there."""


def all_choices() -> list[PrecisionChoice]:
    """Float32 first: it is what the others are held against."""
    return [
        PrecisionChoice(REFERENCE, make_precision("exact"), "float32"),
        *(PrecisionChoice(name, make_precision(name)) for name in PRECISIONS),
        PrecisionChoice("activations=bfloat16", make_precision("exact"), "bfloat16"),
        PrecisionChoice("moe-activations=mxfp8", make_precision("exact", moe_activations="mxfp8")),
        PrecisionChoice("kv-cache=fp8", make_precision("exact", kv_cache_dtype="fp8")),
        *(
            PrecisionChoice(f"{layer}={fmt}", make_precision("exact", (f"{layer}={fmt}",)))
            for layer in LAYERS
            for fmt in FORMATS
        ),
    ]


def choose(names: Sequence[str]) -> list[PrecisionChoice]:
    """Those of these names, float32 always among them; all without names."""
    known = {choice.name: choice for choice in all_choices()}
    for name in names:
        if name not in known:
            raise BadSetting(f"Unknown choice {name!r}; known are {', '.join(known)}.")
    return [choice for name, choice in known.items() if not names or name in names or name == REFERENCE]
