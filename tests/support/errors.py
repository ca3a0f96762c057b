"""The two error norms of kernel tests, and tolerances that follow from number formats.

``worst``: the largest absolute error over the RMS of the reference; it finds one wrong element. ``rms``: the RMS of the
error over the RMS of the reference; it finds a small error everywhere. NaN passes neither.

A number format with m explicit mantissa bits rounds to within ``2**-(m + 1)`` of a value, and on average (uniform error
in a uniform mantissa) by ``2**-m / sqrt(12) / 1.44`` relative: ``step`` and ``rms_step`` below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MANTISSA_BITS = {"float32": 23, "bf16": 7, "e4m3": 3}


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


ROUNDINGS = 12
"""Answers of one decoder layer that are rounded to the activations' type: norms, projections, rotated heads, attention,
gate, experts, sums. The model with the most norms has so many."""


def model_noise(layers: int, fmt: str = "bf16") -> float:
    """The RMS error of a model's logits, over their RMS, where every answer is rounded to ``fmt``: errors that know
    nothing of each other add up as squares."""
    return math.sqrt(ROUNDINGS * layers) * rms_step(fmt)
