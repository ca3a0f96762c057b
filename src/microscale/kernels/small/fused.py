"""``triton_small``: the small ops in few launches, on any GPU. Owns the launches."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from microscale.hardware import Feature, Gpu
from microscale.kernels.attention.spec import PagedKv
from microscale.kernels.moe import routing
from microscale.kernels.moe.spec import Routing
from microscale.kernels.op import Activations, Cost, Reason, Variant
from microscale.kernels.small import cost, fused_jit
from microscale.kernels.small.spec import RopeTable, SmallOps, SmallSpec

MAX_WIDTH = 16384
# Heads in one program of the rotation: 8 heads of 64 are 512 pairs of numbers' halves, 2 a thread with 4 warps.
BLOCK_HEADS = 8
ROPE_WARPS = 4
ROPE_HEAD_DIMS = (32, 64, 128, 256, 512)


def norm_warps(width: int) -> int:
    """8 elements a thread up to 8 warps."""
    return max(1, min(8, int(triton.next_power_of_2(width)) // 256))


class TritonSmall(SmallOps):
    """One launch for a norm, one for rotation and KV write, one for routing."""

    name = "triton_small"

    def supports(self, spec: SmallSpec, gpu: Gpu) -> Reason | None:
        if not gpu.has(Feature.MMA_BF16):
            return f"runs on GPUs, and this is a {gpu.name}"
        if spec.activations is not Activations.BF16:
            return f"takes bf16 activations, not {spec.activations}"
        if spec.hidden > MAX_WIDTH:
            return f"normalises up to {MAX_WIDTH} columns, not {spec.hidden}"
        if spec.head_dim not in ROPE_HEAD_DIMS:
            return f"has head sizes {', '.join(map(str, ROPE_HEAD_DIMS))}, not {spec.head_dim}"
        if spec.num_experts > routing.MAX_EXPERTS or spec.top_k > routing.MAX_TOP_K:
            return (
                f"routes to {routing.MAX_TOP_K} of {routing.MAX_EXPERTS} experts, "
                f"not {spec.top_k} of {spec.num_experts}"
            )
        return None

    def cost(self, spec: SmallSpec, gpu: Gpu) -> Cost:
        return Cost(cost.per_layer(spec), 0, efficiency=0.3)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        tokens, width = x.shape
        if tokens:
            fused_jit.rms_norm[(tokens,)](
                x, weight, out, epsilon, width, x.stride(0), out.stride(0),
                BLOCK=triton.next_power_of_2(width), num_warps=norm_warps(width),
                PLAIN=triton.knobs.runtime.interpret,
            )  # fmt: skip
        return out

    def rope_and_write_kv(
        self, qkv: Tensor, num_heads: int, positions: Tensor, table: RopeTable, kv: PagedKv, slots: Tensor
    ) -> Tensor:
        tokens, total, head_dim = qkv.shape
        q = torch.empty((tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
        if tokens:
            fused_jit.rope_and_write_kv[(tokens, triton.cdiv(total, BLOCK_HEADS))](
                qkv.contiguous(), positions, table.inverse_frequencies, slots, q, kv.k, kv.v, table.scale,
                num_heads, (total - num_heads) // 2, kv.page_size, kv.k.stride(0), kv.k.stride(1),
                BLOCK_H=BLOCK_HEADS, HALF=head_dim // 2, num_warps=ROPE_WARPS,
                PLAIN=triton.knobs.runtime.interpret,
            )  # fmt: skip
        return q

    def route(self, logits: Tensor, top_k: int) -> Routing:
        return routing.route(logits, top_k)

    def variants(self, gpu: Gpu) -> Iterator[Variant]:
        block = 256
        while block <= MAX_WIDTH:
            pointers = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "out_ptr": "*bf16"}
            sizes = {"epsilon": "fp32", "width": "i32", "stride_x": "i32", "stride_out": "i32"}
            yield Variant(
                op=self.op,
                implementation=self.name,
                name=f"rms_norm_{block}",
                fn=fused_jit.rms_norm,
                signature=pointers | sizes,
                constants={"BLOCK": block, "PLAIN": False},
                options={"num_warps": norm_warps(block)},
                divisible=(*pointers, "width", "stride_x", "stride_out"),
            )
            block *= 2
        yield from (self._rope_variant(head_dim) for head_dim in ROPE_HEAD_DIMS)
        yield from routing.variants(gpu)

    def _rope_variant(self, head_dim: int) -> Variant:
        pointers = {
            "qkv_ptr": "*bf16", "positions_ptr": "*i64", "frequencies_ptr": "*fp32", "slots_ptr": "*i64",
            "q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16",
        }  # fmt: skip
        strides = ("stride_page", "stride_kv_head")
        sizes = {"scale": "fp32", "heads": "i32", "kv_heads": "i32", "page_size": "i32"} | dict.fromkeys(strides, "i32")
        return Variant(
            op=self.op,
            implementation=self.name,
            name=f"rope_and_write_kv_d{head_dim}",
            fn=fused_jit.rope_and_write_kv,
            signature=pointers | sizes,
            constants={"BLOCK_H": BLOCK_HEADS, "HALF": head_dim // 2, "PLAIN": False},
            options={"num_warps": ROPE_WARPS},
            divisible=(*pointers, *strides),
        )
