"""What a sum takes on a link: published times, and what lies between them."""

from __future__ import annotations

from itertools import pairwise

import pytest

from microscale.hardware import known
from microscale.hardware.gpu import cpu
from microscale.hardware.links import FULL_BYTES, LINKS, CardLink, Wait, link_between

LINK = CardLink("x", "x", ((1000, Wait(10.0, 20.0)), (4000, Wait(40.0, 80.0))), (1.0, 2.0), "a test", "2026-11-17")


@pytest.mark.parametrize("name", LINKS)
def test_published_times_are_kept_and_nothing_gets_faster_with_size(name: str) -> None:
    link = LINKS[name]
    for size, wait in link.times:
        found = link.wait(size)
        assert found.low == pytest.approx(wait.low)
        assert found.high == pytest.approx(wait.high)
    times = [link.wait(1 << bits).us for bits in range(30)]
    # NCCL took 30 to 35 us for 8 KB on two DGX Sparks, then 31 to 32 for 16.
    assert all(b >= 0.95 * a for a, b in pairwise(times))
    assert "github.com" in link.source


def test_between_two_sizes_by_logarithms() -> None:
    assert LINK.wait(2000).low == pytest.approx(20.0)
    assert LINK.wait(2000).us == pytest.approx(30.0)
    assert LINK.wait(10).us == LINK.wait(1000).us == 15.0
    assert LINK.wait(2 * FULL_BYTES).low == pytest.approx(2 * FULL_BYTES / 2e3)
    assert LINK.wait(FULL_BYTES * 0.999).us == pytest.approx(LINK.wait(FULL_BYTES).us, rel=0.01)


def test_more_ranks_send_more() -> None:
    assert LINK.wait(2000, world=4).us == LINK.wait(3000).us
    assert LINK.wait(100, world=8).us == LINK.wait(100).us


@pytest.mark.parametrize(
    ("card", "name"),
    [
        ("gb10", "roce200"), ("rtx5090", "pcie-host"), ("rtx4090", "pcie-host"), ("rtxpro6000", "pcie-peer"),
        ("l40s", "pcie-peer"), ("a100", "nvlink"), ("h200", "nvlink"), ("b200", "nvlink"),
    ],
)  # fmt: skip
def test_which_link_cards_have(card: str, name: str) -> None:
    found = link_between(known(card))
    assert found is not None
    assert found.name == name


def test_a_cpu_has_none() -> None:
    assert link_between(cpu()) is None
