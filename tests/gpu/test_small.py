"""The small kernels' cases on a real GPU."""

from __future__ import annotations

import pytest

from kernels.cases_small import (  # noqa: F401
    test_add_norm_route,
    test_add_rms_norm,
    test_add_rms_norm_mxfp8,
    test_add_rms_norm_of_no_parts,
    test_add_rms_norm_of_parts,
    test_gated,
    test_heads_normed_shared_and_in_fp8,
    test_norm_add_norm,
    test_norm_add_norm_of_nothing,
    test_norm_add_norm_route,
    test_rms_norm,
    test_rms_norm_of_nothing_and_of_zeros,
    test_rms_norm_without_a_weight,
    test_rope_and_write_kv,
    test_rope_far_out,
    test_route_with_scales,
    test_ties_and_nan_behind_a_sum,
)

pytestmark = pytest.mark.odd_shapes
