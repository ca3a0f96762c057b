"""Sums that wait as a link would: the arithmetic of the spin, and where there is no GPU to spin on."""

from __future__ import annotations

import pytest
import torch

from microscale.backends.ranks import Absent
from microscale.bench.absent_ranks import FEW, MANY, AbsentOverLink, Spin, absent
from microscale.cli import load
from microscale.errors import BadSetting
from microscale.hardware.links import LINKS


def test_a_spin_is_its_launch_and_its_cycles() -> None:
    spin = Spin.between(2.0 + FEW / 2000, 2.0 + MANY / 2000)
    assert spin.fixed_us == pytest.approx(2.0)
    assert spin.cycles_a_us == pytest.approx(2000.0)
    assert spin.cycles(33.0) == 62_000
    assert spin.cycles(1.0) == 1


def test_a_sum_waits_for_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    ranks = AbsentOverLink(2, LINKS["roce200"], Spin(0.0, 1000.0))
    part = torch.ones(8, 2048, dtype=torch.bfloat16)
    assert ranks.sum(part) is part
    assert ranks.sum(part[:2]).shape == (2, 2048)
    assert slept == [round(1000 * LINKS["roce200"].wait(size).us) for size in (32768, 8192)]
    assert ranks.world == 2


def test_without_a_link_sums_cost_nothing() -> None:
    assert type(absent(4, None, on_gpu=False)) is Absent
    with pytest.raises(BadSetting, match="waits on a GPU"):
        absent(2, LINKS["nvlink"], on_gpu=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--link", "nvlink"], "belongs to --one-rank-of"),
        (["--one-rank-of", "2", "--link", "string"], "there is roce200"),
        (["--one-rank-of", "2", "--link", "nvlink", "--device", "cpu"], "waits on a GPU"),
    ],
)
def test_what_a_link_needs(options: list[str], said: str) -> None:
    with pytest.raises(BadSetting, match=said):
        load("bench")(["gpt-oss-tiny", "--load-format", "dummy", "--tests", "pp8", *options], standalone_mode=False)
