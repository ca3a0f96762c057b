"""What stands between two steps with drafts, on a real GPU: the kernels' cases, and a copy that nobody waits for."""

from __future__ import annotations

import pytest
import torch

from microscale.engine.speculation.head import in_one_piece
from microscale.hardware import detect
from microscale_lab.cases.case import KernelCase, hold
from microscale_lab.cases.drafts import cases

LONG = 2_000_000_000
"""Cycles: about a second."""


@pytest.mark.odd_shapes
@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_as_the_reference(case: KernelCase) -> None:
    hold(case.start(detect(), "cuda")())


@pytest.mark.odd_shapes
@pytest.mark.parametrize("columns", [1, 3, 7])
def test_guesses_come_without_waiting(columns: int) -> None:
    room = torch.zeros(64 * 7, dtype=torch.int64, pin_memory=True)
    guessed = torch.ones((64, columns), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    part, there = in_one_piece(room, 64, columns), torch.cuda.Event()
    part.copy_(guessed, non_blocking=True)
    there.record()
    assert not there.query()
    there.synchronize()
    assert part.eq(1).all()
