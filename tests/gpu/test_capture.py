"""Implementations that say they can be captured, in CUDA graphs."""

from __future__ import annotations

import pytest

from kernels.test_capture import (  # noqa: F401
    test_attention,
    test_dense,
    test_embeddings,
    test_moe,
    test_small,
)

pytestmark = pytest.mark.odd_shapes
