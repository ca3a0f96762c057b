"""Which modules of a checkpoint are quantised, as nvidia-modelopt records it when it exports them.

``quantization_config`` in config.json, or hf_quant_config.json next to it, names the algorithm and the modules that
were left out, as patterns: ``lm_head``, ``model.layers.0.router*``. Without either the checkpoint is plain BF16. A
family knows its modules' names and which of them are held as one tensor, and so must have one format.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from microscale.errors import Unsupported
from microscale.models.json_object import JsonObject, read_json_object

HF_QUANT_CONFIG = "hf_quant_config.json"
METHOD = "modelopt"
ALGORITHM = "MXFP8"


class QuantisedModules:
    """Which modules of one checkpoint are quantised."""

    def __init__(self, folder: Path, left_out: Sequence[str], prefixes: Sequence[str]) -> None:
        """``prefixes``: what may precede the names of layers in a pattern."""
        self._folder = folder
        patterns = {_without_prefix(pattern, prefixes) for pattern in left_out}
        # A pattern without a star names a module and everything in it.
        self._plain = {pattern for pattern in patterns if "*" not in pattern}
        self._starred = re.compile("|".join(_expression(p) for p in sorted(patterns - self._plain)) or r"(?!)")

    def has(self, module: str) -> bool:
        """``module`` as ``layers.0.mlp.down_proj``, without a prefix."""
        parts = module.split(".")
        inside = any(".".join(parts[:n]) in self._plain for n in range(1, len(parts) + 1))
        return not inside and self._starred.fullmatch(module) is None

    def refuse(self, layer_idx: int, name: str, what: str) -> None:
        """Refuse a layer's module that is quantised and must not be."""
        if self.has(f"layers.{layer_idx}.{name}"):
            raise Unsupported(
                f"{self._folder}: the {what} of layer {layer_idx} is in {ALGORITHM}; supported is a BF16 {what}."
            )

    def format(self, layer_idx: int, names: Sequence[str]) -> str:
        """The one format of a layer's modules that are held as one tensor."""
        quantised = [self.has(f"layers.{layer_idx}.{name}") for name in names]
        if any(quantised) != all(quantised):
            bf16 = ", ".join(name for name, is_in in zip(names, quantised, strict=True) if not is_in)
            raise Unsupported(
                f"{self._folder}: layer {layer_idx} has {bf16} in BF16 and the rest of {', '.join(names)} in "
                f"{ALGORITHM}; they are held as one tensor, so leave out all of them or none."
            )
        return ALGORITHM.lower() if all(quantised) else "bf16"


def read_quantised_modules(folder: Path, config: JsonObject, prefixes: Sequence[str]) -> QuantisedModules | None:
    """The quantised modules of the checkpoint in ``folder``; ``None`` where all is BF16."""
    if config.data.get("quantization_config") is not None:
        file = config.nested("quantization_config")
        method = file.require("quant_method", str)
        if method != METHOD:
            raise Unsupported(f"{file.source}: 'quant_method' {method!r} is not supported; supported is {METHOD!r}.")
        key = "ignore" if "ignore" in file.data else "exclude_modules"
    elif (folder / HF_QUANT_CONFIG).is_file():
        file = read_json_object(folder / HF_QUANT_CONFIG).nested("quantization")
        key = "exclude_modules"
    else:
        return None
    algorithm = file.require("quant_algo", str)
    if algorithm != ALGORITHM:
        raise Unsupported(f"{file.source}: 'quant_algo' {algorithm!r} is not supported; supported is {ALGORITHM!r}.")
    if file.data.get("kv_cache_quant_algo") is not None:
        raise Unsupported(
            f"{file.source}: 'kv_cache_quant_algo' {file.data['kv_cache_quant_algo']!r} is not supported; "
            f"--kv-cache-dtype chooses the cache's format here."
        )
    patterns = file.optional(key, list, [])
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise file.fault(key, "must be a list of module names")
    return QuantisedModules(folder, [pattern for pattern in patterns if isinstance(pattern, str)], prefixes)


def _expression(pattern: str) -> str:
    return ".*".join(re.escape(piece) for piece in pattern.split("*"))


def _without_prefix(pattern: str, prefixes: Sequence[str]) -> str:
    prefix = next((prefix for prefix in prefixes if pattern.startswith(prefix)), "")
    return pattern.removeprefix(prefix)
