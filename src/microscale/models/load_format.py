"""Where a model's weights come from, as the command line says it. Without torch: the server's process reads it."""

from __future__ import annotations

from enum import StrEnum


class LoadFormat(StrEnum):
    """Where weights come from."""

    AUTO = "auto"
    SAFETENSORS = "safetensors"
    DUMMY = "dummy"
