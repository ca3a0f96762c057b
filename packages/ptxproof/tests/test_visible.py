"""Global memory within one launch: stores that another thread reads must be ordered before it."""

from __future__ import annotations

import pytest
import torch

from mutable_kernels import row_of_another_thread, summed_by_the_last
from ptxproof import Race, TritonLaunch, interpret

PROGRAMS = 5


def run(**named: object) -> torch.Tensor:
    x = torch.arange(64 * PROGRAMS, dtype=torch.float32)
    parts, counter, y = torch.zeros(64 * PROGRAMS), torch.zeros(1, dtype=torch.int32), torch.zeros(64)
    defaults = {"SEM": "acq_rel", "SCOPE": "gpu", "BARRIER": True, "num_warps": 2}
    interpret(TritonLaunch.of(summed_by_the_last, (PROGRAMS,), x, parts, counter, y, **(defaults | named)), 121)
    assert counter.item() == 0
    assert torch.equal(y, x.view(PROGRAMS, 64).sum(0))
    return y


def test_the_last_program_reads_what_all_have_released() -> None:
    run()


@pytest.mark.parametrize(
    "fault",
    [{"SEM": "relaxed"}, {"SEM": "acquire"}, {"SEM": "release"}, {"SCOPE": "cta"}, {"BARRIER": False}],
    ids=lambda fault: "{}={}".format(*next(iter(fault.items()))),
)
def test_a_count_that_does_not_order_is_a_race(fault: dict[str, object]) -> None:
    """The numbers are right: the interpreter runs all stores before the last count."""
    with pytest.raises(Race, match=r"what thread \d+ of block \d wrote, and nothing orders the two"):
        run(**fault)


@pytest.mark.parametrize("barrier", [True, False])
def test_what_another_thread_of_the_block_stores_needs_a_barrier(barrier: bool) -> None:
    x, kept, y = torch.arange(128.0), torch.zeros(128), torch.zeros(128)
    launch = TritonLaunch.of(row_of_another_thread, (1,), x, kept, y, BARRIER=barrier, num_warps=4)
    if barrier:
        interpret(launch, 90)
        assert torch.equal(y, x.flip(0))
    else:
        with pytest.raises(Race, match=r"of block 0 reads what thread \d+ of block 0 wrote"):
            interpret(launch, 90)
