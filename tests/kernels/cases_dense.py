"""Dense kernels in plain Triton against the reference. Runs under the interpreter, or on a GPU where there is one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from microscale.formats import MXFP8, decode, encode
from microscale.hardware import Gpu, detect, known
from microscale.hardware.tiles.gemm import GemmTile
from microscale.hardware.tiles.thresholds import ThresholdName, threshold
from microscale.kernels.dense import gemm, logits_epilogue, small_batch, unpack
from microscale.kernels.dense.packed import PackedDense, pack
from microscale.kernels.dense.reference import capped, dense, summarise
from microscale.kernels.dense.spec import DenseWeights, Logits
from microscale_lab.cases import dense as cases
from microscale_lab.cases.case import hold
from microscale_lab.cases.dense import DenseProblem
from microscale_lab.cases.errors import assert_close, step

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
GPU: Gpu = detect() if ON_GPU else known("a100")  # without programmatic launches, which the interpreter does not know


def make_weights(fmt: str, rows: int, columns: int, bias: bool = True) -> DenseWeights:
    return cases.make_weights(fmt, rows, columns, DEVICE, bias)


def make_problem(fmt: str, tokens: int, rows: int, columns: int, bias: bool = True) -> DenseProblem:
    return cases.make_problem(fmt, tokens, rows, columns, DEVICE, bias)


def check_bf16(actual: Tensor, expected: Tensor, roundings: int = 1) -> None:
    bound = cases.bf16_bound(expected, roundings)
    assert actual.dtype == torch.bfloat16
    assert_close(actual, expected, worst=bound.worst, rms=bound.rms)


def roundings_of(fmt: str, tokens: int, rows: int) -> int:
    return cases.roundings_of(fmt, tokens, rows, GPU)


def check_logits(actual: Logits, expected: Tensor, columns: int) -> None:
    """The values, and the blocks, which follow from the values."""
    hold(cases.hold_logits(actual, expected, cases.logits_bound(columns)))


TILE = GemmTile(16, 64, 64, 4, 2)
MX_TILE = GemmTile(32, 128, 128, 4, 2)
SHAPES = [(1, 16, 32), (5, 144, 96), (20, 80, 320), (37, 64, 352)]
QUANTISED = ["fp8", "mxfp8", "mxfp4"]


def packed_of(problem: DenseProblem) -> PackedDense:
    return pack(problem.weights)


@pytest.mark.parametrize("tokens, rows, columns", SHAPES)
@pytest.mark.parametrize("fmt", QUANTISED)
def test_gemm(fmt: str, tokens: int, rows: int, columns: int) -> None:
    problem = make_problem(fmt, tokens, rows, columns, bias=tokens != 5)
    packed = packed_of(problem)
    check_bf16(gemm.run(packed, GPU, problem.x, problem.residual, tile=TILE), problem.expected)
    check_bf16(gemm.run(packed, GPU, problem.x, None, tile=TILE), dense(problem.x, problem.weights))


@pytest.mark.parametrize("fmt", QUANTISED)
def test_gemm_logits(fmt: str) -> None:
    problem = make_problem(fmt, 20, 208, 96)
    logits = gemm.run_logits(packed_of(problem), GPU, problem.x, tile=TILE)
    check_logits(logits, dense(problem.x, problem.weights), 96)


@pytest.mark.skipif(ON_GPU, reason="block-scaled matrix instructions are not on every GPU; see tests/gpu/test_dense.py")
@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4"])
def test_gemm_with_mxfp8_activations(fmt: str) -> None:
    problem = make_problem(fmt, 20, 144, 224)
    actual = gemm.run(packed_of(problem), GPU, problem.x, problem.residual, block_scaled=True, tile=MX_TILE)
    # Against a reference that quantises alike nothing is left but the rounding of the result.
    check_bf16(actual, dense(decode(encode(problem.x, MXFP8)), problem.weights, problem.residual))
    logits = gemm.run_logits(packed_of(problem), GPU, problem.x, block_scaled=True, tile=MX_TILE)
    check_logits(logits, dense(decode(encode(problem.x, MXFP8)), problem.weights), 224)


def test_no_tokens() -> None:
    packed = packed_of(make_problem("mxfp4", 1, 32, 64))
    x = torch.empty(0, 64, dtype=torch.bfloat16, device=DEVICE)
    assert gemm.run(packed, GPU, x, None).shape == (0, 32)
    assert gemm.run_logits(packed, GPU, x).values.shape == (0, 32)
    assert small_batch.run_logits(packed, GPU, x).block_max.shape[0] == 0
    assert logits_epilogue.summarise(torch.empty(0, 32, device=DEVICE)).block_max.shape == (0, 1)


@pytest.mark.parametrize("rows", [1, 1024, 1500])
def test_the_epilogue_of_other_peoples_logits(rows: int) -> None:
    """Equal values, signed zeros, NaN and infinities; the last block is short."""
    values = torch.randn(4, rows, generator=torch.Generator().manual_seed(rows)).to(DEVICE)
    values[1] = values[1].round()  # many equals
    values[2] = torch.where(values[2] > 0, 0.0, -0.0)
    values[3, rows // 2] = math.nan
    actual, want = logits_epilogue.summarise(values), summarise(values, logits_epilogue.BLOCK_ROWS)
    torch.testing.assert_close(actual.block_max, want.block_max, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(actual.block_argmax, want.block_argmax)
    torch.testing.assert_close(actual.block_sum, want.block_sum, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [1, 1024, 1500])
def test_capped_logits(rows: int) -> None:
    """From near zero to far beyond the cap, where many become equal: the first of them wins, as it must."""
    generator = torch.Generator().manual_seed(rows)
    values = (torch.randn(4, rows, generator=generator) * torch.tensor([[0.01], [3.0], [30.0], [1e4]])).to(DEVICE)
    values[3, rows // 2] = math.nan
    want = capped(values, 30.0)
    actual = logits_epilogue.capped(logits_epilogue.summarise(values.clone()), 30.0)
    # Four roundings of numbers up to 1 (the exponential, the quotient, the difference; torch's own tanh), times 30.
    torch.testing.assert_close(actual.values, want, rtol=0, atol=30 * 4 * step("float32"), equal_nan=True)
    blocks = summarise(actual.values, logits_epilogue.BLOCK_ROWS)
    torch.testing.assert_close(actual.block_max, blocks.block_max, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(actual.block_argmax, blocks.block_argmax)
    torch.testing.assert_close(actual.block_sum, blocks.block_sum, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("fmt", ["fp8", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("rows, columns", [(16, 32), (48, 96), (32, 320)])
def test_unpacked_weights_are_the_weights(fmt: str, rows: int, columns: int) -> None:
    weights = make_weights(fmt, rows, columns)
    packed = pack(weights)
    assert not isinstance(weights.weight, Tensor)
    assert torch.equal(unpack.unpack(packed), decode(weights.weight).bfloat16())


@pytest.mark.parametrize("fmt", ["fp8", "mxfp8", "mxfp4"])
def test_many_tokens_go_through_an_unpacked_copy(fmt: str) -> None:
    problem = make_problem(fmt, 5, 48, 96)
    y = unpack.run(pack(problem.weights), problem.x, problem.residual)
    check_bf16(y, problem.expected, roundings_of(fmt, threshold(ThresholdName.UNPACK_TOKENS, GPU), 48))
