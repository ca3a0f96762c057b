"""Cases of ``dense``: layers in every weight format by every path, and lm_heads with what sampling wants of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from microscale.formats import encode_channels
from microscale.hardware import Gpu
from microscale.hardware.tiles import dense as tiles
from microscale.hardware.tiles.dense import DenseFormat, Size, columns_of
from microscale.kernels.dense import gemm, logits_epilogue, small_batch, unpack
from microscale.kernels.dense.fragments import BLOCK_SCALED, BLOCK_SCALED_NVFP4
from microscale.kernels.dense.packed import pack
from microscale.kernels.dense.reference import capped, dense, summarise
from microscale.kernels.dense.spec import FORMATS, DenseOp, DenseSpec, DenseWeights, Logits
from microscale.kernels.narrow import mxfp8, nvfp4, widened
from microscale.kernels.op import Activations, Reason
from microscale.planning import registry
from microscale.planning.paths import PathList
from microscale_lab.cases.case import Compared, Finish, KernelCase, OracleCase, compare, just_written, refusal, same
from microscale_lab.cases.errors import Errors, spread, step
from microscale_lab.cases.experts import encoded

if TYPE_CHECKING:
    from torch import Tensor

ROUNDED_BY = {BLOCK_SCALED.name: mxfp8, BLOCK_SCALED_NVFP4.name: nvfp4}
"""What paths round their input to, those of logits too; others leave it as it is."""
NARROW = (
    ("triton_mxfp8_a8", "mxfp8", Activations.MXFP8),
    ("triton_mxfp4_a8", "mxfp4", Activations.MXFP8),
    ("triton_nvfp4_a4", "nvfp4", Activations.NVFP4),
)
BLOCK_SUM = Errors(1e-5, 2e-6)
"""A sum of exponentials of some hundred float32 differences."""


@dataclass(frozen=True)
class DenseProblem:
    weights: DenseWeights
    x: Tensor
    residual: Tensor

    @property
    def expected(self) -> Tensor:
        return dense(self.x, self.weights, self.residual)


def make_weights(fmt: str, rows: int, columns: int, device: str, bias: bool = True) -> DenseWeights:
    generator = torch.Generator().manual_seed(rows + columns)
    plain = (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(device)
    b = torch.randn(rows, generator=generator).bfloat16().to(device) if bias else None
    if fmt == "bf16":
        return DenseWeights(plain.bfloat16(), b)
    return DenseWeights(encode_channels(plain) if fmt == "fp8" else encoded(plain, fmt), b)


def make_problem(fmt: str, tokens: int, rows: int, columns: int, device: str, bias: bool = True) -> DenseProblem:
    """Tokens and residual are inside wider buffers whose margins are NaN: reading past a row shows in the result."""
    generator = torch.Generator().manual_seed(tokens)

    def margin(width: int) -> Tensor:
        wide = torch.full((tokens + 2, width + 64), math.nan, dtype=torch.bfloat16)
        wide[1:-1, :width] = torch.randn(tokens, width, generator=generator)
        return wide.to(device)[1:-1, :width]

    return DenseProblem(make_weights(fmt, rows, columns, device, bias), margin(columns), margin(rows))


def bf16_bound(expected: Tensor, roundings: int = 1) -> Errors:
    """One rounding to bf16: at most ``step`` of the largest element, and as the RMS of a uniform error of that size no
    more than its root of a third, however few elements there are. Sums in another order are off by far less.
    Several are independent: their worst errors add up, their RMS errors as squares do."""
    return Errors(1.001 * roundings * step("bf16") * spread(expected), step("bf16") * math.sqrt(roundings / 3))


def roundings_of(fmt: str, tokens: int, rows: int, gpu: Gpu) -> int:
    """Of one call with a residual. cuBLAS rounds the product before the residual is added; weights with the scales
    of their rows, FP8's and NVFP4's, are rounded too. Those of FP8 blocks are in a GEMM also, not in a small batch."""
    if fmt == "bf16" or not unpack.pays(tokens, gpu):
        return 2 if fmt == "fp8_block" and not small_batch.takes(tokens, rows, gpu) else 1
    return 3 if fmt in ("fp8", "nvfp4", "fp8_block") else 2


def logits_bound(columns: int) -> Errors:
    """Of float32's sums: each of K additions may lose a step of the sum (matrix units cut off), and losses add up as a
    random walk does; its worst of many is five times its RMS."""
    rms = 2 * step("float32") * math.sqrt(columns)
    return Errors(5 * rms, rms)


def hold_logits(actual: Logits, expected: Tensor, bound: Errors) -> Iterator[Compared]:
    """The values, and the blocks, which follow from the values."""
    yield compare("logits", actual.values, expected, bound)
    yield from hold_blocks(actual)


def hold_blocks(actual: Logits) -> Iterator[Compared]:
    """What is said of each block is what its values say."""
    want = summarise(actual.values, actual.block_rows)
    yield same("maxima of blocks", actual.block_max, want.block_max)
    yield same("places of the maxima", actual.block_argmax, want.block_argmax)
    sums, exact = actual.block_sum, want.block_sum
    yield same("blocks that are NaN", sums.isnan().int(), exact.isnan().int())
    yield compare("sums of blocks", sums.nan_to_num(), exact.nan_to_num(), BLOCK_SUM)


@cache
def problem_of(fmt: str, tokens: int, rows: int, columns: int, device: str, bias: bool) -> DenseProblem:
    """It is never written to, so cards share it."""
    return make_problem(fmt, tokens, rows, columns, device, bias)


@dataclass(frozen=True)
class DenseKernelCase(OracleCase):
    entry: DenseOp[Any]
    spec: DenseSpec

    op: ClassVar[str] = "dense"

    @property
    def fmt(self) -> str:
        return self.spec.weight_format

    def problem(self, device: str) -> DenseProblem:
        spec = self.spec
        return problem_of(spec.weight_format, spec.tokens, spec.rows, spec.columns, device, spec.bias)

    def start(self, gpu: Gpu, device: str) -> Finish:
        problem, spec = self.problem(device), self.spec
        path = self.path(gpu)
        packed = self.entry.pack(problem.weights, spec)
        just_written(problem.x, problem.residual)
        with_residual = self.entry.run(packed, spec, gpu, problem.x, problem.residual, path)
        without = self.entry.run(packed, spec, gpu, problem.x, None, path)

        def finish() -> Iterator[Compared]:
            # Against a reference that quantises alike nothing is left but the rounding of the result.
            x = ROUNDED_BY.get(path.name, widened)(problem.x)
            roundings = roundings_of(self.fmt, spec.tokens, spec.rows, gpu)
            for what, y, residual in (("y", with_residual, problem.residual), ("without a residual", without, None)):
                want = dense(x, problem.weights, residual)
                yield compare(what, y, want, bf16_bound(want, roundings))

        return finish


@dataclass(frozen=True)
class TileCase(DenseKernelCase):
    """By the small-batch tile of layers of another size, which are too large for a CPU."""

    size: Size

    def variant(self, gpu: Gpu) -> str:
        return f"{self.entry.name}, small batch, {self.size}"

    def refuses(self, gpu: Gpu) -> Reason | None:
        return self.entry.supports(self.spec, gpu)

    def start(self, gpu: Gpu, device: str) -> Finish:
        problem = self.problem(device)
        fmt = DenseFormat(self.fmt)
        sizes = columns_of(fmt)
        columns = next((size for size in sizes if self.spec.tokens <= size), sizes[-1])
        tile = tiles.tile_of(tiles.DenseCase(fmt, columns, self.size), gpu)
        just_written(problem.x, problem.residual)
        y = small_batch.run(pack(problem.weights), gpu, problem.x, problem.residual, tile)

        def finish() -> Iterator[Compared]:
            yield compare("y", y, problem.expected, bf16_bound(problem.expected))

        return finish


@dataclass(frozen=True)
class GemmKernelCase(DenseKernelCase):
    """By the GEMM, which layers of so few rows leave to another path on some cards."""

    def variant(self, gpu: Gpu) -> str:
        return f"{self.entry.name}, GEMM"

    def refuses(self, gpu: Gpu) -> Reason | None:
        return self.entry.supports(self.spec, gpu)

    def start(self, gpu: Gpu, device: str) -> Finish:
        problem = self.problem(device)
        just_written(problem.x, problem.residual)
        y = gemm.run(pack(problem.weights), gpu, problem.x, problem.residual)

        def finish() -> Iterator[Compared]:
            yield compare("y", y, problem.expected, bf16_bound(problem.expected, 1 + (self.fmt == "fp8_block")))

        return finish


@dataclass(frozen=True)
class LogitsCase(DenseKernelCase):
    """As an lm_head, with and without a soft cap."""

    form: ClassVar[PathList] = PathList.LOGITS

    def label(self) -> str:
        return "logits"

    def start(self, gpu: Gpu, device: str) -> Finish:
        problem, spec = self.problem(device), self.spec
        path = self.path(gpu)
        packed = self.entry.pack(problem.weights, spec)
        x = problem.x if spec.softcap is None else problem.x * 40  # far beyond the cap
        just_written(x)
        plain = self.entry.run_logits(packed, replace(spec, softcap=None), gpu, x, path)
        cut = self.entry.run_logits(packed, spec, gpu, x, path)

        def finish() -> Iterator[Compared]:
            inputs = ROUNDED_BY.get(path.name, widened)(x)
            want, bound = dense(inputs, problem.weights), logits_bound(spec.columns)
            if self.fmt == "fp8_block" and spec.tokens > small_batch.MAX_TOKENS:
                bound = bf16_bound(want)  # a GEMM rounds the weights
            yield from hold_logits(plain, want, bound)
            if spec.softcap is not None:
                # Eight roundings of numbers up to 1, times the cap: two each of the exponential and the quotient, which
                # a GPU only approximates, one of the difference and of the product; torch's own tanh and product.
                want = capped(plain.values, spec.softcap)
                room = 8 * step("float32") * spec.softcap / float(want.square().mean().sqrt())
                yield from hold_logits(cut, want, Errors(room, room))

        return finish


@dataclass(frozen=True)
class EpilogueCase(KernelCase):
    """The launch behind logits that a library computed: equals, signed zeros, NaN, and a last block that is short."""

    rows: int
    softcap: float | None

    op: ClassVar[str] = "dense"

    def variant(self, gpu: Gpu) -> str:
        return "dequantized, logits, cuBLAS, float32 sums"

    def refuses(self, gpu: Gpu) -> Reason | None:
        spec = DenseSpec(self.rows, 64, "bf16", Activations.BF16, False, 4, self.softcap)
        entry = registry.dense("dequantized")
        return refusal(entry, PathList.LOGITS, spec, gpu)

    def start(self, gpu: Gpu, device: str) -> Finish:
        values = make_logits(self.rows, device)
        actual = logits_epilogue.summarise(values.clone(), self.softcap)

        def finish() -> Iterator[Compared]:
            want = values if self.softcap is None else capped(values, self.softcap)
            # Four roundings of numbers up to 1 (the exponential, the quotient, the difference; torch's tanh) and what
            # a GPU's exponential and quotient are off by, times the cap.
            size = float(want.nan_to_num().square().mean().sqrt())
            room = 0.0 if self.softcap is None else 8 * step("float32") * self.softcap / size
            yield same("NaN", actual.values.isnan().int(), want.isnan().int())
            yield compare("logits", actual.values.nan_to_num(), want.nan_to_num(), Errors(room, room))
            yield from hold_blocks(actual)

        return finish


def make_logits(rows: int, device: str) -> Tensor:
    """Four tokens: ordinary logits, many equal ones, zeros of both signs, and large ones with a NaN."""
    values = torch.randn(4, rows, generator=torch.Generator().manual_seed(rows))
    values[1] = values[1].round()
    values[2] = torch.where(values[2] > 0, 0.0, -0.0)
    values[3] *= 1e3
    values[3, rows // 2] = math.nan
    return values.to(device)


QUANTISED = FORMATS[1:]
# tokens, rows, columns: one token; K of half a tile, of fewer tiles than slices; rows of one tile, of no whole block.
SMALL_BATCH = [(1, 144, 352), (8, 48, 96), (13, 80, 320), (16, 16, 32)]
# Blocks of 16 tokens for few rows, and more tokens than those take.
BATCH = [(20, 144, 352), (37, 80, 96), (70, 208, 320)]
TILES = (37, 144, 352)
"""Two blocks of tokens, and a last block of rows that is not whole."""
GEMM = (140, 208, 320)
"""Two blocks of tokens and of rows, neither whole."""
LARGE = (256, 48, 96)
"""Enough tokens for a bf16 copy of the weights."""


def cases() -> Iterator[KernelCase]:
    for fmt in FORMATS:
        entry = registry.dense(f"triton_{fmt}")
        for tokens, rows, columns in (*SMALL_BATCH, *(() if fmt == "bf16" else (*BATCH, LARGE))):
            name = f"{tokens} x {columns} by {rows}"
            spec = DenseSpec(rows, columns, fmt, Activations.BF16, tokens not in (8, 37), tokens)
            yield DenseKernelCase(name, entry, spec)
            if (tokens, rows, columns) in (SMALL_BATCH[0], SMALL_BATCH[2], BATCH[0]):
                yield LogitsCase(name, entry, spec)
                yield LogitsCase(f"{name}, capped", entry, replace(spec, softcap=30.0))
    tokens, rows, columns = TILES
    for fmt, size in product(QUANTISED, (Size.ONE_WAVE, Size.CROWDED)):
        spec = DenseSpec(rows, columns, fmt, Activations.BF16, True, tokens)
        name = f"{tokens} x {columns} by {rows}, tile of {size}"
        yield TileCase(name, registry.dense(f"triton_{fmt}"), spec, size)
    tokens, rows, columns = GEMM
    for fmt in QUANTISED:
        spec = DenseSpec(rows, columns, fmt, Activations.BF16, True, tokens)
        yield GemmKernelCase(f"{tokens} x {columns} by {rows}, GEMM", registry.dense(f"triton_{fmt}"), spec)
    for backend, fmt, activations in NARROW:
        entry = registry.dense(backend)
        for tokens, rows, columns in BATCH:
            name = f"{tokens} x {columns} by {rows}"
            spec = DenseSpec(rows, columns, fmt, activations, tokens != 37, tokens)
            yield DenseKernelCase(name, entry, spec)
            if tokens == 20:
                yield LogitsCase(f"{name}, capped", entry, replace(spec, softcap=30.0))
    for rows in (1, 1024, 1500):
        for softcap in (None, 30.0):
            yield EpilogueCase(f"{rows} rows{'' if softcap is None else ', capped'}", rows, softcap)
