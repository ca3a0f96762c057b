"""Twins of ``kernels/moe/routing`` in plain torch: what its kernels are compared with."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from microscale.kernels.moe.routing import Dispatch, tile_bound
from microscale.kernels.moe.spec import Routing


class RouterKind(StrEnum):
    TOPK_SOFTMAX = "topk_softmax"
    """Top-k logits, softmax over the k (gpt-oss)."""
    SOFTMAX_TOPK = "softmax_topk"
    """Softmax over all, top-k, renormalise (Gemma)."""


def reference_route(logits: Tensor, top_k: int, kind: RouterKind, expert_scale: Tensor | None = None) -> Routing:
    """The twin of ``route`` in plain torch, each kind as its model states it."""
    logits = logits.float()
    logits = logits.where(~logits.isnan(), torch.nan)  # one NaN: a sort may rank those with a sign elsewhere
    scores = logits
    if kind is RouterKind.SOFTMAX_TOPK:
        scores = scores.softmax(dim=-1)
    # A stable descending sort puts NaN first and keeps equal logits in index order. Gemma's probabilities are ranked by
    # their logits: the order is the same, and two logits that round to one probability still differ.
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = scores.gather(1, ids)
    weights = chosen.softmax(dim=-1) if kind is RouterKind.TOPK_SOFTMAX else chosen / chosen.sum(dim=-1, keepdim=True)
    if expert_scale is not None:
        weights = weights * expert_scale.float()[ids]
    return Routing(ids.to(torch.int32), weights)


def reference_dispatch(expert_ids: Tensor, num_experts: int, block: int) -> Dispatch:
    """The twin of ``dispatch`` in plain torch."""
    flat = expert_ids.flatten().long()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=num_experts)
    offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    tiles: list[tuple[int, int, int, int]] = []
    for expert, (start, count) in enumerate(zip(offsets.tolist(), counts.tolist(), strict=False)):
        first = len(tiles)
        tiles += [(expert, start + done, min(block, count - done), first) for done in range(0, count, block)]
    tiles += [(-1, 0, 0, 0)] * (tile_bound(flat.numel(), num_experts, block) - len(tiles))
    table = torch.tensor(tiles, dtype=torch.int32, device=flat.device).view(-1, 4)
    return Dispatch(offsets.int(), order.int(), table, block, expert_ids.shape[1])
