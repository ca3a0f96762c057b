"""Weights in fragments times bf16 activations, on any GPU from SM80 on: ``triton_fp8``, ``triton_mxfp8``,
``triton_mxfp4``, ``triton_nvfp4``, ``triton_fp8_block``.

Up to 16 tokens (64 with few rows) are limited by reading weights and take the kernel for small batches; more take a
GEMM that decodes weights on their way into the matrix unit; from 65 (SM90) or 256 on one layer's weights are unpacked
to bf16 and cuBLAS does the rest. All read one packed layout.

``triton_mxfp8_a8``, ``triton_mxfp4_a8``: the same weights times MXFP8 activations on block-scaled matrix instructions
(``mma.sync`` on SM120 and SM121, ``tcgen05.mma`` on SM100 and SM103). ``triton_nvfp4_a4``: NVFP4 weights times NVFP4
activations, likewise. Few tokens run with bf16 activations there too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from microscale.formats import BLOCK
from microscale.hardware import Feature, Gpu
from microscale.hardware.tiles.thresholds import ThresholdName, threshold
from microscale.hardware.triton_faults import USED_BY
from microscale.kernels.dense import gemm, logits_epilogue, small_batch, unpack
from microscale.kernels.dense.cost import (
    CUBLAS_REACHED,
    SMALL_BATCH_REACHED,
    activation_bytes,
    dense_flops,
    weight_bytes,
)
from microscale.kernels.dense.packed import PackedDense, layout_name, pack
from microscale.kernels.dense.spec import (
    DenseOp,
    DensePath,
    DenseSpec,
    DenseWeights,
    Logits,
    LogitsPath,
    Summed,
    SumPath,
    check_rows,
)
from microscale.kernels.layouts import TILE_ROWS
from microscale.kernels.op import Activations, Cost, MatrixUnit, Reason, always

if TYPE_CHECKING:
    from torch import Tensor


def _block_scaled(gpu: Gpu) -> bool:
    return gpu.has(Feature.MX_MMA) or gpu.has(Feature.TCGEN05)


def _reads_weights_once(spec: DenseSpec, gpu: Gpu) -> Reason | None:
    most = small_batch.MAX_TOKENS
    return None if spec.tokens <= most else f"reads the weights once for up to {most} tokens, not for {spec.tokens}"


def _small_batch(spec: DenseSpec, gpu: Gpu) -> Reason | None:
    if small_batch.takes(spec.tokens, spec.rows, gpu):
        return None
    most, few_rows = small_batch.MAX_TOKENS, threshold(ThresholdName.FEW_ROWS_TOKENS, gpu)
    return f"pays up to {most} tokens, with few rows up to {few_rows}, not for {spec.tokens} and {spec.rows} rows"


def _unpack(spec: DenseSpec, gpu: Gpu) -> Reason | None:
    least = threshold(ThresholdName.UNPACK_TOKENS, gpu)
    return None if spec.tokens >= least else f"pays from {least} tokens on, not for {spec.tokens}"


def _run_small_batch(packed: PackedDense, spec: DenseSpec, gpu: Gpu, x: Tensor, residual: Tensor | None) -> Tensor:
    return small_batch.run(packed, gpu, x, residual)


def _run_unpacked(packed: PackedDense, spec: DenseSpec, gpu: Gpu, x: Tensor, residual: Tensor | None) -> Tensor:
    return unpack.run(packed, x, residual)


def _run_gemm(packed: PackedDense, spec: DenseSpec, gpu: Gpu, x: Tensor, residual: Tensor | None) -> Tensor:
    return gemm.run(packed, gpu, x, residual)


def _run_block_scaled(packed: PackedDense, spec: DenseSpec, gpu: Gpu, x: Tensor, residual: Tensor | None) -> Tensor:
    return gemm.run(packed, gpu, x, residual, block_scaled=True)


def _small_batch_logits(packed: PackedDense, spec: DenseSpec, gpu: Gpu, x: Tensor) -> Logits:
    return small_batch.run_logits(packed, gpu, x, spec.softcap)


def _small_batch_from_sum(packed: PackedDense, spec: DenseSpec, gpu: Gpu, summed: Summed) -> tuple[Tensor, Tensor]:
    return small_batch.run_from_sum(packed, gpu, summed)


def _gemm_logits(packed: PackedDense, spec: DenseSpec, gpu: Gpu, x: Tensor) -> Logits:
    return logits_epilogue.capped(gemm.run_logits(packed, gpu, x), spec.softcap)


def _block_scaled_logits(packed: PackedDense, spec: DenseSpec, gpu: Gpu, x: Tensor) -> Logits:
    return logits_epilogue.capped(gemm.run_logits(packed, gpu, x, block_scaled=True), spec.softcap)


READS_ONCE = "it reads the weights at the memory's speed"
LAST = "it is the last"
SMALL_BATCH = DensePath("small batch", READS_ONCE, _small_batch, _run_small_batch)
SMALL_BATCH_BF16 = DensePath("small batch, bf16", READS_ONCE, _reads_weights_once, _run_small_batch)
UNPACKED = DensePath(
    "bf16 copy, cuBLAS", "the copy costs less than a GEMM that decodes loses against cuBLAS", _unpack, _run_unpacked
)
DOT, SCALED = USED_BY["dense GEMM"], USED_BY["dense GEMM, block-scaled"]
GEMM = DensePath("GEMM", LAST, always, _run_gemm, uses=DOT)
BLOCK_SCALED = DensePath("GEMM, block-scaled", LAST, always, _run_block_scaled, uses=SCALED)
FROM_SUM = SumPath(
    "small batch, norm inside", "it is the only one", small_batch.why_not_fused_norm, _small_batch_from_sum
)
SMALL_BATCH_LOGITS = LogitsPath("small batch", READS_ONCE, _reads_weights_once, _small_batch_logits)
SMALL_BATCH_BF16_LOGITS = replace(SMALL_BATCH_LOGITS, name="small batch, bf16")
GEMM_LOGITS = LogitsPath("GEMM", LAST, always, _gemm_logits, uses=DOT)
BLOCK_SCALED_LOGITS = LogitsPath("GEMM, block-scaled", LAST, always, _block_scaled_logits, uses=SCALED)
SCALED_NVFP4 = USED_BY["dense GEMM, NVFP4"]
BLOCK_SCALED_NVFP4 = replace(BLOCK_SCALED, name="GEMM, block-scaled NVFP4", uses=SCALED_NVFP4)
BLOCK_SCALED_NVFP4_LOGITS = replace(BLOCK_SCALED_LOGITS, name="GEMM, block-scaled NVFP4", uses=SCALED_NVFP4)


class Fragments(DenseOp[PackedDense]):
    """What the formats share."""

    uncapturable = None
    paths = (SMALL_BATCH, UNPACKED, GEMM)
    logits_paths = (SMALL_BATCH_LOGITS, GEMM_LOGITS)
    sum_paths = (FROM_SUM,)
    format: ClassVar[str]

    def supports(self, spec: DenseSpec, gpu: Gpu) -> Reason | None:
        if spec.weight_format != self.format:
            return f"reads {self.format} weights, not {spec.weight_format}"
        if spec.activations is not Activations.BF16:
            return f"multiplies with bf16 activations, not {spec.activations}"
        if not gpu.has(Feature.MMA_BF16):
            return f"needs bf16 matrix units, which {gpu.name} does not have"
        if spec.columns % BLOCK or spec.rows % TILE_ROWS:
            return f"needs multiples of {TILE_ROWS} rows and {BLOCK} columns, not {spec.rows} and {spec.columns}"
        return None

    def cost(self, spec: DenseSpec, gpu: Gpu) -> Cost:
        total, flops = weight_bytes(spec) + activation_bytes(spec), dense_flops(spec)
        if unpack.pays(spec.tokens, gpu):
            copied = 2 * 2 * spec.rows * spec.columns  # written and read
            return Cost(total + copied, flops, efficiency=CUBLAS_REACHED, launches=2)
        if not small_batch.takes(spec.tokens, spec.rows, gpu):
            return Cost(total, flops, efficiency=gemm.EFFICIENCY)
        # Read again for each further block of tokens: from L2, at no less than the memory's speed.
        again = (small_batch.passes(self.format, spec.rows, spec.tokens, gpu) - 1) * weight_bytes(spec)
        return Cost(total + again, flops, efficiency=SMALL_BATCH_REACHED[self.format][spec.tokens > 8])

    def packed_bytes(self, spec: DenseSpec) -> int:
        padded = replace(spec, columns=-(-spec.columns // 64) * 64)  # whole tiles
        return weight_bytes(padded)

    def pack(self, weights: DenseWeights, spec: DenseSpec) -> PackedDense:
        return pack(weights)

    def check(self, x: Tensor, residual: Tensor | None = None) -> None:
        check_rows(self.name, x, residual)


class BlockScaledFragments(DenseOp[PackedDense]):
    """Narrow activations; ``small_batch`` runs small batches, on the same packed weights."""

    uncapturable = None
    paths = (SMALL_BATCH_BF16, BLOCK_SCALED)
    logits_paths = (SMALL_BATCH_BF16_LOGITS, BLOCK_SCALED_LOGITS)
    sum_paths = (FROM_SUM,)
    small_batch: ClassVar[Fragments]
    activations = Activations.MXFP8
    unit = MatrixUnit.FP8

    def supports(self, spec: DenseSpec, gpu: Gpu) -> Reason | None:
        if spec.weight_format != self.small_batch.format:
            return f"reads {self.small_batch.format} weights, not {spec.weight_format}"
        if spec.activations is not self.activations:
            return f"multiplies with {self.activations} activations, not {spec.activations}"
        if not _block_scaled(gpu):
            return f"needs a block-scaled matrix instruction, which {gpu.name} does not have"
        return self.small_batch.supports(_with_bf16(spec), gpu)

    def cost(self, spec: DenseSpec, gpu: Gpu) -> Cost:
        if spec.tokens <= small_batch.MAX_TOKENS:
            return replace(self.small_batch.cost(_with_bf16(spec), gpu), runs_as=self.small_batch.name)
        # Half of the peak: unpacking runs next to the matrix unit. Not measured yet.
        total = weight_bytes(spec) + activation_bytes(spec)
        return Cost(total, dense_flops(spec), self.unit, efficiency=0.5, launches=2)

    def packed_bytes(self, spec: DenseSpec) -> int:
        return self.small_batch.packed_bytes(spec)

    def pack(self, weights: DenseWeights, spec: DenseSpec) -> PackedDense:
        return pack(weights)

    def check(self, x: Tensor, residual: Tensor | None = None) -> None:
        check_rows(self.name, x, residual)


def _with_bf16(spec: DenseSpec) -> DenseSpec:
    return replace(spec, activations=Activations.BF16)


class TritonFp8(Fragments):
    """E4M3 weights become bf16 in registers; the scale of a row is applied to its sum."""

    name = "triton_fp8"
    format = "fp8"
    layout = layout_name("fp8")


class TritonMxfp8(Fragments):
    """MXFP8 weights become bf16 in registers; sums in float32."""

    name = "triton_mxfp8"
    format = "mxfp8"
    layout = layout_name("mxfp8")


class TritonMxfp4(Fragments):
    """MXFP4 weights become bf16 in registers; sums in float32."""

    name = "triton_mxfp4"
    format = "mxfp4"
    layout = layout_name("mxfp4")


class TritonNvfp4(Fragments):
    """NVFP4 weights become bf16 in registers; the float32 scale of a row is applied to its sum."""

    name = "triton_nvfp4"
    format = "nvfp4"
    layout = layout_name("nvfp4")


class TritonFp8Block(Fragments):
    """FP8 weights under float32 scales of blocks become bf16 in registers; the scales apply to sums of 32 columns for
    few tokens, and to the weights for many."""

    name = "triton_fp8_block"
    format = "fp8_block"
    layout = layout_name("fp8_block")


class TritonMxfp8A8(BlockScaledFragments):
    """Both operands are E4M3 under scales per 32 values, which the matrix instruction applies."""

    name = "triton_mxfp8_a8"
    small_batch = TritonMxfp8()
    layout = small_batch.layout


class TritonMxfp4A8(BlockScaledFragments):
    """E2M1 weights become E4M3 in registers, exactly up to 2**6, and keep their scales."""

    name = "triton_mxfp4_a8"
    small_batch = TritonMxfp4()
    layout = small_batch.layout


class TritonNvfp4A4(BlockScaledFragments):
    """Both operands are E2M1 under E4M3 scales per 16 values, which the matrix instruction applies; the float32 scales
    of rows and of tokens are applied to the sums."""

    name = "triton_nvfp4_a4"
    small_batch = TritonNvfp4()
    layout = small_batch.layout
    activations = Activations.NVFP4
    unit = MatrixUnit.FP4
    paths = (SMALL_BATCH_BF16, BLOCK_SCALED_NVFP4)
    logits_paths = (SMALL_BATCH_BF16_LOGITS, BLOCK_SCALED_NVFP4_LOGITS)
