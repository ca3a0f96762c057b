"""Which graph is captured next, and when: so that no step waits long for a capture.

A capture takes the host about as long as a step without a graph, tens of milliseconds. Here it is done in parts of
some layers each (``Capturer.parts``):

    at start        the common keys, in order, as long as the start may last
    between steps   parts of one capture, as many as fit into ``max_delay_s``
    when idle       part after part, until there is work

Keys that steps ran without a graph come first, those that ran most often before the others, then the common ones. The
memory of all graphs stays within a budget, the one that ``explain`` reckons with (``Memory.graphs``). How long a part
takes and how much memory a graph takes is learned from those before it. ``docs/lab/start.md`` has the reasons.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Protocol

log = logging.getLogger(__name__)
MAX_DELAY_S = 0.020
REMEMBERED = 8
"""Parts by which the next one is judged: by the slowest of them."""


class Capturer(Protocol):
    """What captures."""

    def parts(self, key: Hashable) -> Iterator[None]:
        """Capture the graph of a key, a part with each step of the iteration. After the last one the graph is in use."""

    def used_bytes(self) -> int:
        """Device memory of all graphs so far."""


class GraphQueue:
    """Captures of one engine, in one thread."""

    def __init__(
        self,
        capturer: Capturer,
        budget_bytes: int,
        max_delay_s: float = MAX_DELAY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capturer = capturer
        self._budget_bytes = budget_bytes
        self._max_delay_s = max_delay_s
        self._clock = clock
        self._common: dict[Hashable, None] = {}
        self._wanted: Counter[Hashable] = Counter()
        """Steps that ran without the graph of a key."""
        self._settled: set[Hashable] = set()
        """Keys that have their graph, or cannot have one."""
        self._current: tuple[Hashable, Iterator[None]] | None = None
        self._part_s: deque[float] = deque(maxlen=REMEMBERED)
        self._graph_s = 0.0
        self._graph_bytes = 0
        """Of the largest so far."""
        self._grown = 0
        """By how much the current capture has grown the memory."""
        self._full = False

    @property
    def has_work(self) -> bool:
        return self._current is not None or (not self._full and self._next() is not None)

    def add(self, keys: Iterable[Hashable]) -> None:
        """Keys that are common: to be captured though nobody asked."""
        self._common.update(dict.fromkeys(keys))

    def ran_without(self, key: Hashable) -> None:
        """A step of this key ran and had no graph."""
        if key not in self._settled:
            self._wanted[key] += 1

    def at_start(self, within_s: float) -> int:
        """Capture whole graphs until the next might end too late. How many there are now."""
        end, count = self._clock() + within_s, 0
        while self.has_work and self._clock() + self._graph_s <= end:
            began = self._clock()
            while not self._advance():
                pass
            self._graph_s = max(self._graph_s, self._clock() - began)
            count += 1
        return count

    def between_steps(self) -> None:
        """Capture as many parts as the next step may be delayed by. One that is expected to take longer waits until
        nobody does."""
        end = self._clock() + self._max_delay_s
        while self.has_work and self._clock() + self._expected_s() <= end:
            self._advance()

    def when_idle(self, is_wanted: Callable[[], bool]) -> None:
        """Capture until somebody wants a step, or nothing is left. ``is_wanted`` is asked before each part."""
        while self.has_work and not is_wanted():
            self._advance()

    def _expected_s(self) -> float:
        """How long the next part may take; before the first nobody knows, and it is tried."""
        return max(self._part_s, default=0.0)

    def _next(self) -> Hashable | None:
        wanted = [key for key, _ in self._wanted.most_common() if key not in self._settled]
        common = (key for key in self._common if key not in self._settled)
        return wanted[0] if wanted else next(common, None)

    def _advance(self) -> bool:
        """One part of the current capture, or of the next. Whether that capture is over, or there was none to begin."""
        if self._current is None and not self._begin():
            return True
        assert self._current is not None
        key, parts = self._current
        began, before = self._clock(), self._capturer.used_bytes()
        try:
            next(parts)
            is_over = False
        except StopIteration:
            is_over = True
        except Exception:  # the driver and the allocator raise every kind; steps of this key run as they are
            log.exception("The graph of %s cannot be captured; its steps run without one.", key)
            is_over = True
        self._part_s.append(self._clock() - began)
        self._grown += self._capturer.used_bytes() - before
        if is_over:
            self._graph_bytes = max(self._graph_bytes, self._grown)
            self._settled.add(key)
            self._current = None
        return is_over

    def _begin(self) -> bool:
        """Begin the next capture, if its memory fits."""
        key = self._next()
        if key is None:
            return False
        used = self._capturer.used_bytes()
        if used + self._graph_bytes > self._budget_bytes:
            self._full = True
            log.info(
                "Graphs take %.0f of %.0f MB that they may: no more are captured, other sizes run without.",
                used / 1e6,
                self._budget_bytes / 1e6,
            )
            return False
        self._grown = 0
        self._current = key, self._capturer.parts(key)
        return True
