"""Paged attention in Triton: its cases under the interpreter, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from microscale import hardware
from microscale.kernels.attention.paged import PagedAttention
from microscale.kernels.attention.spec import AttentionSpec
from microscale.kernels.op import Activations
from support.interpreter import run_cases, thirds_and_all


@pytest.mark.slow
@thirds_and_all
def test_under_the_interpreter(which: str) -> None:
    run_cases("cases_attention.py", which, beside=__file__)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"activations": Activations.FLOAT32}, "float32"),
        ({"head_dim": 48}, "48"),
        ({"num_heads": 34, "num_kv_heads": 2}, "34 over 2"),
        ({"page_size": 24}, "24"),
    ],
)
def test_refusals(change: dict[str, Any], word: str) -> None:
    usual = AttentionSpec(64, 8, 64, None, True, 16, Activations.BF16, tokens=1, context=64)
    spec = replace(usual, **change)
    assert word in (PagedAttention().supports(spec, hardware.known("rtx5090")) or "")
    assert "CPU" in (PagedAttention().supports(spec, hardware.cpu()) or "")
