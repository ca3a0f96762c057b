"""What sampling must at least read: every logit once."""

from __future__ import annotations

from microscale.kernels.sampling.spec import SamplingSpec

ROW_BYTES = 9 * 4 + 2 * 8
"""Parameters in, and token, log-probability and status out, of one row."""


def logit_bytes(spec: SamplingSpec) -> int:
    """Each logit once, in float32."""
    return 4 * spec.tokens * spec.vocab + spec.tokens * ROW_BYTES


def history_bytes(spec: SamplingSpec) -> int:
    """With penalties: each count once."""
    return 4 * spec.tokens * spec.vocab
