"""The way of a token through the server stays short. Bounds for a machine that does other things too.

The figures of a quiet one are printed by ``make cost``; what is promised is a third of the time, and 10,000 tok/s.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.server_cost import many_streams, one_stream

pytestmark = pytest.mark.slow
MOST_US = 300
LEAST_TOKENS_PER_S = 3_000


def test_one_stream(tmp_path: Path) -> None:
    best = one_stream(tmp_path / "log", rounds=6, num_tokens=300)[0]
    assert best.us_per_token < MOST_US


def test_64_streams(tmp_path: Path) -> None:
    assert many_streams(tmp_path / "log", num_tokens=300).tokens_per_s > LEAST_TOKENS_PER_S
