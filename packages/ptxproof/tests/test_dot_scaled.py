# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""NVFP4 products as Triton compiles them: that it has the scales where we look for them."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from ptxproof import TritonKernel, TritonLaunch, interpret, translate
from ptxproof.instructions import NVFP4_MMA
from ptxproof.interpreter.numbers import code_values
from ptxproof.ptx import PtxInstruction, instructions
from ptxproof.targets import matrix_instructions

M, N, K = 32, 16, 128


@triton.jit
def product(a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """out [M, N] = a [M, K] b [N, K]: two E2M1 in a byte, and a scale for each 16."""
    m, n, k, group = tl.arange(0, M)[:, None], tl.arange(0, N), tl.arange(0, K // 2), tl.arange(0, K // 16)
    a, a_scale = tl.load(a_ptr + m * (K // 2) + k), tl.load(a_scale_ptr + m * (K // 16) + group)
    b, b_scale = tl.load(b_ptr + n * (K // 2) + k[:, None]), tl.load(b_scale_ptr + n[:, None] * (K // 16) + group)
    tl.store(out_ptr + m * N + n, tl.dot_scaled(a, a_scale, "e2m1", b, b_scale, "e2m1"))


def operand(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and values."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, K), generator=generator)
    scales = torch.randint(0, 127, (rows, K // 16), generator=generator).to(torch.uint8).view(torch.float8_e4m3fn)
    values = torch.from_numpy(code_values("e2m1"))[codes] * scales.double().repeat_interleave(16, 1)
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), scales, values


def with_fault(ptx: str, at: int, fault: str) -> str:
    """Each product takes ``%fault`` and not operand ``at``, of which ``fault`` makes it."""
    parts, done = [], 0
    for each in instructions(ptx):
        if each.instruction.opcode == NVFP4_MMA:
            operands = list(each.instruction.operands)
            spoil, operands[at] = fault.format(operands[at]), "%fault"
            spoiled = PtxInstruction(NVFP4_MMA, tuple(operands))
            parts += [ptx[done : each.start], f"{{ .reg .b32 %fault; {spoil} {spoiled} }}"]
            done = each.end
    return "".join([*parts, ptx[done:]])


def error(sm: int, fault: tuple[int, str] | None = None) -> float:
    """Of the kernel for SM 12.0, run on ``sm``: the largest error in parts of the terms' sizes."""
    a, a_scale, a_values = operand(M, 0)
    b, b_scale, b_values = operand(N, 1)
    out = torch.zeros(M, N)

    def edit(kernel: TritonKernel, ptx: str) -> str:
        assert matrix_instructions(ptx) == ("mma.sync block_scale mxf4nvf4",)
        ptx = ptx if fault is None else with_fault(ptx, *fault)
        return ptx if sm == 120 else translate(ptx, sm).ptx

    interpret(TritonLaunch.of(product, (1,), a, a_scale, b, b_scale, out, M=M, N=N, K=K, num_warps=2), 120, edit)
    gap = (out - a_values @ b_values.T).abs()
    return float((gap / (a_values.abs() @ b_values.abs().T)).max())


@pytest.mark.parametrize("sm", [80, 90, 120])
def test_a_product_of_triton(sm: int) -> None:
    assert error(sm) < 2.0**-22


@pytest.mark.parametrize(
    "fault",
    [
        (4, "shfl.sync.bfly.b32 %fault, {}, 4, 31, -1;"),
        (6, "shfl.sync.bfly.b32 %fault, {}, 8, 31, -1;"),
        (4, "prmt.b32 %fault, {}, 0, 0x3201;"),
        (6, "prmt.b32 %fault, {}, 0, 0x2310;"),
    ],
    ids=["row", "column", "byte of A", "byte of B"],
)
def test_a_wrong_scale_shows(fault: tuple[int, str]) -> None:
    assert error(120, fault) > 2.0**-6
