"""How long the parts of a start took, as the server's process sees them."""

from __future__ import annotations

import time
from collections.abc import Callable


class StartClock:
    """Cuts the time of a start where the engine tells of it.

    engine: its process, its imports, the plan │ load: what has a progress bar, weights and kernels │ rest: graphs …
    """

    def __init__(self, on_progress: Callable[[int, int], None]) -> None:
        """``on_progress`` hears the engine's progress through ``heard``."""
        self._on_progress = on_progress
        self._began = time.perf_counter()
        self._loading: tuple[float, float] | None = None
        """When progress was first told, and last."""

    def heard(self, done: int, total: int) -> None:
        now = time.perf_counter()
        self._loading = (now if self._loading is None else self._loading[0], now)
        self._on_progress(done, total)

    def parts(self) -> dict[str, float]:
        """Seconds of each part until now, when the engine is ready."""
        now = time.perf_counter()
        first, last = self._loading or (now, now)
        return {"engine": first - self._began, "load": last - first, "rest": now - last}
