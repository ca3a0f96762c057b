"""``triton_bf16``: bf16 weights for small batches, at memory speed. Large batches take cuBLAS (``dequantized``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from microscale.formats import BLOCK
from microscale.hardware import Feature, Gpu
from microscale.kernels.dense import small_batch
from microscale.kernels.dense.cost import SMALL_BATCH_REACHED, activation_bytes, dense_flops, weight_bytes
from microscale.kernels.dense.packed import ROW_MAJOR, row_major, to_row_major
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
from microscale.kernels.op import Activations, Cost, Reason, always

if TYPE_CHECKING:
    from torch import Tensor


def _run(packed: DenseWeights, spec: DenseSpec, gpu: Gpu, x: Tensor, residual: Tensor | None) -> Tensor:
    return small_batch.run(row_major(packed), gpu, x, residual)


def _run_logits(packed: DenseWeights, spec: DenseSpec, gpu: Gpu, x: Tensor) -> Logits:
    return small_batch.run_logits(row_major(packed), gpu, x, spec.softcap)


def _run_from_sum(packed: DenseWeights, spec: DenseSpec, gpu: Gpu, summed: Summed) -> tuple[Tensor, Tensor]:
    return small_batch.run_from_sum(row_major(packed), gpu, summed)


class TritonBf16(DenseOp[DenseWeights]):
    """Row-major weights, shared with cuBLAS: the oracle takes each where it is faster."""

    name = "triton_bf16"
    layout = ROW_MAJOR
    paths = (DensePath("small batch", "it is the only one", always, _run),)
    logits_paths = (LogitsPath("small batch", "it is the only one", always, _run_logits),)
    sum_paths = (
        SumPath("small batch, norm inside", "it is the only one", small_batch.why_not_fused_norm, _run_from_sum),
    )
    uncapturable = None

    def supports(self, spec: DenseSpec, gpu: Gpu) -> Reason | None:
        if spec.weight_format != "bf16":
            return f"reads bf16 weights, not {spec.weight_format}"
        if spec.activations is not Activations.BF16:
            return f"multiplies with bf16 activations, not {spec.activations}"
        if not gpu.has(Feature.MMA_BF16):
            return f"needs bf16 matrix units, which {gpu.name} does not have"
        if spec.columns % BLOCK:
            return f"needs a multiple of {BLOCK} columns, not {spec.columns}"
        return None

    def cost(self, spec: DenseSpec, gpu: Gpu) -> Cost:
        # More than 16 tokens read the weights again for each 16.
        total = weight_bytes(spec) * small_batch.passes("bf16", spec.rows, spec.tokens, gpu) + activation_bytes(spec)
        return Cost(total, dense_flops(spec), efficiency=SMALL_BATCH_REACHED["bf16"][spec.tokens > 8])

    def packed_bytes(self, spec: DenseSpec) -> int:
        return weight_bytes(spec)

    def pack(self, weights: DenseWeights, spec: DenseSpec) -> DenseWeights:
        return to_row_major(weights, torch.bfloat16)

    def check(self, x: Tensor, residual: Tensor | None = None) -> None:
        check_rows(self.name, x, residual)
