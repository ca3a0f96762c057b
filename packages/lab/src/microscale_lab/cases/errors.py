"""The two error norms of kernel cases, and bounds that follow from number formats.

``worst``: the largest absolute error over the RMS of the reference; it finds one wrong element. ``rms``: the RMS of the
error over the RMS of the reference; it finds a small error everywhere. NaN passes neither.

A number format with m explicit mantissa bits rounds to within ``2**-(m + 1)`` of a value, and on average (uniform error
in a uniform mantissa) by ``2**-m / sqrt(12) / 1.44`` relative: ``step`` and ``rms_step`` below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

MANTISSA_BITS = {"float32": 23, "bf16": 7, "e4m3": 3, "e2m1": 1}


def step(fmt: str) -> float:
    """The largest relative error of rounding to ``fmt``."""
    return 2.0 ** -(MANTISSA_BITS[fmt] + 1)


def rms_step(fmt: str) -> float:
    """The RMS relative error of rounding a spread of values to ``fmt``: half of ``step`` within 20 %."""
    return 2.0 ** -MANTISSA_BITS[fmt] / math.sqrt(12) / 1.44


@dataclass(frozen=True)
class Errors:
    worst: float
    rms: float


def errors(actual: Tensor, expected: Tensor) -> Errors:
    """Both norms of ``actual - expected``, in float64. Tensors without elements have no error."""
    if actual.shape != expected.shape:
        raise AssertionError(f"The shape is {tuple(actual.shape)}, not {tuple(expected.shape)}.")
    if expected.numel() == 0:
        return Errors(0.0, 0.0)
    want = expected.double()
    difference = actual.double().to(want.device) - want
    scale = want.square().mean().sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    return Errors(float(difference.abs().max() / scale), float(difference.square().mean().sqrt() / scale))


def assert_close(actual: Tensor, expected: Tensor, *, worst: float, rms: float) -> None:
    """Both norms within their tolerances; written so that NaN fails."""
    found = errors(actual, expected)
    if not (found.worst <= worst and found.rms <= rms):
        raise AssertionError(
            f"The worst error is {found.worst:.3e} (allowed {worst:.3e}), the RMS error {found.rms:.3e} "
            f"(allowed {rms:.3e}), relative to the reference's RMS."
        )


def spread(expected: Tensor) -> float:
    """The largest element over the RMS: what turns a relative error of that element into ``worst``."""
    if not expected.numel():
        return 1.0
    wide = expected.float()
    return float(wide.abs().max() / wide.square().mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny))


def rounded_bound(expected: Tensor, fmt: str, roundings: int) -> Errors:
    """The most that ``roundings`` roundings to ``fmt`` on the way to ``expected`` may do.

    Each adds at most ``rms_step`` to the RMS error; a single value of the largest magnitude may be off by ``step`` in
    each, and a rounding before a GEMM spreads like a normal error, whose worst of many is five times its RMS.
    """
    worst = roundings * max(step(fmt) * spread(expected), 5 * rms_step(fmt))
    return Errors(worst, roundings * rms_step(fmt))


def check_rounded(actual: Tensor, expected: Tensor, fmt: str, roundings: int) -> None:
    """``actual`` differs from ``expected`` by no more than ``roundings`` roundings to ``fmt`` on the way."""
    bound = rounded_bound(expected, fmt, roundings)
    assert_close(actual, expected, worst=bound.worst, rms=bound.rms)
