"""The machines that share a model. Nothing here imports torch: the command line reads it first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Nodes:
    """Machines that share a model, as rank 0 sees them. Each has as many ranks as the others."""

    count: int
    address: str
    """Of rank 0's machine, at which it listens."""
    port: int
    secret_file: str
