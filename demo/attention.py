"""Attention within documents, with a learned sink for each head: plainly, and compiled for a GPU.

A sink is one more term in the softmax's denominator. With ``lse`` the logarithm of the denominator without it, the
output is multiplied by ``exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse - sink)``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from microscale.planning.ops import RopeTable

Mask = Tensor | BlockMask


def positions(documents: Tensor) -> Tensor:
    """``[rows, length]``: each token's place in its own document; documents lie one after the other."""
    at = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return at - torch.where(begins, at, 0).cummax(dim=1).values


def rope_of(table: RopeTable, places: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[rows, 1, length, head_dim / 2]``."""
    angles = places[:, None, :, None].float() * table.inverse_frequencies
    return angles.cos() * table.scale, angles.sin() * table.scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns dimension i with dimension i + half, as gpt-oss does."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def make_mask(documents: Tensor, window: int | None, flexible: bool) -> Mask:
    """Who sees whom: the same document, no later token, none beyond the window."""
    rows, length = documents.shape

    def sees(row: Any, head: Any, q: Any, k: Any) -> Any:
        seen = (documents[row, q] == documents[row, k]) & (k <= q)
        return seen if window is None else seen & (q - k < window)

    if flexible:
        return _block_mask()(sees, rows, None, length, length, documents.device)
    at = torch.arange(length, device=documents.device)
    mask: Tensor = sees(torch.arange(rows, device=documents.device)[:, None, None], None, at[:, None], at[None])
    return mask


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Mask, sinks: Tensor) -> Tensor:
    """``q [rows, heads, length, head_dim]``; scores and softmax in float32, all at once."""
    assert isinstance(mask, Tensor)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask[:, None], -torch.inf)
    sink = sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
    shares = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1]
    return shares.to(v.dtype) @ v


def flex(q: Tensor, k: Tensor, v: Tensor, mask: Mask, sinks: Tensor) -> Tensor:
    assert isinstance(mask, BlockMask)
    out, aux = _flex()(q, k, v, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
    weighted: Tensor = out * torch.sigmoid(aux.lse - sinks[:, None])[..., None].to(out.dtype)
    return weighted


@cache
def _flex() -> Callable[..., Any]:
    # One size, that of a training step: kernels for any size are slower.
    return torch.compile(flex_attention, dynamic=False)


@cache
def _block_mask() -> Callable[..., BlockMask]:
    return torch.compile(create_block_mask, dynamic=False)
