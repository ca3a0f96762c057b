"""A spin takes as long as a link's sum, in a graph."""

from __future__ import annotations

import pytest
import torch

from microscale.bench.absent_ranks import AbsentOverLink, Spin
from microscale.bench.timing import graph_us
from microscale.hardware.links import LINKS


@pytest.mark.parametrize("rows", [1, 64, 2048])
def test_a_sum_takes_what_the_link_says(rows: int) -> None:
    ranks = AbsentOverLink(2, LINKS["roce200"], Spin.measured())
    part = torch.ones(rows, 2880, dtype=torch.bfloat16, device="cuda")
    expected = LINKS["roce200"].wait(part.numel() * 2).us
    assert graph_us(lambda: [ranks.sum(part) for _ in range(20)]) / 20 == pytest.approx(expected, rel=0.1)
