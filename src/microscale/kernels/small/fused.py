"""``triton_small``: the small ops in few launches, on any GPU. Owns the launches; norms are in ``norms.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from microscale.formats import BlockScaled
from microscale.hardware import Feature, Gpu
from microscale.kernels.attention.spec import PagedKv
from microscale.kernels.gate import gate_constants
from microscale.kernels.moe import routing
from microscale.kernels.moe.spec import Gate, Parts, Routing
from microscale.kernels.numbers import cdiv
from microscale.kernels.op import Activations, Cost, Reason
from microscale.kernels.small import cost, fused_jit, head_pass, norms
from microscale.kernels.small.norms import MAX_WIDTH, launch_small
from microscale.kernels.small.spec import HeadNorms, NormAddNorm, RopeTable, SmallOps, SmallSpec

if TYPE_CHECKING:
    from torch import Tensor

# Numbers in one program of the rotation (H200, 8192 tokens, 80 heads of 64: 61 us with 32 heads and 2 warps, 82 with 4
# warps, 104 with 8 heads; 2048 tokens, 32 heads of 256: 29 us, and 27 with 4 warps).
ROPE_ELEMENTS = 2048
ROPE_WARPS = 2
ROPE_HEAD_DIMS = (32, 64, 128, 256, 512)
GATED_BLOCK = 512
GATED_WARPS = 4


def block_heads(head_dim: int) -> int:
    return ROPE_ELEMENTS // head_dim


class TritonSmall(SmallOps):
    """One launch for a sum with its norm, one for rotation and KV write, one for sum, norm, router and top-k."""

    name = "triton_small"
    uncapturable = None
    route_paths = norms.ROUTE_PATHS
    norm_add_norm_route_paths = norms.NORM_ADD_NORM_ROUTE_PATHS

    def __init__(self, gpu: Gpu | None = None) -> None:
        self.pdl = gpu is not None and gpu.has(Feature.PDL)

    def on(self, gpu: Gpu) -> TritonSmall:
        return TritonSmall(gpu)

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

    def rms_norm(self, x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
        return norms.norm(x, None, weight, epsilon, self.pdl)[0]

    def add_rms_norm(
        self, x: Tensor | Parts, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        return norms.add_norm(x, residual, weight, epsilon, self.pdl)

    def add_rms_norm_mxfp8(
        self, x: Tensor | Parts, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[BlockScaled, Tensor]:
        return norms.add_norm_mxfp8(x, residual, weight, epsilon, self.pdl)

    def norm_add_norm(
        self, x: Tensor, other: Tensor | None, residual: Tensor, around: NormAddNorm
    ) -> tuple[Tensor, Tensor]:
        return norms.norm_add_norm(x, other, residual, around, self.pdl)

    def rope_and_write_kv(
        self,
        qkv: Tensor,
        num_heads: int,
        positions: Tensor,
        table: RopeTable,
        kv: PagedKv,
        slots: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        tokens, total, head_dim = qkv.shape
        kv_heads = kv.k.shape[1]
        q = torch.empty((tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
        if not tokens:
            return q
        weights = (q, q) if norms is None else (norms.q_weight, norms.k_weight)
        scales = (q, q) if kv.k_scale is None or kv.v_scale is None else (kv.k_scale, kv.v_scale)
        per_head = 0 if kv.k_scale is None or kv.k_scale.numel() == 1 else 1
        arguments = (
            qkv, positions, table.inverse_frequencies, slots, *weights, q, kv.k, kv.v, *scales,
            table.scale, 0.0 if norms is None else norms.epsilon, num_heads, kv_heads,
            kv.page_size, kv.k.stride(0), kv.k.stride(1), per_head, qkv.stride(0),
        )  # fmt: skip
        constants = {
            "BLOCK_H": block_heads(head_dim), "HALF": head_dim // 2, "NORM": norms is not None,
            "NORM_V": norms is not None and norms.values, "SHARED": total == num_heads + kv_heads,
            "FP8": kv.k.dtype == torch.uint8,
        }  # fmt: skip
        grid = (tokens, cdiv(total, block_heads(head_dim)))
        launch_small(fused_jit.rope_and_write_kv, grid, arguments, constants, ROPE_WARPS, self.pdl)
        return q

    def norm_pair(self, table: Tensor, token_ids: Tensor, hidden: Tensor, weights: Tensor, epsilon: float) -> Tensor:
        return head_pass.norm_pair(table, token_ids, hidden, weights, epsilon, self.pdl)

    def likeliest(self, block_max: Tensor, block_argmax: Tensor, target_ids: Tensor | None, out: Tensor) -> None:
        head_pass.likeliest(block_max, block_argmax, target_ids, out)

    def route(self, logits: Tensor, top_k: int, expert_scale: Tensor | None = None, *, always: bool = False) -> Routing:
        return routing.route(logits, top_k, expert_scale, always=always)

    def gate_heads(self, attended: Tensor, gates: Tensor) -> Tensor:
        tokens, width = attended.shape[0], attended.shape[1] * attended.shape[2]
        out = torch.empty((tokens, width), dtype=attended.dtype, device=attended.device)
        if tokens:
            arguments = (attended.contiguous(), gates, out, width, gates.stride(0))
            grid = (tokens, cdiv(width, GATED_BLOCK))
            launch_small(fused_jit.gate_heads, grid, arguments, {"BLOCK": GATED_BLOCK}, GATED_WARPS, self.pdl)
        return out

    def gated(self, gate_up: Tensor, gate: Gate) -> Tensor:
        tokens, units = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((tokens, units), dtype=gate_up.dtype, device=gate_up.device)
        if tokens:
            arguments = (gate_up, out, units, gate_up.stride(0))
            run = gate.run if gate.interleaved else 0
            constants = {"BLOCK": GATED_BLOCK, "RUN": run, **gate_constants(gate)}
            grid = (tokens, cdiv(units, GATED_BLOCK))
            launch_small(fused_jit.gated, grid, arguments, constants, GATED_WARPS, self.pdl)
        return out
