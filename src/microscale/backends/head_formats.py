"""What may be asked of a draft head's weights. ``precision`` imports torch, and options are read without it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadFormats:
    """In which formats a draft head's weights are held; ``None``: as its checkpoint has them."""

    quantization: str | None = None
    """All dense layers, where their shapes fit the format."""
    lm_head: str | None = None
    """Its own lm_head alone."""


OWN_FORMATS = HeadFormats()
