"""A rank's own time with its sums, as ``explain`` prints it."""

from __future__ import annotations

import pytest

from microscale.engine.predictions import Basis, Phase, Point
from microscale.explain.report import with_sums
from microscale.hardware.links import CardLink, Wait

LINK = CardLink("x", "x", ((1 << 20, Wait(10.0, 30.0)),), (1.0, 1.0), "a test", "2026-11-17")


def point(kind: Phase, batch: int, context: int, tok_s: float) -> Point:
    us = (batch if kind is Phase.DECODE else context) / tok_s * 1e6
    return Point(kind, batch, context, tok_s, tok_s / 2, tok_s * 2, 1e6, 1e6, Basis.FITTED, us)


def test_a_step_waits_for_each_of_its_sums() -> None:
    """8 tokens in 1 ms, and 50 sums of 20 us."""
    found = with_sums(point(Phase.DECODE, 8, 128, 8000.0), LINK, 2, 50, 5760, 8192)
    assert found.tok_s == pytest.approx(8 / 2e-3)
    assert found.low == pytest.approx(8 / (2e-3 + 50 * 30e-6))
    assert found.high == pytest.approx(8 / (0.5e-3 + 50 * 10e-6))
    told = {"batch": 8, "context": 128, "sum_us": 20.0, "tok_s": 4000.0, "low": 2285.7, "high": 8000.0}
    assert found.to_json() == told


def test_a_long_prompt_has_sums_in_every_step() -> None:
    """40 tokens at 16 a step: three steps, with 2 sums each, of 20 us as all are small."""
    found = with_sums(point(Phase.PREFILL, 1, 40, 40e6), LINK, 2, 2, 100, 16)
    assert 40 / found.tok_s == pytest.approx(1e-6 + 3 * 2 * 20e-6)
    assert found.to_json()["tokens"] == 40
