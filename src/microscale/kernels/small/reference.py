"""The small ops as plain torch on any device, in float32 inside."""

from __future__ import annotations

import torch
from torch import Tensor

from microscale.hardware import Gpu
from microscale.kernels.attention.spec import PagedKv
from microscale.kernels.moe.spec import Routing
from microscale.kernels.op import Activations, Cost, Reason
from microscale.kernels.small import cost
from microscale.kernels.small.spec import RopeTable, SmallOps, SmallSpec


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """``x / sqrt(mean(x**2) + epsilon) * weight`` over the last axis."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * weight.float()).to(x.dtype)


def rope(x: Tensor, positions: Tensor, table: RopeTable) -> Tensor:
    """Rotate ``x [tokens, heads, head_dim]``: dimension i pairs with i + head_dim / 2."""
    angles = positions.float()[:, None] * table.inverse_frequencies[None, :]
    cos = (angles.cos() * table.scale)[:, None, :]
    sin = (angles.sin() * table.scale)[:, None, :]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def write_kv(k: Tensor, v: Tensor, kv: PagedKv, slots: Tensor) -> None:
    """Put ``k, v [tokens, kv_heads, head_dim]`` at ``slots [tokens]``, slot = page * page_size + offset."""
    pages, offsets = slots // kv.page_size, slots % kv.page_size
    kv.k[pages, :, offsets] = k.to(kv.k.dtype)
    kv.v[pages, :, offsets] = v.to(kv.v.dtype)


def rope_and_write_kv(
    qkv: Tensor, num_heads: int, positions: Tensor, table: RopeTable, kv: PagedKv, slots: Tensor
) -> Tensor:
    """Split ``qkv [tokens, heads + 2 * kv_heads, head_dim]``, rotate q and k, put k and v away, and give q."""
    kv_heads = (qkv.shape[1] - num_heads) // 2
    q, k, v = torch.split(qkv, [num_heads, kv_heads, kv_heads], dim=1)
    write_kv(rope(k, positions, table), v, kv, slots)
    return rope(q, positions, table)


def route(logits: Tensor, top_k: int) -> Routing:
    """The ``top_k`` largest of ``logits [tokens, experts]`` with a softmax over just those."""
    values, ids = logits.float().topk(top_k, dim=-1)
    return Routing(ids.to(torch.int32), torch.softmax(values, dim=-1))


class ReferenceSmall(SmallOps):
    """Plain torch, one op at a time."""

    name = "reference"

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return rms_norm(x, weight, epsilon)

    def rope_and_write_kv(
        self, qkv: Tensor, num_heads: int, positions: Tensor, table: RopeTable, kv: PagedKv, slots: Tensor
    ) -> Tensor:
        return rope_and_write_kv(qkv, num_heads, positions, table, kv, slots)

    def route(self, logits: Tensor, top_k: int) -> Routing:
        return route(logits, top_k)

    def supports(self, spec: SmallSpec, gpu: Gpu) -> Reason | None:
        if spec.activations is Activations.MXFP8:
            return "takes bf16 or float32 activations, not mxfp8"
        return None

    def cost(self, spec: SmallSpec, gpu: Gpu) -> Cost:
        return Cost(cost.per_layer(spec), 0, efficiency=0.05)
