"""How the owner starts the engine process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """How the process is started, and how long it may be silent."""

    command: tuple[str, ...] = (sys.executable, "-P", "-m", "microscale.engine.process")
    """``-P``: a file of the current directory never stands in for a module."""
    load_timeout_s: float = 1800.0
    silence_s: float = 300.0
    """An engine with work that tells of no step for so long is taken for hung. A first step may compile kernels."""
    on_progress: Callable[[int, int], None] = lambda done, total: None
    """Hears how many layers of all are loaded."""
