"""``triton_w4a8`` and ``triton_w8a8``: MXFP4 and MXFP8 experts times 8-bit activations; ``triton_w4a4``: NVFP4
experts times NVFP4 activations.

*Block-scaled matrix instructions* (``mma.sync`` on SM120 and SM121, ``tcgen05.mma`` on SM100 and SM103): E2M1 weights
become E4M3 in registers, exactly up to 2**6, and both operands keep their scales per 32 values, which the instruction
applies. NVFP4 codes stay as they are, with their scales per 16 values on both sides; the float32 scales of weights' and
tokens' rows are applied to the sums.

*FP8 units without block scales* (``wgmma`` on SM90): the instruction sums over all of K, so a group's scale is folded
into the exponents of its weights, and activations are E4M3 under one power of two a token. Numbers within 2**-14 of a
token's largest round as in MXFP8; only smaller ones differ.

Few tokens are limited by reading weights, not by arithmetic, and run with bf16 activations on the same packed weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from microscale.formats import BLOCK, MXFP4, MXFP8, NVFP4, BlockFormat
from microscale.hardware import Feature, Gpu
from microscale.hardware.tiles.gemm import GemmPath
from microscale.kernels import layouts
from microscale.kernels.layouts import TILE_K
from microscale.kernels.moe import grouped_wgmma
from microscale.kernels.moe.bf16_activations import TritonNvfp4A16, TritonW4A16, TritonW8A16
from microscale.kernels.moe.cost import activation_bytes, expert_flops, expert_weight_bytes
from microscale.kernels.moe.packed import PackedExperts, pack_experts, packed_bytes
from microscale.kernels.moe.paths import MXFP8_PATHS, NVFP4_PATHS, PARTS_PATHS, block_scaled, pays_narrow
from microscale.kernels.moe.spec import Activations, MoeOp, MoeSpec, MoeWeights
from microscale.kernels.op import Cost, MatrixUnit, Reason

if TYPE_CHECKING:
    from torch import Tensor


class BlockScaledMoe(MoeOp[PackedExperts]):
    """What they share: all but the formats, and what wgmma can do with them."""

    uncapturable = None
    paths = MXFP8_PATHS
    parts_paths = PARTS_PATHS
    format: ClassVar[BlockFormat]
    path: ClassVar[GemmPath]
    activations = Activations.MXFP8
    unit = MatrixUnit.FP8
    small_batch: ClassVar[TritonW4A16]
    """Runs small batches, on the same packed weights."""

    def supports(self, spec: MoeSpec, gpu: Gpu) -> Reason | None:
        if spec.weight_format != self.format.name:
            return f"reads {self.format.name} experts, not {spec.weight_format}"
        if spec.activations is not self.activations:
            return f"multiplies with {self.activations} activations, not {spec.activations}"
        if not block_scaled(gpu) and (reason := self._unscaled_reason(spec, gpu)):
            return reason
        if spec.hidden % BLOCK or spec.intermediate % BLOCK:
            return f"needs widths that are multiples of {BLOCK}, not {spec.hidden} and {spec.intermediate}"
        return self.small_batch.supports(_with_bf16(spec), gpu)

    def _unscaled_reason(self, spec: MoeSpec, gpu: Gpu) -> Reason | None:
        """Why FP8 units without block scales cannot run the spec. MXFP8 weights need all of E4M3's exponents: every
        group of 32 would need its own float32 multiply-add over the accumulators, as many instructions as the bf16
        matrix units take for the whole product."""
        return f"needs a block-scaled matrix instruction, which {gpu.name} does not have"

    def cost(self, spec: MoeSpec, gpu: Gpu) -> Cost:
        if not pays_narrow(spec, gpu):
            return replace(self.small_batch.cost(_with_bf16(spec), gpu), runs_as=self.small_batch.name)
        # wgmma on an H200, gpt-oss-120b: 41 % of the FP8 floor's speed at 8192 tokens, 38 % at 2048, 58 % at 1024. Half
        # of the peak elsewhere: unpacking runs next to the matrix unit, and tails of tiles are padded. Unmeasured.
        total = expert_weight_bytes(spec) + activation_bytes(spec)
        return Cost(total, expert_flops(spec), self.unit, efficiency=0.5 if block_scaled(gpu) else 0.42)

    def packed_bytes(self, spec: MoeSpec) -> int:
        return packed_bytes(spec)

    def pack(self, weights: MoeWeights, spec: MoeSpec) -> PackedExperts:
        return pack_experts(weights, spec.gate)

    def check(self, x: Tensor) -> None:
        self.small_batch.check(x)


def _with_bf16(spec: MoeSpec) -> MoeSpec:
    return replace(spec, activations=Activations.BF16)


class TritonW4A8(BlockScaledMoe):
    name = "triton_w4a8"
    layout = layouts.layout_name(MXFP4)
    format = MXFP4
    path = GemmPath.W4A8
    small_batch = TritonW4A16()

    def _unscaled_reason(self, spec: MoeSpec, gpu: Gpu) -> Reason | None:
        if not gpu.has(Feature.WGMMA):
            return f"needs a block-scaled matrix instruction or wgmma, and {gpu.name} has neither"
        if grouped_wgmma.gate_scale(spec.gate) is None:
            return f"needs a clamped gate, whose output one scale fits, on wgmma; {spec.gate.kind} is not"
        if min(spec.hidden, spec.intermediate) <= TILE_K * (grouped_wgmma.MIN_K_TILES - 1):
            return f"needs more than {TILE_K * (grouped_wgmma.MIN_K_TILES - 1)} columns on wgmma"
        return None


class TritonW8A8(BlockScaledMoe):
    name = "triton_w8a8"
    layout = layouts.layout_name(MXFP8)
    format = MXFP8
    path = GemmPath.W8A8
    small_batch = TritonW8A16()


class TritonW4A4(BlockScaledMoe):
    name = "triton_w4a4"
    layout = layouts.layout_name(NVFP4)
    format = NVFP4
    path = GemmPath.W4A4
    activations = Activations.NVFP4
    unit = MatrixUnit.FP4
    paths = NVFP4_PATHS
    small_batch = TritonNvfp4A16()

    def cost(self, spec: MoeSpec, gpu: Gpu) -> Cost:
        cost = super().cost(spec, gpu)
        if cost.runs_as is not None:
            return cost
        # Both GEMMs' rows are read once more, in bf16. Unmeasured, as the speed in FP8 is there.
        rows = spec.tokens * spec.hidden + spec.tokens * spec.top_k * spec.intermediate
        return replace(cost, bytes=cost.bytes + 2 * rows, efficiency=0.4)
