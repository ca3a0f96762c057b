"""Tensors of more bytes than a machine has: only what a kernel touches is in memory."""

from __future__ import annotations

import pytest
import torch

from mutable_kernels import copied_rows
from ptxproof import InterpretError, TritonLaunch, interpret

STRIDE = 2**30


@pytest.mark.parametrize("wide", [True, False])
def test_an_offset_beyond_32_bits(wide: bool) -> None:
    """Computed in 32 bits, it is another address, which is outside of the tensor."""
    x, y = (torch.empty(2 * STRIDE + 100).as_strided((3, 100), (STRIDE, 1)) for _ in "xy")
    x.copy_(torch.arange(300.0).view(3, 100))
    y.zero_()
    launch = TritonLaunch.of(copied_rows, (3,), x, y, STRIDE, 100, WIDE=wide, BLOCK=128)
    if not wide:
        with pytest.raises(InterpretError, match="outside of its tensor"):
            interpret(launch, 90)
        return
    interpret(launch, 90)
    assert torch.equal(x, y)
