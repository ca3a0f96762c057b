"""How long the parts of a load took, for one line of the log."""

from __future__ import annotations

import time


class Laps:
    """Seconds from one call to the next."""

    def __init__(self) -> None:
        self._parts: dict[str, float] = {}
        self._last = time.perf_counter()

    def __call__(self, part: str) -> None:
        """This part is over, and the next begins."""
        now = time.perf_counter()
        self._parts[part] = now - self._last
        self._last = now

    def __str__(self) -> str:
        return ", ".join(f"{part} {seconds:.2f} s" for part, seconds in self._parts.items())
