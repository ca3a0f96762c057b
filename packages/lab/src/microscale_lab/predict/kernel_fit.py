"""How long a kernel takes: a fixed time plus rates, fitted to measured rows and carried to other cards.

    us = fixed + cube root of memory**3 + issue**3 + matrix**3
    memory = bytes over the bandwidth that reading reaches, times STREAMED
    issue  = (k * bytes + c * flops) over SMs times clock       kernels that stream weights or keys
           = k * bytes over SMs times clock                      kernels on large tiles
    matrix = flops over the unit's peak, times e                 kernels on large tiles

``fixed`` (launches, ramp, tail) does not shrink with a slower memory, and the rates do not grow with a shorter kernel:
that is why the share of the roofline that an H200 reaches says little about a card with a twentieth of its bandwidth.
One set of parameters belongs to a group: an op, an implementation and one of its paths. On the card that was measured,
what the formula leaves is interpolated between the rows of the group (a Gaussian process over bytes and operations).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from microscale.hardware.cards import Gpu
from microscale.hardware.speeds import peak_tflops
from microscale_lab.predict.rates import STREAMED, issue_rate, reach_of

Vector = npt.NDArray[Any]
LARGE_TILES = 250.0
"""Operations a byte from which on a group is bound by matrix units: a small batch of 64 tokens has up to 230."""
NOISE = 0.015
"""Log deviation of one row measured twice on one machine."""
LEAST_DOUBT = 0.15
"""Log deviation that the formula is given before its rows speak, with the weight of ``DOUBT_ROWS`` rows."""
DOUBT_ROWS = 3
# Parameters before any rows are fitted, and their log deviation: fixed us, k, and c or e.
STREAMING_START, LARGE_START = (4.0, 0.04, 1.2e-3), (8.0, 0.04, 0.6)
START_DOUBT = (0.7, 1.0, 0.7)
# Doublings over which what is left of neighbouring rows is alike: of bytes, and of operations.
DENSE_REACH, REACH = (0.15, 3.0), (1.0, 2.0)


@dataclass(frozen=True)
class KernelWork:
    """What one call moves and computes."""

    bytes: float
    flops: float
    unit: str = "bf16"


@dataclass(frozen=True)
class Timing:
    """A time by its parts, in microseconds. The parts add up to ``us``."""

    fixed: float
    memory: float
    issue: float
    matrix: float
    deviation: float
    """Of the logarithm, as the rows of the group scatter."""

    @property
    def us(self) -> float:
        return self.fixed + self.memory + self.issue + self.matrix

    def scaled(self, factor: float, deviation: float) -> Timing:
        parts = (self.fixed * factor, self.memory * factor, self.issue * factor, self.matrix * factor)
        return Timing(*parts, deviation)


@dataclass(frozen=True)
class FitRow:
    """One measured call on ``gpu``."""

    work: KernelWork
    us: float
    gpu: Gpu

    @property
    def place(self) -> tuple[float, float]:
        return place(self.work)


def place(work: KernelWork) -> tuple[float, float]:
    """The position of a row among others: doublings of bytes and of operations."""
    return math.log2(1 + work.bytes), math.log2(1 + work.flops)


class Rated(NamedTuple):
    """Calls on their cards: what no parameter changes in the formula. Each field is a vector over the calls."""

    bytes: Vector
    flops: Vector
    memory_us: Vector
    issue_rate: Vector
    """Bytes and operations a microsecond."""
    peak_tflops: Vector

    @classmethod
    def of(cls, calls: Sequence[tuple[KernelWork, Gpu]]) -> Rated:
        return cls(*np.array([_rated(work, gpu) for work, gpu in calls]).T)

    def parts(self, parameters: Sequence[float] | Vector, large: bool) -> tuple[Vector, Vector, Vector, Vector]:
        """Fixed time, memory, issue and matrix units. Overlapping rates share the time that they take together, by
        their cubes: of the powers from 1.6 to 6 the one with which most of an H200's kernels, each left out, are
        predicted within 12 %."""
        fixed, k, last = parameters
        zero = np.zeros_like(self.bytes)
        memory = self.memory_us
        issue = (k * self.bytes + (0.0 if large else last * self.flops)) / self.issue_rate
        matrix = self.flops / (self.peak_tflops * last * 1e6) if large else zero
        share = np.maximum(memory**3 + issue**3 + matrix**3, 1e-99) ** (-2 / 3)
        return zero + fixed, memory**3 * share, issue**3 * share, matrix**3 * share

    def us(self, parameters: Sequence[float] | Vector, large: bool) -> Vector:
        fixed, memory, issue, matrix = self.parts(parameters, large)
        return fixed + memory + issue + matrix


def _rated(work: KernelWork, gpu: Gpu) -> tuple[float, ...]:
    memory = work.bytes / (reach_of(gpu).gbs * STREAMED * 1e3)
    return work.bytes, work.flops, memory, issue_rate(gpu) * 1e3, peak_tflops(work.unit, gpu)


def formula(parameters: Sequence[float], large: bool, work: KernelWork, gpu: Gpu) -> Timing:
    """The time of one call, by its parts."""
    fixed, memory, issue, matrix = (float(part[0]) for part in Rated.of([(work, gpu)]).parts(parameters, large))
    return Timing(fixed, memory, issue, matrix, deviation=0.0)


def minimise(residuals: Callable[[Vector], Vector], start: Vector) -> Vector:
    """The point with the least sum of squares, by damped Gauss-Newton steps of at most 1 in each direction."""
    point, damping, step = start.copy(), 1e-2, 1e-4
    now = residuals(point)
    for _ in range(60):
        slopes = np.stack([(residuals(point + step * axis) - now) / step for axis in np.eye(len(point))], 1)
        move = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(point)), -slopes.T @ now)
        moved = point + move.clip(-1, 1)
        after = residuals(moved)
        if after @ after >= now @ now:
            damping *= 5.0
            continue
        done = now @ now - after @ after < 1e-7 * (now @ now)
        point, now, damping = moved, after, 0.3 * damping
        if done:
            break
    return point


@dataclass(frozen=True)
class KernelFit:
    """The fit of one op, implementation and path."""

    rows: tuple[FitRow, ...]
    spans: tuple[float, float]
    """Doublings over which neighbours are alike."""

    @cached_property
    def large(self) -> bool:
        """Bound by matrix units at its largest, or not far from it at its smallest."""
        intensity = [row.work.flops / max(row.work.bytes, 1) for row in self.rows]
        return max(intensity) >= LARGE_TILES or min(intensity) >= LARGE_TILES / 3

    @cached_property
    def _rated(self) -> Rated:
        return Rated.of([(row.work, row.gpu) for row in self.rows])

    @cached_property
    def parameters(self) -> tuple[float, ...]:
        large, us = self.large, np.log([row.us for row in self.rows])
        start = np.log(LARGE_START if large else STREAMING_START)

        def residuals(point: Vector) -> Vector:
            # Rows count by two deviations of their noise: a formula of three numbers is no closer than that.
            errors = (us - np.log(self._rated.us(np.exp(point), large))) / (2 * NOISE)
            return np.concatenate([errors, (point - start) / START_DOUBT])

        return tuple(map(float, np.exp(minimise(residuals, start))))

    @cached_property
    def left(self) -> Vector:
        """What the formula leaves of each row, as a logarithm."""
        return np.log([row.us for row in self.rows]) - np.log(self._rated.us(self.parameters, self.large))

    @cached_property
    def deviation(self) -> float:
        """Of what the formula leaves, with the doubt that few rows deserve."""
        own = self.left @ self.left + DOUBT_ROWS * LEAST_DOUBT**2
        return math.sqrt(own / (len(self.rows) + DOUBT_ROWS))

    def _covariance(self, a: Vector, b: Vector) -> Vector:
        """``[a, b]``, from places ``[a, 2]`` and ``[b, 2]``."""
        far = (((a[:, None] - b[None]) / self.spans) ** 2).sum(-1)
        covariance: Vector = self.deviation**2 * np.exp(-far / 2)
        return covariance

    @cached_property
    def _places(self) -> Vector:
        return np.array([row.place for row in self.rows])

    @cached_property
    def _table(self) -> Vector:
        return self._covariance(self._places, self._places) + NOISE**2 * np.eye(len(self.rows))

    def here(self, work: KernelWork, gpu: Gpu) -> Timing:
        """The time on the card that was measured: the formula, corrected by the rows near this work."""
        near = self._covariance(np.array([place(work)]), self._places)[0]
        weights = np.linalg.solve(self._table, near)
        variance = max(self.deviation**2 - float(weights @ near), 0.0) + NOISE**2
        factor = math.exp(float(weights @ self.left))
        return formula(self.parameters, self.large, work, gpu).scaled(factor, math.sqrt(variance))

    def elsewhere(self, work: KernelWork, gpu: Gpu) -> Timing:
        """The time on another card: the formula with that card's rates."""
        return formula(self.parameters, self.large, work, gpu).scaled(1.0, self.deviation)


Key = tuple[str, str, str]
"""Op, implementation and path."""


def make_groups(rows: Mapping[Key, Sequence[FitRow]]) -> dict[Key, KernelFit]:
    return {key: KernelFit(tuple(found), DENSE_REACH if key[0] == "dense" else REACH) for key, found in rows.items()}


@dataclass(frozen=True)
class LeftOut:
    """One row, and what the others say of it."""

    key: Key
    row: FitRow
    timing: Timing

    @property
    def error(self) -> float:
        """As a logarithm: positive where the prediction is too long."""
        return math.log(self.timing.us / self.row.us)


def leave_one_out(rows: Mapping[Key, Sequence[FitRow]], step: Callable[[], object] = lambda: None) -> list[LeftOut]:
    """Every row predicted from the other rows of its group; groups of one row have nothing to say."""
    found = []
    for key, group in rows.items():
        for index, row in enumerate(group):
            others = [*group[:index], *group[index + 1 :]]
            if others:
                rest = make_groups({key: others})[key]
                found.append(LeftOut(key, row, rest.here(row.work, row.gpu)))
            step()
    return found
