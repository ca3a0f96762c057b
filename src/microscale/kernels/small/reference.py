"""The small ops as plain torch on any device, in float32 inside."""

from __future__ import annotations

import torch
from torch import Tensor

from microscale.hardware import Gpu
from microscale.kernels.attention.spec import PagedKv
from microscale.kernels.moe.spec import Routing
from microscale.kernels.op import Activations, Cost, Implementation, Reason
from microscale.kernels.small import cost
from microscale.kernels.small.spec import RopeTable, SmallSpec


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


def route(logits: Tensor, top_k: int) -> Routing:
    """The ``top_k`` largest of ``logits [tokens, experts]`` with a softmax over just those."""
    values, ids = logits.float().topk(top_k, dim=-1)
    return Routing(ids.to(torch.int32), torch.softmax(values, dim=-1))


class ReferenceSmall(Implementation[SmallSpec]):
    """Plain torch, one op at a time."""

    op = "small"
    name = "reference"
    layout = "checkpoint"

    rms_norm = staticmethod(rms_norm)
    rope = staticmethod(rope)
    write_kv = staticmethod(write_kv)
    route = staticmethod(route)

    def supports(self, spec: SmallSpec, gpu: Gpu) -> Reason | None:
        if spec.activations is Activations.MXFP8:
            return "takes bf16 or float32 activations, not mxfp8"
        return None

    def cost(self, spec: SmallSpec, gpu: Gpu) -> Cost:
        return Cost(cost.per_layer(spec), 0, efficiency=0.05)
