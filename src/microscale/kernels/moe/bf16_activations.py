"""``triton_w4a16``, ``triton_w8a16``, ``triton_nvfp4_a16`` and ``triton_fp8b_a16``: MXFP4, MXFP8, NVFP4 and FP8
experts times bf16 activations, exact up to bf16 rounding, on any GPU from SM80 on.

Up to 64 tokens are limited by reading the weights and take the small-batch kernels; more take a grouped GEMM, on
``wgmma`` where the card has it. ``paths`` has these ways. All read one packed layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from microscale.errors import Unsupported
from microscale.formats import BLOCK, FP8_BLOCK, MXFP4, MXFP8, NVFP4, BlockFormat
from microscale.hardware import Feature, Gpu
from microscale.hardware.tiles.gemm import GemmPath
from microscale.kernels import layouts
from microscale.kernels.moe import small_batch, with_mlp
from microscale.kernels.moe.cost import activation_bytes, expert_flops, expert_weight_bytes
from microscale.kernels.moe.packed import PackedExperts, pack_experts, packed_bytes
from microscale.kernels.moe.paths import BF16_PATHS, PARTS_PATHS
from microscale.kernels.moe.spec import Activations, MoeOp, MoeSpec, MoeWeights
from microscale.kernels.op import Cost, Reason

if TYPE_CHECKING:
    from torch import Tensor


class TritonW4A16(MoeOp[PackedExperts]):
    """MXFP4 weights become bf16 in registers; sums in float32."""

    uncapturable = None
    name = "triton_w4a16"
    layout = layouts.layout_name(MXFP4)
    format: ClassVar[BlockFormat] = MXFP4
    path: ClassVar[GemmPath] = GemmPath.W4A16
    paths = BF16_PATHS
    parts_paths = PARTS_PATHS

    def supports(self, spec: MoeSpec, gpu: Gpu) -> Reason | None:
        if spec.weight_format != self.format.name:
            return f"reads {self.format.name} experts, not {spec.weight_format}"
        if spec.activations is not Activations.BF16:
            return f"multiplies with bf16 activations, not {spec.activations}"
        if not gpu.has(Feature.MMA_BF16):
            return f"needs bf16 matrix units, which {gpu.name} does not have"
        if spec.hidden % BLOCK or spec.intermediate % BLOCK:
            return f"needs widths that are multiples of {BLOCK}, not {spec.hidden} and {spec.intermediate}"
        if spec.top_k > small_batch.MAX_TOP_K:
            return f"sums up to {small_batch.MAX_TOP_K} experts a token, not {spec.top_k}"
        return None

    def cost(self, spec: MoeSpec, gpu: Gpu) -> Cost:
        # Measured on an H200, gpt-oss-120b: 58 % of the floor's speed for one token, 81 % for 8, 88 % for 64, 79 % for
        # 256, 45 % for 2048, 68 % for 8192. Elsewhere an assumption.
        if spec.tokens <= small_batch.DIRECT_TOKENS:
            efficiency = 0.55
        else:
            efficiency = 0.8 if spec.tokens <= small_batch.MAX_TOKENS else 0.5
        return Cost(expert_weight_bytes(spec) + activation_bytes(spec), expert_flops(spec), efficiency=efficiency)

    def packed_bytes(self, spec: MoeSpec) -> int:
        return packed_bytes(spec)

    def pack(self, weights: MoeWeights, spec: MoeSpec) -> PackedExperts:
        return pack_experts(weights, spec.gate)

    def check(self, x: Tensor) -> None:
        if x.dtype != torch.bfloat16 or x.stride(1) != 1:
            raise Unsupported(f"{self.name} reads rows of bfloat16, not {x.dtype} with strides {x.stride()}.")


class TritonW8A16(TritonW4A16):
    """MXFP8 weights become bf16 in registers; sums in float32."""

    name = "triton_w8a16"
    layout = layouts.layout_name(MXFP8)
    format = MXFP8
    path = GemmPath.W8A16
    mlp_paths = (with_mlp.PATH,)


class TritonNvfp4A16(TritonW4A16):
    """NVFP4 weights become bf16 in registers, their scales with them; the float32 scale of a row is applied to its
    sum."""

    name = "triton_nvfp4_a16"
    layout = layouts.layout_name(NVFP4)
    format = NVFP4


class TritonFp8BlockA16(TritonW4A16):
    """FP8 weights under float32 scales of blocks become bf16 in registers; the scales apply to sums of 32 columns for
    few tokens, and to the weights for many."""

    name = "triton_fp8b_a16"
    layout = layouts.layout_name(FP8_BLOCK)
    format = FP8_BLOCK
    path = GemmPath.W8A16
