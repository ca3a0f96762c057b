"""The bound on the error of a whole model's logits."""

import math

from microscale_lab.cases.errors import rms_step

ROUNDINGS = 15
"""Answers of one decoder layer that are rounded to the activations' type: 2 norms, the projection to heads, q and k
rotated (2), attention's weights, its answer, the projection back, gate and up, their product, down, that times the
router's weight, the sum of the experts, and 2 sums with the residual stream."""
AT_THE_END = 2
"""The last norm, and the logits."""


def model_noise(layers: int, fmt: str = "bf16") -> float:
    """The RMS error of a model's logits, over their RMS, where every answer is rounded to ``fmt``: errors that know
    nothing of each other add up as squares."""
    return math.sqrt(ROUNDINGS * layers + AT_THE_END) * rms_step(fmt)
