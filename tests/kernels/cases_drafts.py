"""What stands between two steps with drafts, in Triton against its reference. Runs under the interpreter."""

from __future__ import annotations

import pytest

from microscale import hardware
from microscale_lab.cases.case import KernelCase, hold
from microscale_lab.cases.drafts import cases

GPU = hardware.known("gb10")


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_as_the_reference(case: KernelCase) -> None:
    hold(case.start(GPU, "cpu")())
