"""The cable between two network namespaces, as a process: packets go from one TUN device to the other, late, and some
not at all. ``python -m support.link_forwarder FD FD DELAY_MS LOSE_EVERY REPORT``.

SIGUSR1 cuts it: from then on nothing arrives, and nobody is told. At its end (SIGTERM) it writes what it did to REPORT.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

PACKET = 65536
TURN_S = 0.2


@dataclass
class Direction:
    """One way. Packets keep their order."""

    delay_s: float
    lose_every: int
    """One packet in so many is lost, always the same ones; 0: none."""
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)
    seen: int = 0
    lost: int = 0
    arrived: int = 0
    least_delay_s: float = float("inf")
    is_cut: bool = False

    def take(self, packet: bytes, now: float) -> None:
        self.seen += 1
        if self.is_cut or (self.lose_every and self.seen % self.lose_every == self.lose_every // 2):
            self.lost += 1
        else:
            self.waiting.append((now, packet))

    def deliver(self, now: float, write: Callable[[bytes], object]) -> None:
        """What is due."""
        while self.waiting and now - self.waiting[0][0] >= self.delay_s:
            came, packet = self.waiting.popleft()
            if self.is_cut:
                self.lost += 1
                continue
            write(packet)
            self.arrived += 1
            self.least_delay_s = min(self.least_delay_s, now - came)

    def due_s(self, now: float) -> float:
        """Until the next one is."""
        return max(0.0, self.waiting[0][0] + self.delay_s - now) if self.waiting else TURN_S

    def report(self) -> dict[str, float]:
        least = self.least_delay_s * 1e3 if self.arrived else 0.0
        return {"seen": self.seen, "lost": self.lost, "arrived": self.arrived, "least_delay_ms": least}


def run(files: tuple[int, int], ways: tuple[Direction, Direction], is_over: Callable[[], bool]) -> None:
    """``ways[0]`` leads from the first file to the second, ``ways[1]`` back."""
    poll = select.poll()
    for file in files:
        os.set_blocking(file, False)
        poll.register(file, select.POLLIN)
    while not is_over():
        now = time.monotonic()
        for way, to in zip(ways, reversed(files), strict=True):
            way.deliver(now, lambda packet, to=to: os.write(to, packet))  # type: ignore[misc]
        for file, _ in poll.poll(1e3 * min(way.due_s(time.monotonic()) for way in ways)):
            ways[files.index(file)].take(os.read(file, PACKET), time.monotonic())


def main() -> None:
    first, second, delay_ms, lose_every, report = sys.argv[1:]
    ways = (Direction(float(delay_ms) / 1e3, int(lose_every)), Direction(float(delay_ms) / 1e3, int(lose_every)))
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))

    def cut(number: int, frame: object) -> None:
        for way in ways:
            way.is_cut = True

    signal.signal(signal.SIGUSR1, cut)
    run((int(first), int(second)), ways, lambda: bool(ended))
    Path(report).write_text(json.dumps([way.report() for way in ways]))


if __name__ == "__main__":
    main()
