"""The small kernels' cases on a real GPU."""

from __future__ import annotations

from kernels.cases_small import (  # noqa: F401
    test_rms_norm,
    test_rms_norm_of_nothing_and_of_zeros,
    test_rope_and_write_kv,
    test_rope_far_out,
)
