"""Compiles kernels and loads them to the GPU in a thread while its owner does something else, such as read the weights;
counts the kernels that were left for later."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget

from microscale.kernels.compiling.cache import use_cache
from microscale.kernels.compiling.job import CompileJob, missing, run_job, shared_missing
from microscale.kernels.compiling.source import hash_compiler
from microscale.kernels.launch import Kernel, Launch

log = logging.getLogger(__name__)
POLL_S = 0.1


class Warming:
    """``start`` it, do the other work, then ``finish``: what could be made ready is ready.

    A kernel that cannot be compiled is logged by name and left to the launch that needs it, if one ever does. So are
    all others where warming itself fails: a server then starts as slowly as without it, and answers.
    """

    def __init__(
        self,
        record: Callable[[], Mapping[Kernel, Launch]],
        target: GPUTarget,
        folder: Path | None,
        num_workers: int,
        *,
        is_guest: bool = False,
    ) -> None:
        """``record`` gives the launches to make ready. It is called in the thread, whose device is then the target.
        ``is_guest``: in somebody else's process, whose Triton stays as it is set up."""
        self.done = 0
        self.total = 0
        """Kernels that the cache did not have."""
        self.loaded = 0
        self.failed: dict[Kernel | None, str] = {}
        """What is not ready, and why; ``None``: what all launches share."""
        self._record = record
        self._target = target
        self._folder = Path(knobs.cache.dir) if is_guest else use_cache(folder)
        self._num_workers = num_workers
        self._seconds: dict[str, float] = {}
        """What each part took."""
        self._thread = threading.Thread(target=self._run, name="warming", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """Wait for the rest. ``on_progress`` is called now and then, and finds ``done`` and ``total`` changed."""
        while self._thread.is_alive():
            self._thread.join(POLL_S)
            on_progress()
        for kernel, reason in self.failed.items():
            log.warning("%s is not ready: %s", kernel.label if kernel else "What all launches share", reason)
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in self._seconds.items())
        log.info(
            "%d kernels are ready, %d of them compiled now, after %.2f s: %s.",
            self.loaded, self.done, sum(self._seconds.values()), parts,
        )  # fmt: skip

    def _run(self) -> None:
        try:
            self._warm()
        except Exception:
            log.exception("Kernels could not be made ready ahead; each is compiled when it is first launched.")

    def _warm(self) -> None:
        with self._timed("listed"):
            # Hashing leaves the interpreter free.
            hashing = threading.Thread(target=self._hash, name="hashing", daemon=True)
            hashing.start()
            launches = self._record()
        with self._timed("looked up"):
            hashing.join()
            lacking = missing(launches, self._target)
            lacks_shared = shared_missing()
        if lacking or lacks_shared:
            with self._timed("compiled"):
                self._compile(lacking)
        with self._timed("loaded"):
            self._load({kernel: launch for kernel, launch in launches.items() if kernel not in self.failed})

    def _hash(self) -> None:
        with suppress(Exception):  # the look-up hashes again, and raises
            hash_compiler(self._target)

    def _compile(self, lacking: list[Kernel]) -> None:
        self.total = len(lacking)
        for result in run_job(CompileJob(lacking, self._target, self._folder, self._num_workers)):
            self.done += result.kernel is not None
            if result.error is not None:
                self.failed[result.kernel] = result.error

    def _load(self, launches: Mapping[Kernel, Launch]) -> None:
        for kernel, error in zip(launches, load_kernels(launches.values()), strict=True):
            if error is None:
                self.loaded += 1
            else:
                self.failed[kernel] = error

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[part] = time.monotonic() - began


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

        def listener(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
            if before is not None:
                before(src=src, metadata=metadata, metadata_group=metadata_group, times=times, cache_hit=cache_hit)
            self._count(src.name, times, is_hit=cache_hit)

        knobs.compilation.listener = listener

    @staticmethod
    def announce(report: Callable[[], None]) -> None:
        """Call ``report`` before each of them."""

        def hook(**kernel: Any) -> None:
            report()

        knobs.runtime.jit_cache_hook = hook

    def _count(self, name: str, times: Any, *, is_hit: bool) -> None:
        if is_hit:
            self.loaded += 1
            log.warning("The kernel %s was not loaded when the engine was ready.", name)
        else:
            self.compiled += 1
            log.warning("The kernel %s was compiled in %.1f s after the engine was ready.", name, times.total / 1e6)
