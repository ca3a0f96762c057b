"""Gated DeltaNet in Triton against its reference. Runs under the interpreter, or on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from microscale import hardware
from microscale_lab.cases.case import hold
from microscale_lab.cases.recurrent import TINY, RecurrentCase, cases

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
GPU = hardware.detect() if ON_GPU else hardware.known("gb10")
# Several sequences that pad a step write one slot, which nobody reads. To ``prove`` that is a race, and on a GPU what
# the slot holds is open, so the case is here alone: the interpreter runs programs in order, as the reference does.
PADDING = RecurrentCase("padding shares a slot", TINY, (4, 3, 3), (1, 1, 1), (1, 0, 0), ((1,), (0,), (0,)))
CASES = [*(case for case in cases() if ON_GPU or not case.large), *([] if ON_GPU else [PADDING])]


def kind(*words: str) -> pytest.MarkDecorator:
    """Cases by the beginning of their names."""
    return pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES if c.name.startswith(words)])


def check(case: RecurrentCase) -> None:
    assert case.refuses(GPU) is None
    hold(case.start(GPU, DEVICE)())


@kind("decode", "padding", "64 sequences")
def test_decode(case: RecurrentCase) -> None:
    check(case)


@kind("few tokens", "a sequence's second")
def test_few_tokens(case: RecurrentCase) -> None:
    check(case)


@kind("drafts")
def test_drafts(case: RecurrentCase) -> None:
    check(case)


@kind(*map(str, (6, 63, 65, 128)), "a prompt", "keys", "long")
def test_prompts(case: RecurrentCase) -> None:
    check(case)


@kind("prompts and others")
def test_prompts_next_to_others(case: RecurrentCase) -> None:
    check(case)
