"""``triton_small``: the small ops in few launches, on any GPU. Owns the launches; norms are in ``norms.py``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from microscale.formats import BlockScaled
from microscale.hardware import Feature, Gpu
from microscale.kernels.attention.spec import PagedKv
from microscale.kernels.moe import routing
from microscale.kernels.moe.spec import Gate, GateKind, Routing
from microscale.kernels.numbers import cdiv
from microscale.kernels.op import Activations, Cost, Reason, Variant
from microscale.kernels.small import cost, fused_jit, norms
from microscale.kernels.small.norms import MAX_WIDTH, launch, make_variant
from microscale.kernels.small.spec import HeadNorms, RopeTable, Router, Sandwich, SmallOps, SmallSpec

# Numbers in one program of the rotation (H200, 8192 tokens, 80 heads of 64: 61 us with 32 heads and 2 warps, 82 with 4
# warps, 104 with 8 heads; 2048 tokens, 32 heads of 256: 29 us, and 27 with 4 warps).
ROPE_ELEMENTS = 2048
ROPE_WARPS = 2
ROPE_HEAD_DIMS = (32, 64, 128, 256, 512)
GATED_BLOCK = 512
GATED_WARPS = 4
GATED_RUNS = (0, 1, 8)
"""How gates and ups may be arranged, as ``fused_jit.gated`` has it."""


def block_heads(head_dim: int) -> int:
    return ROPE_ELEMENTS // head_dim


class TritonSmall(SmallOps):
    """One launch for a sum with its norm, one for rotation and KV write, one for sum, norm, router and top-k."""

    name = "triton_small"
    uncapturable = None

    def __init__(self, gpu: Gpu | None = None) -> None:
        self._pdl = gpu is not None and gpu.has(Feature.PDL)

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
        return norms.norm(x, None, weight, epsilon, self._pdl)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        return norms.norm(x, residual, weight, epsilon, self._pdl)

    def add_rms_norm_mxfp8(
        self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[BlockScaled, Tensor]:
        return norms.norm_mxfp8(x, residual, weight, epsilon, self._pdl)

    def norm_add_norm(
        self, x: Tensor, other: Tensor | None, residual: Tensor, sandwich: Sandwich
    ) -> tuple[Tensor, Tensor]:
        return norms.norm_add_norm(x, other, residual, sandwich, self._pdl)

    def norm_add_norm_route(
        self, x: Tensor, residual: Tensor, sandwich: Sandwich, router: Router, top_k: int
    ) -> tuple[Tensor, Tensor, Routing]:
        return norms.norm_add_norm_route(x, residual, sandwich, router, top_k, self._pdl)

    def add_norm_route(
        self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, router: Router, top_k: int
    ) -> tuple[Tensor, Tensor, Routing]:
        return norms.add_norm_route(x, residual, weight, epsilon, router, top_k, self._pdl)

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
        fused_jit.rope_and_write_kv[(tokens, cdiv(total, block_heads(head_dim)))](
            qkv.contiguous(), positions, table.inverse_frequencies, slots, *weights, q, kv.k, kv.v, *scales,
            table.scale, 0.0 if norms is None else norms.epsilon, num_heads, kv_heads,
            kv.page_size, kv.k.stride(0), kv.k.stride(1), per_head,
            BLOCK_H=block_heads(head_dim), HALF=head_dim // 2, NORM=norms is not None,
            SHARED=total == num_heads + kv_heads, FP8=kv.k.dtype == torch.uint8,
            **launch(self._pdl), num_warps=ROPE_WARPS,
        )  # fmt: skip
        return q

    def route(self, logits: Tensor, top_k: int, expert_scale: Tensor | None = None) -> Routing:
        return routing.route(logits, top_k, expert_scale)

    def gated(self, gate_up: Tensor, gate: Gate) -> Tensor:
        tokens, units = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((tokens, units), dtype=gate_up.dtype, device=gate_up.device)
        if tokens:
            fused_jit.gated[(tokens, cdiv(units, GATED_BLOCK))](
                gate_up, out, units, gate_up.stride(0), gate.alpha, gate.limit,
                BLOCK=GATED_BLOCK, GELU=gate.kind is GateKind.GELU_TANH, RUN=gate.run if gate.interleaved else 0,
                **launch(self._pdl), num_warps=GATED_WARPS,
            )  # fmt: skip
        return out

    def variants(self, gpu: Gpu) -> Iterator[Variant]:
        yield from norms.variants(gpu)
        common = {"PDL": gpu.has(Feature.PDL), "PLAIN": False}
        for head_dim in ROPE_HEAD_DIMS:
            for fp8 in (False, True):
                for norm, shared in ((False, False), (True, False), (True, True)):
                    yield _rope_variant(head_dim, fp8, norm, shared, common)
        for gelu in (False, True):
            for run in GATED_RUNS:
                flags = {"BLOCK": GATED_BLOCK, "GELU": gelu, "RUN": run} | common
                name = f"gated_{'gelu' if gelu else 'swiglu'}{f'_runs_of_{run}' if run else ''}"
                types = {"x_ptr": "*bf16", "out_ptr": "*bf16", "units": "i32", "stride_x": "i32"}
                types |= {"alpha": "fp32", "limit": "fp32"}
                yield make_variant(name, fused_jit.gated, types, flags, GATED_WARPS)
        yield from routing.variants(gpu)


def _rope_variant(head_dim: int, fp8: bool, norm: bool, shared: bool, common: dict[str, bool]) -> Variant:
    fn = fused_jit.rope_and_write_kv
    types = {arg: "*bf16" if arg.endswith("_ptr") else "i32" for arg in fn.arg_names}
    types |= {"positions_ptr": "*i64", "slots_ptr": "*i64", "frequencies_ptr": "*fp32", "scale": "fp32"}
    types |= {"epsilon": "fp32"}
    if fp8:
        types |= {"k_ptr": "*u8", "v_ptr": "*u8", "k_scale_ptr": "*fp32", "v_scale_ptr": "*fp32"}
    flags = {"BLOCK_H": block_heads(head_dim), "HALF": head_dim // 2, "NORM": norm, "SHARED": shared, "FP8": fp8}
    kinds = ((norm, "norm_"), (shared, "shared_"), (fp8, "fp8_"))
    name = f"rope_and_write_kv_{''.join(word for on, word in kinds if on)}d{head_dim}"
    return make_variant(name, fn, types, flags | common, ROPE_WARPS)
