"""Programmatic dependent launches: what a kernel may touch before it has waited for those before it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mutable_kernels import doubled_after_wait
from ptxproof import Chain, Race, TritonLaunch, interpret


def run(chain: Chain, x: Tensor, y: Tensor, *, waits: bool = True, early: bool = False, pdl: bool = True) -> None:
    named = {"EARLY": early, "WAITS": waits, "BLOCK": 32, "num_warps": 1, "launch_pdl": pdl}
    interpret(TritonLaunch.of(doubled_after_wait, (1,), x, y, **named), 121, chain=chain)


def test_the_next_begins_when_the_last_block_lets_it() -> None:
    """One block lets it begin early, and the other after it has waited for the first launch."""
    chain, (a, b, d), c = Chain(), tensors(3), torch.ones(64)
    run(chain, a, b)
    named = {"EARLY": True, "WAITS": True, "BLOCK": 32, "LATE_BLOCK": 1, "num_warps": 1, "launch_pdl": True}
    interpret(TritonLaunch.of(doubled_after_wait, (2,), torch.ones(64), c, **named), 121, chain=chain)
    run(chain, b, d, waits=False)


def tensors(num: int) -> list[Tensor]:
    return [torch.ones(32) for _ in range(num)]


def test_a_chain_that_waits_computes_its_numbers() -> None:
    chain, (a, b, c) = Chain(), tensors(3)
    run(chain, a, b)
    run(chain, b, c)
    assert torch.equal(c, 4 * a)


def test_what_the_launch_before_writes_is_not_read_without_a_wait() -> None:
    chain, (a, b, c) = Chain(), tensors(3)
    run(chain, a, b)
    with pytest.raises(Race, match="thread 0 of block 0 reads what a launch before it writes, and nothing has waited"):
        run(chain, b, c, waits=False)


def test_what_the_launch_before_reads_is_not_written_without_a_wait() -> None:
    chain, (a, b, c) = Chain(), tensors(3)
    run(chain, a, b)
    with pytest.raises(Race, match="writes what a launch before it touches"):
        run(chain, c, a, waits=False)


def test_an_ordinary_launch_begins_after_all_before_it() -> None:
    chain, (a, b, c) = Chain(), tensors(3)
    run(chain, a, b)
    run(chain, b, c, waits=False, pdl=False)


@pytest.mark.parametrize("early", [False, True])
def test_who_lets_the_next_begin_before_it_waits_leaves_earlier_ones_running(early: bool) -> None:
    """The third launch reads, before it waits, what the first has written."""
    chain, (a, b, c, d) = Chain(), tensors(4)
    run(chain, a, b)
    run(chain, a, c, early=early)
    if early:
        with pytest.raises(Race, match="reads what a launch before it writes"):
            run(chain, b, d, waits=False)
    else:
        run(chain, b, d, waits=False)


def test_a_wait_reaches_no_further_than_the_waits_before_it() -> None:
    """The second launch waits for nobody, so a wait for it says nothing about the first."""
    chain, (a, b, c, d, e) = Chain(), tensors(5)
    run(chain, a, b)
    run(chain, c, d, waits=False)
    with pytest.raises(Race, match="reads what a launch before it writes"):
        run(chain, b, e)
