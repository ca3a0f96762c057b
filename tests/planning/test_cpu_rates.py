"""The rates of this CPU, measured."""

from __future__ import annotations

from microscale.planning import cpu_rates


def test_the_rates_are_those_of_a_computer() -> None:
    assert 1e6 < cpu_rates.decode_rate("mxfp4") < cpu_rates.read_rate() < 1e13
