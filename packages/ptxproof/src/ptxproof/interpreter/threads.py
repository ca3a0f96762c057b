"""The threads of several blocks that run at once: which thread and block each lane is, and how messages name it."""

from __future__ import annotations

import numpy as np

from ptxproof.interpreter.numbers import Array


class Threads:
    """A lane is one thread. Lanes of one block are next to each other."""

    def __init__(self, num_blocks: int, per_block: int, first_block: int = 0) -> None:
        self.num_blocks = num_blocks
        self.first_block = first_block
        """Its number in the launch."""
        self.per_block = per_block
        self.num = per_block * num_blocks
        self.thread = np.tile(np.arange(per_block, dtype=np.uint32), num_blocks)  # by lane: its number in the block
        self.block: Array = np.repeat(np.arange(num_blocks), per_block)  # by lane
        self.waited = np.zeros(self.num, np.bool_)
        """Lanes that come after a wait for the launches before."""
        self._early, self._late = (np.zeros(num_blocks, np.bool_) for _ in range(2))
        """Blocks that let the next launch begin before, and after, they had waited."""
        self.where = ""
        """The instruction that runs, for messages."""

    def meet(self, active: Array | None) -> None:
        """Of each block these lanes come after all that each of them has waited for."""
        everyone = np.ones(self.num, np.bool_) if active is None else active
        some: Array = np.any((self.waited & everyone).reshape(self.num_blocks, -1), axis=1)
        self.waited |= everyone & some[self.block]

    def release(self, active: Array | None) -> None:
        """These lanes let the next launch begin. The first of a block counts."""
        everyone = np.ones(self.num, np.bool_) if active is None else active
        shape = (self.num_blocks, -1)
        asked: Array = np.any(everyone.reshape(shape), axis=1)
        early: Array = np.any((everyone & ~self.waited).reshape(shape), axis=1)
        self._early |= asked & early & ~self._late
        self._late |= asked & ~self._early

    def released_late(self) -> bool:
        """Whether some block let the next launch begin after it had waited itself, at the latest by its end."""
        waited: Array = np.all(self.waited.reshape(self.num_blocks, -1), axis=1)
        return bool((self._late | (waited & ~self._early)).any())

    def name(self, lane: int) -> str:
        return f"thread {int(self.thread[lane])} of block {self.first_block + int(self.block[lane])}"
