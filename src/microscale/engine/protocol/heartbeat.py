"""A page of memory in which the engine process shows its owner that it runs, and how long its step may take.

A stopped process or a hung GPU can send no message, so the owner reads the page once a second and compares it with its
own clock. A step writes two numbers: no system call, and nothing to send.

The process counts as hung when it has not run for ``STOPPED_S``, because of a signal or a debugger, or when a step
takes longer than it should. On a GPU that is ten times the prediction of the longest step and at least 5 s, on a CPU
300 s (``predictions.step_limit_s``). Capturing a graph and compiling a kernel have limits of their own
(``process.loop``), and loading has the owner's.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import Self

BEAT_S = 1.0
"""A thread of the engine process shows at this interval that the process runs, also while it loads or computes."""
STOPPED_S = 10.0
"""A process that has not shown it for so long is stopped. Importing or copying may keep its threads waiting."""
SIZE = mmap.PAGESIZE
_BEAT, _BEGAN, _LIMIT = range(3)


class Heartbeat:
    """The page. Times are the machine's monotonic clock in seconds, which all its processes share; 0 is no time."""

    def __init__(self, file: int) -> None:
        self.file = file
        self._words = memoryview(mmap.mmap(file, SIZE)).cast("d")

    @classmethod
    def create(cls) -> Self:
        file = os.memfd_create("microscale-heartbeat")
        os.truncate(file, SIZE)
        return cls(file)

    def close_file(self) -> None:
        """The page stays."""
        os.close(self.file)

    # ---- the engine process ----

    def run(self) -> None:
        """Show for ever that the process runs."""
        while True:
            self._words[_BEAT] = time.monotonic()
            time.sleep(BEAT_S)

    def begin(self, limit_s: float) -> None:
        """From now on the engine is in a step that may take ``limit_s``."""
        self._words[_LIMIT] = limit_s
        self._words[_BEGAN] = time.monotonic()

    def end(self) -> None:
        """The engine is in no step."""
        self._words[_BEGAN] = 0.0

    # ---- the owner ----

    def fault(self) -> str | None:
        """What is wrong with the process now, as the beginning of a sentence."""
        now = time.monotonic()
        beat, began, limit_s = self._words[_BEAT], self._words[_BEGAN], self._words[_LIMIT]
        if beat and now - beat > STOPPED_S:
            return f"The engine process was stopped for {now - beat:.0f} s"
        if began and now - began > limit_s:
            return f"A step of the engine takes longer than {limit_s:.3g} s, which no step should"
        return None
