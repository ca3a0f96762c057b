"""How much the model thinks, and what the client sees of it."""

from __future__ import annotations

import base64
import binascii
from typing import Literal

from microscale.server.anthropic.request import CountRequest

Effort = Literal["low", "medium", "high"]
Display = Literal["shown", "omitted", "hidden"]
EFFORTS: dict[str, Effort] = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
LOW_BUDGET = 4096
"""A thinking budget below this means low effort."""
HIGH_BUDGET = 16384
"""A thinking budget from this on means high effort."""
CARRIED = "reasoning."
"""A signature with this prefix carries the block's text."""


def effort_of(request: CountRequest) -> Effort | None:
    """See the table in this package's docstring."""
    thinking, config = request.thinking, request.output_config
    if thinking is not None and thinking.type == "disabled":
        return "low"
    if config is not None and config.effort is not None:
        return EFFORTS[config.effort]
    if thinking is None or thinking.type != "enabled" or thinking.budget_tokens is None:
        return None
    budget = thinking.budget_tokens
    return "low" if budget < LOW_BUDGET else "medium" if budget < HIGH_BUDGET else "high"


def display_of(request: CountRequest) -> Display:
    """What the client sees of the reasoning."""
    thinking = request.thinking
    if thinking is None or thinking.type == "disabled":
        return "hidden"
    return "omitted" if thinking.display == "omitted" else "shown"


def carrying(reasoning: str) -> str:
    """A signature that carries a text that the client does not see."""
    return CARRIED + base64.urlsafe_b64encode(reasoning.encode()).decode()


def carried(signature: str | None) -> str:
    if signature is None or not signature.startswith(CARRIED):
        return ""
    try:
        return base64.urlsafe_b64decode(signature.removeprefix(CARRIED)).decode()
    except (binascii.Error, ValueError):
        return ""  # not ours
