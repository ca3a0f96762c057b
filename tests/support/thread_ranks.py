"""Ranks of a model as threads of this process: what each computes is real, and so is the order in which they add up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")


class ThreadRank:
    """One of them. All meet at a barrier, and each adds up what all have brought, in the order of the ranks."""

    def __init__(self, rank: int, brought: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.world = len(brought)
        self._rank = rank
        self._brought = brought
        self._barrier = barrier
        self.sums = 0

    def _meet(self, part: Tensor) -> list[Tensor]:
        self._brought[self._rank] = part.clone()
        self._barrier.wait()
        found = [tensor for tensor in self._brought if tensor is not None]
        self._barrier.wait()
        return found

    def sum(self, part: Tensor) -> Tensor:
        self.sums += 1
        total, *others = (brought.float() for brought in self._meet(part))
        for other in others:
            total = total + other
        return total.to(part.dtype)

    uncapturable = None


def run_ranks(world: int, work: Callable[[ThreadRank, int], T]) -> list[T]:
    """What ``work`` gives on each rank."""
    brought: list[Tensor | None] = [None] * world
    barrier = threading.Barrier(world)
    found: list[T | BaseException | None] = [None] * world

    def run(rank: int) -> None:
        try:
            found[rank] = work(ThreadRank(rank, brought, barrier), rank)
        except BaseException as error:
            found[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in found:
        if isinstance(error, BaseException) and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return found  # type: ignore[return-value]
