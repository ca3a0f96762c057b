"""The error norms and bounds of the package's kernel cases, under the name that the tests use; and a whole model's."""

import math

from microscale.prove.cases.errors import Errors, assert_close, errors, rms_step, step

ROUNDINGS = 12
"""Answers of one decoder layer that are rounded to the activations' type: norms, projections, rotated heads, attention,
gate, experts, sums. The model with the most norms has so many."""


def model_noise(layers: int, fmt: str = "bf16") -> float:
    """The RMS error of a model's logits, over their RMS, where every answer is rounded to ``fmt``: errors that know
    nothing of each other add up as squares."""
    return math.sqrt(ROUNDINGS * layers) * rms_step(fmt)


__all__ = ["Errors", "assert_close", "errors", "model_noise", "rms_step", "step"]
