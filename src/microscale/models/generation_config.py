"""The sampling defaults in a checkpoint's ``generation_config.json``. Its end tokens are read with the config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from microscale.models.config import GENERATION_CONFIG
from microscale.models.json_object import read_json_object

NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")


def read_sampling(folder: Path) -> dict[str, Any]:
    """The keys that vLLM uses too. Other keys belong to transformers' own search, such as ``do_sample``."""
    file = read_json_object(folder / GENERATION_CONFIG)
    found: dict[str, Any] = {name: file.require(name, float) for name in NUMBERS if file.data.get(name) is not None}
    if file.data.get("top_k") is not None:
        found["top_k"] = file.require("top_k", int)
    return found
