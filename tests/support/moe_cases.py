"""The package's expert layers to run kernels on, under the names that the tests use."""

from microscale_lab.cases.errors import check_rounded
from microscale_lab.cases.experts import (
    GELU,
    SILU,
    SWIGLU,
    SWIGLU_HALVES,
    Problem,
    e4m3_by_token,
    make_routing,
    make_tokens,
    make_weights,
    mxfp8,
)
from microscale_lab.cases.experts import LAYERS as CASES
from microscale_lab.cases.experts import Layer as Case

__all__ = [
    "CASES",
    "GELU",
    "SILU",
    "SWIGLU",
    "SWIGLU_HALVES",
    "Case",
    "Problem",
    "check_rounded",
    "e4m3_by_token",
    "make_routing",
    "make_tokens",
    "make_weights",
    "mxfp8",
]
