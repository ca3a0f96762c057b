"""``triton_w4a8``: MXFP4 experts times MXFP8 activations on block-scaled matrix instructions.

E2M1 weights become E4M3 in registers, exactly up to 2**6, and both operands keep their scales per 32 values: the
matrix instruction applies them. That is ``mma.sync`` on SM120 and SM121 and ``tcgen05.mma`` on SM100 and SM103. Few
tokens are limited by reading weights, not by arithmetic, and run with bf16 activations on the same packed weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from microscale.formats import BLOCK, MXFP4, BlockFormat
from microscale.hardware import Feature, Gpu
from microscale.hardware.tiles import GemmPath
from microscale.kernels import layouts
from microscale.kernels.moe import grouped, small_batch
from microscale.kernels.moe.cost import activation_bytes, expert_flops, expert_weight_bytes
from microscale.kernels.moe.packed import PackedExperts, pack_experts
from microscale.kernels.moe.spec import Activations, MoeSpec, MoeWeights, Routing
from microscale.kernels.moe.w4a16 import TritonW4A16
from microscale.kernels.op import Cost, Implementation, Reason, Unit, Variant


class BlockScaledMoe(Implementation[MoeSpec]):
    """What ``triton_w4a8`` and ``triton_w8a8`` share: all but the weights' format."""

    op = "moe"
    format: ClassVar[BlockFormat]
    path: ClassVar[GemmPath]
    few: ClassVar[TritonW4A16]
    """Runs few tokens, on the same packed weights."""

    def supports(self, spec: MoeSpec, gpu: Gpu) -> Reason | None:
        if spec.weight_format != self.format.name:
            return f"reads {self.format.name} experts, not {spec.weight_format}"
        if spec.activations is not Activations.MXFP8:
            return f"multiplies with mxfp8 activations, not {spec.activations}"
        if not (gpu.has(Feature.MX_MMA) or gpu.has(Feature.TCGEN05)):
            # On fp8 units without it every group of 32 needs its own float32 multiply-add over the accumulators: as
            # many instructions as the bf16 matrix units take for the whole product.
            return f"needs a block-scaled matrix instruction, which {gpu.name} does not have"
        if spec.hidden % BLOCK or spec.intermediate % BLOCK:
            return f"needs widths that are multiples of {BLOCK}, not {spec.hidden} and {spec.intermediate}"
        return self.few.supports(_with_bf16(spec), gpu)

    def cost(self, spec: MoeSpec, gpu: Gpu) -> Cost:
        if spec.tokens <= small_batch.MAX_TOKENS:
            return self.few.cost(_with_bf16(spec), gpu)
        # Half of the peak: unpacking runs beside the matrix unit, and tails of tiles are padded. Not measured yet.
        total = expert_weight_bytes(spec) + activation_bytes(spec)
        return Cost(total, expert_flops(spec), Unit.FP8, efficiency=0.5)

    def pack(self, weights: MoeWeights, spec: MoeSpec) -> PackedExperts:
        return pack_experts(weights, spec.gate)

    def run(self, packed: PackedExperts, spec: MoeSpec, gpu: Gpu, x: Tensor, routing: Routing) -> Tensor:
        if x.shape[0] <= small_batch.MAX_TOKENS:
            return self.few.run(packed, _with_bf16(spec), gpu, x, routing)
        return grouped.run(packed, spec.gate, x, routing, gpu, block_scaled=True)

    def variants(self, gpu: Gpu) -> Iterator[Variant]:
        """The block-scaled kernels; those for few tokens are ``few``'s own."""
        if gpu.has(Feature.MX_MMA) or gpu.has(Feature.TCGEN05):
            yield from grouped.variants(gpu, self.name, self.path)


def _with_bf16(spec: MoeSpec) -> MoeSpec:
    return replace(spec, activations=Activations.BF16)


class TritonW4A8(BlockScaledMoe):
    name = "triton_w4a8"
    layout = layouts.layout_name(MXFP4)
    format = MXFP4
    path = GemmPath.W4A8
    few = TritonW4A16()
