"""One rank's part of a model alone on a GPU (``bench --one-rank-of``), with sums that wait as over a ``--link``.

The wait is a kernel that spins, in the stream and in CUDA graphs, where a sum would be. What it takes beyond its spin
is measured first and taken off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from microscale.backends.ranks import Absent
from microscale.bench.timing import graph_us
from microscale.errors import BadSetting

if TYPE_CHECKING:
    from torch import Tensor

    from microscale.hardware.links import Link

FEW, MANY = 10_000, 1_000_000
SPINS = 20
"""Of one graph, while they are measured."""


@dataclass(frozen=True)
class Spin:
    """How long a spin of so many cycles takes: ``fixed_us`` and the cycles."""

    fixed_us: float
    cycles_a_us: float

    @classmethod
    def between(cls, few_us: float, many_us: float) -> Spin:
        """From the times of ``FEW`` and of ``MANY`` cycles."""
        cycles = (MANY - FEW) / (many_us - few_us)
        return cls(few_us - FEW / cycles, cycles)

    @classmethod
    def measured(cls) -> Spin:
        """Several in one graph, as sums are: a graph of one waits for the host to launch the next."""

        def one_us(cycles: int) -> float:
            return graph_us(lambda: [torch.cuda._sleep(cycles) for _ in range(SPINS)]) / SPINS

        return cls.between(one_us(FEW), one_us(MANY))

    def cycles(self, us: float) -> int:
        """For a launch that takes so long in all."""
        return max(1, round((us - self.fixed_us) * self.cycles_a_us))


class AbsentOverLink(Absent):
    """Others that are not there, and a link to them: what comes out means nothing, how long it takes does."""

    def __init__(self, world: int, link: Link, spin: Spin) -> None:
        super().__init__(world)
        self._link, self._spin = link, spin

    def sum(self, part: Tensor) -> Tensor:
        us = self._link.wait(part.numel() * part.element_size(), self.world).us
        torch.cuda._sleep(self._spin.cycles(us))
        return part


def absent(world: int, link: Link | None, on_gpu: bool) -> Absent:
    """The others of ``world`` ranks, for the one that runs here."""
    if link is None:
        return Absent(world)
    if not on_gpu:
        raise BadSetting("--link waits on a GPU, and this runs on the CPU; leave it out.")
    return AbsentOverLink(world, link, Spin.measured())
