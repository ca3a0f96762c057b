"""Takes compiled kernels from the cache to the GPU before their first launch, and counts those that come later."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from triton import knobs

from microscale.kernels.launch import Launch

log = logging.getLogger(__name__)


def load_kernels(launches: Iterable[Launch]) -> Iterator[str | None]:
    """Make each launch ready on the current device: module loaded, launcher built. Gives for each why that failed.

    What the cache does not have is compiled here and now.
    """
    for launch in launches:
        error = None
        try:
            launch.load()
        except Exception as raised:  # the compiler and the driver raise every kind; the launch would raise it again
            error = f"{type(raised).__name__}: {raised}"
        yield error


class LateKernels:
    """Kernels that were neither compiled nor loaded when the engine was ready: each made somebody wait."""

    def __init__(self) -> None:
        self.compiled = 0
        self.loaded = 0
        """From the cache: milliseconds, where compiling takes seconds."""

    def watch(self) -> None:
        """From now on. Triton calls whatever listens when a launch does not find its kernel in this process."""
        before = knobs.compilation.listener

        def hear(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
            if before is not None:
                before(src=src, metadata=metadata, metadata_group=metadata_group, times=times, cache_hit=cache_hit)
            self._hear(src.name, times, is_hit=cache_hit)

        knobs.compilation.listener = hear

    def _hear(self, name: str, times: Any, *, is_hit: bool) -> None:
        if is_hit:
            self.loaded += 1
            log.warning("The kernel %s was not loaded when the engine was ready.", name)
        else:
            self.compiled += 1
            log.warning("The kernel %s was compiled in %.1f s after the engine was ready.", name, times.total / 1e6)
