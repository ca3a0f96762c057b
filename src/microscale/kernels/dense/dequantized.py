"""``dense`` with weights in the activations' own type, through torch: cuBLAS on a GPU, a CPU's default."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from microscale.formats import FORMATS, BlockScaled, decode
from microscale.hardware import Gpu
from microscale.kernels.dense.cost import activation_bytes, dense_flops
from microscale.kernels.dense.spec import DenseSpec, DenseWeights
from microscale.kernels.op import Activations, Cost, Implementation, Reason, torch_dtype


class DequantizedDense(Implementation[DenseSpec]):
    """Decoded once, at load, to bf16 or float32."""

    op = "dense"
    name = "dequantized"
    layout = "dequantized"

    def supports(self, spec: DenseSpec, gpu: Gpu) -> Reason | None:
        if spec.weight_format not in ("bf16", *FORMATS):
            return f"reads bf16, {' and '.join(FORMATS)} weights, not {spec.weight_format}"
        if spec.activations is Activations.MXFP8:
            return "multiplies in bf16 or float32, not with mxfp8 activations"
        return None

    def cost(self, spec: DenseSpec, gpu: Gpu) -> Cost:
        size = torch_dtype(spec.activations).itemsize
        return Cost(spec.rows * spec.columns * size + activation_bytes(spec), dense_flops(spec), efficiency=0.6)

    def packed_bytes(self, spec: DenseSpec) -> int:
        return spec.rows * spec.columns * torch_dtype(spec.activations).itemsize

    def pack(self, weights: DenseWeights, spec: DenseSpec) -> DenseWeights:
        dtype = torch_dtype(spec.activations)
        weight = weights.weight
        weight = decode(weight, dtype) if isinstance(weight, BlockScaled) else weight.to(dtype)
        return DenseWeights(weight, None if weights.bias is None else weights.bias.to(dtype))

    def run(self, packed: DenseWeights, spec: DenseSpec, gpu: Gpu, x: Tensor, residual: Tensor | None = None) -> Tensor:
        assert isinstance(packed.weight, Tensor)  # what pack() made
        y = F.linear(x.to(packed.weight.dtype), packed.weight, packed.bias)
        return y if residual is None else y + residual
