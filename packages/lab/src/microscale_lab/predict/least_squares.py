"""Small least squares without a library: a few parameters, a few dozen rows, milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import mul

STEP = 1e-4
TURNS = 60
SLOWEST, FASTEST = 5.0, 0.3
"""How the damping grows after a step that did not help, and shrinks after one that did."""


def solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """``x`` with ``matrix x = right``, by elimination with pivots."""
    size = len(right)
    rows = [[*line, value] for line, value in zip(matrix, right, strict=True)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda line: abs(rows[line][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for line in range(column + 1, size):
            factor = rows[line][column] / rows[column][column]
            if factor:
                rows[line] = [a - factor * b for a, b in zip(rows[line], rows[column], strict=True)]
    found = [0.0] * size
    for line in reversed(range(size)):
        known = sum(rows[line][other] * found[other] for other in range(line + 1, size))
        found[line] = (rows[line][size] - known) / rows[line][line]
    return found


def factor(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    """The lower triangle ``L`` of a symmetric positive matrix with ``L L^T = matrix``, line by line (Cholesky): for
    many right sides, each of which then takes a step less."""
    lower: list[list[float]] = []
    for size, line in enumerate(matrix):
        made: list[float] = []
        for column in range(size):
            above = lower[column]
            made.append((line[column] - _dot(made, above)) / above[column])
        made.append((line[size] - _dot(made, made)) ** 0.5)
        lower.append(made)
    return lower


def solve_factored(lower: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """``x`` with ``L L^T x = right``."""
    found: list[float] = []
    for line, value in zip(lower, right, strict=True):
        found.append((value - _dot(found, line)) / line[-1])
    for size in reversed(range(len(found))):
        line = lower[size]
        found[size] /= line[-1]
        value = found[size]
        found[:size] = [known - value * entry for known, entry in zip(found[:size], line[:-1], strict=True)]
    return found


def minimise(residuals: Callable[[Sequence[float]], list[float]], start: Sequence[float]) -> list[float]:
    """The point with the least sum of squares, by damped Gauss-Newton steps of at most 1 in each direction."""
    point, damping = list(start), 1e-2
    now = residuals(point)
    cost = sum(value * value for value in now)
    for _ in range(TURNS):
        slopes = []
        for index in range(len(point)):
            moved = [value + STEP * (place == index) for place, value in enumerate(point)]
            slopes.append([(after - before) / STEP for after, before in zip(residuals(moved), now, strict=True)])
        normal = [[_dot(a, b) + damping * (i == j) for j, b in enumerate(slopes)] for i, a in enumerate(slopes)]
        move = solve(normal, [-_dot(slope, now) for slope in slopes])
        tried = [value + max(-1.0, min(1.0, change)) for value, change in zip(point, move, strict=True)]
        after = residuals(tried)
        lower = sum(value * value for value in after)
        if lower < cost:
            done = cost - lower < 1e-7 * cost
            point, now, cost, damping = tried, after, lower, damping * FASTEST
            if done:
                break
        else:
            damping *= SLOWEST
    return point


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    """Of as many numbers as the shorter has. Half of the time of ``explain``'s predictions went here."""
    total: float = sum(map(mul, a, b))
    return total
