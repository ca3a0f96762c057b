"""How sums travel between ranks. Nothing here imports torch."""

from __future__ import annotations

from enum import StrEnum


class Transport(StrEnum):
    """Which library carries the sums."""

    GLOO = "gloo"
    NCCL = "nccl"
