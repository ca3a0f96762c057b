"""The threads of several blocks that run at once: which thread and block each lane is, and how messages name it."""

from __future__ import annotations

import numpy as np

from ptxproof.interpreter.numbers import Array


class Threads:
    """A lane is one thread. Lanes of one block are next to each other."""

    def __init__(self, num_blocks: int, per_block: int) -> None:
        self.num_blocks = num_blocks
        self.per_block = per_block
        self.num = per_block * num_blocks
        self.thread = np.tile(np.arange(per_block, dtype=np.uint32), num_blocks)  # by lane: its number in the block
        self.block: Array = np.repeat(np.arange(num_blocks), per_block)  # by lane
        self.where = ""
        """The instruction that runs, for messages."""

    def name(self, lane: int) -> str:
        return f"thread {int(self.thread[lane])} of block {int(self.block[lane])}"
