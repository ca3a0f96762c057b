"""``dense`` with weights in the activations' own type, through torch: cuBLAS on a GPU, a CPU's default.

On a GPU this is what runs large batches of bf16 weights: cuBLAS there is as fast as anything of ours would be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from microscale.hardware import Gpu
from microscale.kernels.dense import logits_epilogue, reference
from microscale.kernels.dense.cost import CUBLAS_REACHED, activation_bytes, dense_flops
from microscale.kernels.dense.packed import ROW_MAJOR, to_row_major
from microscale.kernels.dense.spec import FORMATS, DenseOp, DensePath, DenseSpec, DenseWeights, Logits, LogitsPath
from microscale.kernels.linear import linear
from microscale.kernels.op import Activations, Cost, Reason, always, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor


def _run(packed: DenseWeights, spec: DenseSpec, gpu: Gpu, x: Tensor, residual: Tensor | None) -> Tensor:
    assert isinstance(packed.weight, torch.Tensor)  # what pack() made
    y = linear(x.to(packed.weight.dtype), packed.weight, packed.bias)
    return y if residual is None else y + residual


def _run_logits(packed: DenseWeights, spec: DenseSpec, gpu: Gpu, x: Tensor) -> Logits:
    """bf16 weights, float32 sums and answers."""
    assert isinstance(packed.weight, torch.Tensor)  # what pack() made
    if x.is_meta:  # a shape alone: see ``linear``
        return logits_epilogue.summarise(x.new_empty((x.shape[0], spec.rows), dtype=torch.float32), spec.softcap)
    values = torch.mm(x, packed.weight.T, out_dtype=torch.float32)
    values = values if packed.bias is None else values + packed.bias.float()
    return logits_epilogue.summarise(values, spec.softcap)


def _mixed_product(spec: DenseSpec, gpu: Gpu) -> Reason | None:
    """cuBLAS multiplies bf16 and answers in float32."""
    if gpu.is_cpu:
        return "needs cuBLAS, and this is a CPU"
    return None if spec.activations is Activations.BF16 else f"multiplies bf16 weights, not {spec.activations}"


class DequantizedDense(DenseOp[DenseWeights]):
    """cuBLAS on weights that were decoded once, at load, to bf16 or float32 (bf16 ones are as they were)."""

    name = "dequantized"
    layout = ROW_MAJOR
    paths = (DensePath("torch", "it is the only one", always, _run),)
    logits_paths = (
        LogitsPath("cuBLAS, float32 sums", "it reads bf16 weights as they are", _mixed_product, _run_logits),
        LogitsPath("float32", "it is the last", always, reference.run_logits),
    )
    uncapturable = None

    def supports(self, spec: DenseSpec, gpu: Gpu) -> Reason | None:
        if spec.weight_format not in FORMATS:
            return f"reads {', '.join(FORMATS)} weights, not {spec.weight_format}"
        if spec.activations.narrow:
            return f"multiplies in bf16 or float32, not with {spec.activations} activations"
        return None

    def cost(self, spec: DenseSpec, gpu: Gpu) -> Cost:
        size = spec.activations.itemsize
        total = spec.rows * spec.columns * size + activation_bytes(spec)
        return Cost(total, dense_flops(spec), efficiency=CUBLAS_REACHED, chained=False)

    def packed_bytes(self, spec: DenseSpec) -> int:
        return spec.rows * spec.columns * spec.activations.itemsize

    def pack(self, weights: DenseWeights, spec: DenseSpec) -> DenseWeights:
        return to_row_major(weights, torch_dtype(spec.activations))
