"""What the options that choose number formats take. Needs no torch, so that a wrong value is refused immediately."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from microscale.errors import BadSetting

AUTO = "auto"
"""``--precision auto``, which ``engine/loading/precisions.py`` replaces by one of the others."""
PRECISION_NAMES = ("exact", "balanced", "fast", AUTO)
LAYERS = ("qkv", "o", "lm_head", "embed", "mlp", "experts")
LAYER_FORMATS = ("bf16", "fp8", "mxfp4", "mxfp8", "nvfp4")
MOE_ACTIVATIONS = ("auto", "bf16", "mxfp8", "nvfp4")
KV_CACHE_DTYPES = ("auto", "bf16", "fp8")


def parse_layer_formats(texts: Iterable[str]) -> dict[str, str]:
    """``--layer-format``: layer → format."""
    chosen: dict[str, str] = {}
    for text in texts:
        layer, equals, fmt = text.partition("=")
        if not equals:
            raise BadSetting(f"--layer-format {text!r} is not LAYER=FORMAT, such as lm_head=mxfp8.")
        one_of(f"--layer-format {text}: the layer", layer, LAYERS)
        one_of(f"--layer-format {text}: the format", fmt, LAYER_FORMATS)
        if chosen.get(layer, fmt) != fmt:
            raise BadSetting(f"--layer-format gives {layer} both {chosen[layer]} and {fmt}; give it once.")
        chosen[layer] = fmt
    return chosen


def one_of(option: str, value: str, known: Sequence[str]) -> str:
    """The value of an option, or an error with the nearest one that it takes."""
    if value not in known:
        near = difflib.get_close_matches(value, known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise BadSetting(f"{option} {value!r} is unknown; known are {', '.join(known)}{hint}")
    return value
