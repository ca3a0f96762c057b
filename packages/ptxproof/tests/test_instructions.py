"""The instructions that ``tests/gpu/test_interpret.py`` runs on a GPU: legal where they are said to be, interpreted."""

from __future__ import annotations

import numpy as np
import pytest

from cases_instructions import ALL, One, agree
from gpu_ptx import assemble
from ptx_kernels import run_warp, warp_kernel


@pytest.mark.parametrize("sm", [80, 89, 90])
def test_ptxas_takes_them_all(sm: int) -> None:
    """In one kernel, since every start of ptxas costs."""
    bodies = " ".join(f"{{ {one.body} }}" for one in ALL if one.since <= sm)
    assert assemble(warp_kernel(bodies, 10, 4, f"sm_{sm}"), sm)


@pytest.mark.parametrize("one", ALL, ids=str)
def test_the_interpreter_knows_it_and_agrees_with_itself_alone(one: One) -> None:
    words = one.make()
    with np.errstate(all="ignore"):
        got = run_warp(warp_kernel(one.body, words.shape[1], one.outputs), words, one.outputs)
    assert got.any()
    assert agree(one, got, got)
    wrong = got ^ np.uint32(0x00400040)  # a high bit of a mantissa, of both halves
    assert not agree(one, wrong, got)
