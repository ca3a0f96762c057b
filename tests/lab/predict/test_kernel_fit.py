"""The two-part model: it finds the numbers that rows were made from, on the card of the rows and on another."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from microscale.hardware import KNOWN
from microscale.hardware.reachable_bandwidth import reach
from microscale_lab.predict.kernel_fit import FitRow, KernelWork, Key, formula, leave_one_out, make_groups, minimise
from microscale_lab.predict.rates import BOOST_GHZ

H200, GB10, A100 = KNOWN["h200"], KNOWN["gb10"], KNOWN["a100"]
STREAMING: Key = ("moe", "x", "small batch")
LARGE: Key = ("moe", "x", "grouped")


def made(parameters: tuple[float, float, float], large: bool, noise: float = 0.0) -> list[FitRow]:
    """Rows as kernels with these numbers would give them on an H200."""
    chance = random.Random(0)
    rows = []
    for tokens in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if not large else (256, 512, 1024, 2048, 4096, 8192):
        for num_bytes in (50e6, 200e6, 800e6):
            work = KernelWork(num_bytes, tokens * num_bytes * 3)
            us = formula(parameters, large, work, H200).us * math.exp(chance.gauss(0, noise))
            rows.append(FitRow(work, us, H200))
    return rows


@pytest.mark.parametrize(
    ("parameters", "large"), [((7.0, 0.05, 1e-3), False), ((2.5, 0.02, 2e-3), False), ((40.0, 0.05, 0.5), True)]
)
def test_the_fit_finds_what_rows_were_made_from(parameters: tuple[float, float, float], large: bool) -> None:
    group = make_groups({STREAMING: made(parameters, large)})[STREAMING]
    assert group.large is large
    assert group.parameters[0] == pytest.approx(parameters[0], rel=0.1)
    assert group.parameters[2] == pytest.approx(parameters[2], rel=0.1)
    for work in (KernelWork(100e6, 5e9), KernelWork(400e6, 100e9)):
        for card in (H200, GB10, A100):
            truth = formula(parameters, large, work, card).us
            assert group.elsewhere(work, card).us == pytest.approx(truth, rel=0.05)


def test_fixed_time_does_not_grow_with_a_slower_memory() -> None:
    """The reason for two parts: an H200 at 60 % of its roofline leaves a GB10 at more than 90 % of what it reaches."""
    parameters, work = (7.0, 0.01, 1e-4), KernelWork(50e6, 0.2e9)
    ideal = {card.name: work.bytes / (reach(card).gbs * 1e3) for card in (H200, GB10)}
    shares = {card.name: ideal[card.name] / formula(parameters, False, work, card).us for card in (H200, GB10)}
    assert shares[H200.name] < 0.6
    assert shares[GB10.name] > 0.88


def test_parts_add_up_and_scale() -> None:
    timing = formula((5.0, 0.05, 0.4), True, KernelWork(1e9, 1e12, "fp8"), H200)
    assert timing.us == pytest.approx(timing.fixed + timing.memory + timing.issue + timing.matrix)
    assert timing.scaled(2.0, 0.1).us == pytest.approx(2 * timing.us)


def test_a_measured_row_decides_at_its_place_and_doubt_grows_with_the_distance() -> None:
    """The formula cannot bend as these rows do: what has 200 MB takes a sixth longer than it says."""
    rows = [
        replace(row, us=row.us * 1.17) if row.work.bytes == 200e6 else row
        for row in made((7.0, 0.05, 1e-3), large=False)
    ]
    group = make_groups({STREAMING: rows})[STREAMING]
    row = rows[7]
    at, far = group.here(row.work, H200), group.here(KernelWork(row.work.bytes * 40, row.work.flops * 40), H200)
    plain = formula(group.parameters, False, row.work, H200).us
    assert abs(math.log(at.us / row.us)) < 0.5 * abs(math.log(plain / row.us)) > 0.02
    assert at.deviation < far.deviation


def test_rows_left_out_are_predicted_within_their_noise() -> None:
    rows = {STREAMING: made((7.0, 0.05, 1e-3), False, 0.02), LARGE: made((40.0, 0.05, 0.5), True, 0.02)}
    left = leave_one_out(rows)
    assert len(left) == sum(map(len, rows.values()))
    errors = sorted(abs(entry.error) for entry in left)
    assert errors[len(errors) // 2] < 0.04
    assert max(errors) < 0.2
    assert leave_one_out({LARGE: rows[LARGE][:1]}) == []


def test_least_squares() -> None:
    found = minimise(lambda p: np.array([p[0] - 3.0, 2 * (p[1] + 1.0)]), np.zeros(2))
    assert found == pytest.approx([3.0, -1.0], abs=1e-3)


def test_every_known_card_has_a_clock() -> None:
    assert set(BOOST_GHZ) == set(KNOWN)
