"""The ranks' store as torch's symmetric memory sees it while memory is mapped."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Store

TURN_S = 0.005
PATIENCE_S = 60.0
"""In which a rank, which was there a moment ago, says what the others wait for."""


class GivenUp(RuntimeError):
    """Another rank cannot go on, so this one need not."""


class Exchange(Store):
    """Two things differ from the store beneath.

    Torch waits minutes for the word of a rank that has failed. Here the wait ends when ``given_up`` says so.

    Torch numbers its exchanges (``CUDASymmetricMemory/7/1``: the eighth, by rank 1) over the life of a process. Rank 0
    may have had other teams before, and the processes of its new one count from 0. Here everybody does.
    """

    def __init__(self, store: Store, given_up: Callable[[], bool]) -> None:
        super().__init__()
        self._store = store
        self._given_up = given_up
        self._first: int | None = None

    def set(self, key: str, value: str) -> None:
        self._store.set(self._renumbered(key), value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(self._renumbered(key))

    def add(self, key: str, value: int) -> int:
        return self._store.add(self._renumbered(key), value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check([self._renumbered(key) for key in keys])

    def has_extended_api(self) -> bool:
        """``multi_get``, which torch 2.13 asks for."""
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not self.check(keys):
            if self._given_up():
                raise GivenUp("another rank cannot go on")
            if time.monotonic() > deadline:
                raise RuntimeError(f"another rank has said nothing for {PATIENCE_S:.0f} s")
            time.sleep(TURN_S)

    def _renumbered(self, key: str) -> str:
        parts = key.split("/")
        at = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
        if at is None:
            return key
        if self._first is None:
            self._first = int(parts[at])
        parts[at] = str(int(parts[at]) - self._first)
        return "/".join(parts)
