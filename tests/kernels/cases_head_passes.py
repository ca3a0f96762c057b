"""What a draft head's pass has beside its layer, in Triton against its reference. Runs under the interpreter."""

from __future__ import annotations

import pytest

from microscale import hardware
from microscale.prove.cases.case import Case, hold
from microscale.prove.cases.head_passes import cases

GPU = hardware.known("h200")


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_as_the_reference(case: Case) -> None:
    hold(case.start(GPU, "cpu")())
