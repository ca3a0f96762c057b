"""Programs of one launch that wait for each other: each one's numbers must be ordered, and nobody may wait for ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mutable_kernels import layers_of_all
from ptxproof import InterpretError, Race, TritonLaunch, interpret

PROGRAMS, LAYERS = 5, 3


def expected(x: torch.Tensor) -> torch.Tensor:
    for _ in range(LAYERS):
        y = x.sum(0, keepdim=True) + torch.arange(PROGRAMS)[:, None]
        x = y.roll(-1, 0).roll(32, 1) / 2
    return x


def run(resident: int | None = None, counter: torch.Tensor | None = None, **named: Any) -> bool:
    """Whether the numbers are right."""
    x, y = torch.arange(64.0 * PROGRAMS).view(PROGRAMS, 64), torch.zeros(PROGRAMS, 64)
    want = expected(x.clone())
    counter = torch.zeros(1, dtype=torch.int32) if counter is None else counter
    launch = TritonLaunch.of(layers_of_all, (PROGRAMS,), x, y, counter, LAYERS, num_warps=2, **named)
    interpret(launch, 90, resident=resident)
    return torch.equal(x, want)


@pytest.mark.parametrize("resident", [None, PROGRAMS, 132])
def test_programs_wait_for_each_other(resident: int | None) -> None:
    counter = torch.zeros(1, dtype=torch.int32)
    assert run(resident, counter)
    assert counter.item() == 2 * LAYERS * PROGRAMS


@pytest.mark.parametrize(
    "fault",
    [
        {"MISSING": 1},
        {"MISSING": 2},
        {"RELEASE": "red.relaxed.gpu.global.add.u32"},
        {"RELEASE": "red.release.cta.global.add.u32"},
        {"ACQUIRE": "ld.relaxed.gpu.global.u32"},
        {"ACQUIRE": "ld.volatile.global.u32"},
        {"BEFORE": False},
        {"BEHIND": False},
        {"SHORT": 1},
    ],
    ids=lambda fault: "{}={}".format(*next(iter(fault.items()))),
)
def test_a_barrier_that_does_not_order_is_a_race(fault: dict[str, Any]) -> None:
    with pytest.raises(Race, match="nothing orders the two"):
        run(**fault)


def test_a_counter_that_was_not_reset_is_a_race() -> None:
    counter = torch.zeros(1, dtype=torch.int32)
    run(counter=counter)
    with pytest.raises(Race, match="nothing orders the two"):
        run(counter=counter)


def test_programs_that_cannot_all_run_at_once_wait_for_ever() -> None:
    with pytest.raises(InterpretError, match=r"no program will change, of which 4 of 5 programs run at once"):
        run(resident=4)


def test_a_program_that_does_not_count_is_waited_for_in_vain() -> None:
    with pytest.raises(InterpretError, match=r"thread 0 of block \d waits for a number in global memory"):
        run(ABSENT=2)
