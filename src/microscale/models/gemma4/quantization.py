"""Which of a Gemma 4 checkpoint's layers are in MXFP8: what nvidia-modelopt wrote down when it exported them.

``quantization_config`` in config.json, or hf_quant_config.json beside it, names the algorithm and the modules that were
left out, as patterns: ``lm_head``, ``model.layers.0.router*``. Without either the checkpoint is plain BF16.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from microscale.errors import Unsupported
from microscale.models.gemma4.config import LayerFormats
from microscale.models.json_object import JsonObject, read_json_object

HF_QUANT_CONFIG = "hf_quant_config.json"
METHOD = "modelopt"
ALGORITHM = "MXFP8"
PREFIXES = ("model.language_model.", "language_model.model.", "model.")
"""What may stand before a tensor's name: of the model that also sees and hears, now and formerly, and of text alone."""

PARTS: dict[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    # Experts are one module with many weights; expert 0 stands for all.
    "experts": ("experts.0.gate_proj", "experts.0.up_proj", "experts.0.down_proj"),
}
"""The modules of each field of ``LayerFormats``: they are held as one tensor."""


def read_formats(folder: Path, config: JsonObject, num_layers: int) -> tuple[LayerFormats, ...]:
    """The formats of each layer's weights in ``folder``."""
    left_out = _left_out(folder, config)
    if left_out is None:
        return (LayerFormats.all("bf16"),) * num_layers
    modules = Modules(left_out)
    for layer in range(num_layers):
        if modules.quantised(f"layers.{layer}.router.proj"):
            raise Unsupported(f"{folder}: the router of layer {layer} is in {ALGORITHM}; supported is a BF16 router.")
    return tuple(
        LayerFormats(**{part: _format(folder, modules, layer, names) for part, names in PARTS.items()})
        for layer in range(num_layers)
    )


class Modules:
    """Answers whether a module was quantised."""

    def __init__(self, left_out: Sequence[str]) -> None:
        patterns = {_without_prefix(pattern) for pattern in left_out}
        # A pattern without a star names a module and all that is in it.
        self._plain = {pattern for pattern in patterns if "*" not in pattern}
        self._starred = re.compile("|".join(_expression(p) for p in sorted(patterns - self._plain)) or r"(?!)")

    def quantised(self, module: str) -> bool:
        """``module`` as ``layers.0.mlp.down_proj``, without what stands before the layers."""
        parts = module.split(".")
        inside = any(".".join(parts[:n]) in self._plain for n in range(1, len(parts) + 1))
        return not inside and self._starred.fullmatch(module) is None


def _expression(pattern: str) -> str:
    return ".*".join(re.escape(piece) for piece in pattern.split("*"))


def _left_out(folder: Path, config: JsonObject) -> list[str] | None:
    """The patterns of modules that were not quantised; ``None`` where nothing was."""
    if config.data.get("quantization_config") is not None:
        found = config.nested("quantization_config")
        method = found.require("quant_method", str)
        if method != METHOD:
            raise Unsupported(f"{found.source}: 'quant_method' {method!r} is not supported; supported is {METHOD!r}.")
        key = "ignore" if "ignore" in found.data else "exclude_modules"
    elif (folder / HF_QUANT_CONFIG).is_file():
        found = read_json_object(folder / HF_QUANT_CONFIG).nested("quantization")
        key = "exclude_modules"
    else:
        return None
    algorithm = found.require("quant_algo", str)
    if algorithm != ALGORITHM:
        raise Unsupported(f"{found.source}: 'quant_algo' {algorithm!r} is not supported; supported is {ALGORITHM!r}.")
    if found.data.get("kv_cache_quant_algo") is not None:
        raise Unsupported(
            f"{found.source}: 'kv_cache_quant_algo' {found.data['kv_cache_quant_algo']!r} is not supported; "
            f"--kv-cache-dtype chooses the cache's format here."
        )
    patterns = found.optional(key, list, [])
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise found.fault(key, "must be a list of module names")
    return [pattern for pattern in patterns if isinstance(pattern, str)]


def _without_prefix(pattern: str) -> str:
    prefix = next((prefix for prefix in PREFIXES if pattern.startswith(prefix)), "")
    return pattern.removeprefix(prefix)


def _format(folder: Path, modules: Modules, layer: int, names: Sequence[str]) -> str:
    quantised = [modules.quantised(f"layers.{layer}.{name}") for name in names]
    if any(quantised) != all(quantised):
        apart = ", ".join(name for name, is_in in zip(names, quantised, strict=True) if not is_in)
        raise Unsupported(
            f"{folder}: layer {layer} has {apart} in BF16 and the rest of {', '.join(names)} in {ALGORITHM}; they are "
            f"held as one tensor, so leave out all of them or none."
        )
    return ALGORITHM.lower() if all(quantised) else "bf16"
