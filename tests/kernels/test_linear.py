"""The matrix product of implementations that call torch's: on a CPU bf16 is rounded once, on every CPU."""

from __future__ import annotations

import pytest
import torch

from microscale.kernels.linear import linear
from microscale_lab.cases.errors import step


@pytest.mark.parametrize("bias", [False, True])
def test_bf16_on_a_cpu_is_float32_rounded_once(bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, offset = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((7, 96), (33, 96), (33,)))
    added = offset if bias else None
    got = linear(x, weight, added)
    exact = x.double() @ weight.double().T + (offset.double() if bias else 0)
    assert got.dtype == torch.bfloat16
    # Half a step of bf16, and what float32's sum of 96 terms may be off by.
    room = step("bf16") * exact.abs() + 96 * step("float32") * (x.double().abs() @ weight.double().abs().T)
    assert ((got.double() - exact).abs() <= room).all()


def test_other_types_are_torchs_own() -> None:
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))
    assert linear(x.bfloat16().to("meta"), weight.bfloat16().to("meta")).shape == (3, 5)
