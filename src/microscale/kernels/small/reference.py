"""The small ops as plain torch on any device, in float32 inside."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from microscale.formats import BlockScaled, mxfp8
from microscale.hardware import Gpu
from microscale.kernels.attention.spec import PagedKv
from microscale.kernels.moe.reference import apply_gate
from microscale.kernels.moe.spec import Gate, Parts, Routing
from microscale.kernels.op import Cost, Reason, always
from microscale.kernels.small import cost
from microscale.kernels.small.spec import (
    HeadNorms,
    NormAddNorm,
    NormAddNormRoutePath,
    RopeTable,
    Routed,
    RoutePath,
    Router,
    SmallOps,
    SmallSpec,
)

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """``x / sqrt(mean(x**2) + epsilon) * weight`` over the last axis."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide if weight is None else wide * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor | Parts, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The norm of ``x + residual``, as the residual stream holds that, and the sum."""
    total = (x.summed(residual.dtype) if isinstance(x, Parts) else x) + residual
    return rms_norm(total, weight, epsilon), total


def add_rms_norm_mxfp8(
    x: Tensor | Parts, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[BlockScaled, Tensor]:
    normed, total = add_rms_norm(x, residual, weight, epsilon)
    return mxfp8.encode(normed), total


def norm_pair(table: Tensor, token_ids: Tensor, hidden: Tensor, weights: Tensor, epsilon: float) -> Tensor:
    """Norms of rows of a table and of hidden states, side by side."""
    embedded = torch.nn.functional.embedding(token_ids, table).to(hidden.dtype)
    return torch.cat((rms_norm(embedded, weights[0], epsilon), rms_norm(hidden, weights[1], epsilon)), dim=1)


def likeliest(block_max: Tensor, block_argmax: Tensor, target_ids: Tensor | None, out: Tensor) -> None:
    """No second pass over the vocabulary: the largest of the blocks' largest, and where that is."""
    block = block_max.argmax(-1, keepdim=True)
    rows = block_argmax.gather(1, block)[:, 0].to(torch.int64)
    out.copy_(rows if target_ids is None else target_ids[rows])


def norm_add_norm(x: Tensor, other: Tensor | None, residual: Tensor, around: NormAddNorm) -> tuple[Tensor, Tensor]:
    """``x``, or ``x`` joined with ``other``, is normed and added to the residual; the sum is normed for each reader."""
    added = rms_norm(x, around.before, around.epsilon)
    if other is not None:
        joined = added + rms_norm(other, around.before_other, around.epsilon)
        added = rms_norm(joined, around.joined, around.epsilon)
    total = (residual + added) * around.scale
    return torch.stack([rms_norm(total, weight, around.epsilon) for weight in around.after]), total


def _routed(normed: Tensor, router: Router, top_k: int) -> Routing:
    """The experts of each token. Logits stay in float32."""
    bias = None if router.bias is None else router.bias.float()
    logits = torch.nn.functional.linear(normed.float(), router.weight.float(), bias)
    return route(logits, top_k, router.expert_scale, always=router.always)


def norm_add_norm_route(x: Tensor, residual: Tensor, around: NormAddNorm, router: Router, top_k: int) -> Routed:
    """Norm, sum, norms, and of the last norm router and top-k."""
    normed, total = norm_add_norm(x, None, residual, around)
    return normed[:-1], total, _routed(normed[-1], router, top_k)


def add_norm_route(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, router: Router, top_k: int) -> Routed:
    """Sum, norm, router and top-k."""
    normed, total = add_rms_norm(x, residual, weight, epsilon)
    return normed, total, _routed(normed, router, top_k)


def rope(x: Tensor, positions: Tensor, table: RopeTable) -> Tensor:
    """Rotate ``x [tokens, heads, head_dim]``: dimension i pairs with i + head_dim / 2."""
    angles = positions.float()[:, None] * table.inverse_frequencies[None, :]
    cos = (angles.cos() * table.scale)[:, None, :]
    sin = (angles.sin() * table.scale)[:, None, :]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def write_kv(k: Tensor, v: Tensor, kv: PagedKv, slots: Tensor) -> None:
    """Put ``k, v [tokens, kv_heads, head_dim]`` at ``slots [tokens]``, slot = page * page_size + offset.

    In E4M3 a number is divided by its head's scale, rounded to nearest even, and saturates at 448.
    """
    pages, offsets = slots // kv.page_size, slots % kv.page_size
    for x, cache, scale in ((k, kv.k, kv.k_scale), (v, kv.v, kv.v_scale)):
        cache[pages, :, offsets] = x.to(cache.dtype) if scale is None else mxfp8.round_e4m3(x.float() / scale[:, None])


def rope_and_write_kv(
    qkv: Tensor,
    num_heads: int,
    positions: Tensor,
    table: RopeTable,
    kv: PagedKv,
    slots: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Split ``qkv [tokens, heads + 2 * kv_heads, head_dim]``, norm, rotate q and k, put k and v away, and give q.

    Without heads for v (K = V), the value is the key's projection: without the key's weight, and not rotated.
    """
    kv_heads = kv.k.shape[1]
    q, k, v = qkv[:, :num_heads], qkv[:, num_heads : num_heads + kv_heads], qkv[:, -kv_heads:]
    if norms is not None:
        q, k = rms_norm(q, norms.q_weight, norms.epsilon), rms_norm(k, norms.k_weight, norms.epsilon)
        v = rms_norm(v, None, norms.epsilon) if norms.values else v
    write_kv(rope(k, positions, table), v, kv, slots)
    return rope(q, positions, table)


def route(logits: Tensor, top_k: int, expert_scale: Tensor | None = None, *, always: bool = False) -> Routing:
    """The ``top_k`` largest of ``logits [tokens, experts]`` with a softmax over just those, times the experts' scales.

    A softmax over all experts, renormalised over the chosen ones, is the same.
    """
    logits, last = (logits[:, :-1].float(), logits[:, -1:].float()) if always else (logits.float(), None)
    values, ids = logits.topk(top_k - always, dim=-1)
    weights = torch.softmax(values, dim=-1)
    if last is not None:
        ids = torch.cat((ids, torch.full_like(ids[:, :1], logits.shape[1])), dim=1)
        weights = torch.cat((weights, torch.sigmoid(last)), dim=1)
    return Routing(ids.to(torch.int32), weights if expert_scale is None else weights * expert_scale.float()[ids])


def gate_heads(attended: Tensor, gates: Tensor) -> Tensor:
    """``attended`` times a sigmoid, with the heads joined."""
    return (attended.float() * torch.sigmoid(gates.float())).to(attended.dtype).flatten(1)


def gated(gate_up: Tensor, gate: Gate) -> Tensor:
    """``[tokens, 2 * units]`` → ``[tokens, units]``."""
    return apply_gate(gate_up.float(), gate).to(gate_up.dtype)


def _route(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, router: Router, top_k: int, pdl: bool
) -> Routed:
    return add_norm_route(x, residual, weight, epsilon, router, top_k)


def _norm_add_norm_route(
    x: Tensor, residual: Tensor, around: NormAddNorm, router: Router, top_k: int, pdl: bool
) -> Routed:
    return norm_add_norm_route(x, residual, around, router, top_k)


class ReferenceSmall(SmallOps):
    """Plain torch, one op at a time."""

    name = "reference"
    uncapturable = None
    route_paths = (RoutePath("op by op", "it is the only one", always, _route),)
    norm_add_norm_route_paths = (NormAddNormRoutePath("op by op", "it is the only one", always, _norm_add_norm_route),)

    rms_norm = staticmethod(rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    add_rms_norm_mxfp8 = staticmethod(add_rms_norm_mxfp8)
    norm_add_norm = staticmethod(norm_add_norm)
    rope_and_write_kv = staticmethod(rope_and_write_kv)
    norm_pair = staticmethod(norm_pair)
    likeliest = staticmethod(likeliest)
    route = staticmethod(route)
    gate_heads = staticmethod(gate_heads)
    gated = staticmethod(gated)

    def supports(self, spec: SmallSpec, gpu: Gpu) -> Reason | None:
        if spec.activations.narrow:
            return f"takes bf16 or float32 activations, not {spec.activations}"
        return None

    def cost(self, spec: SmallSpec, gpu: Gpu) -> Cost:
        return Cost(cost.per_layer(spec), 0, efficiency=0.05)
