"""The reference's sampling for all rows at once: a hundred thousand draws in a second. A test holds it to be the
reference, token for token. No penalties."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from microscale.kernels.dense.spec import Logits
from microscale.kernels.sampling import reference
from microscale.kernels.sampling.spec import Sampled, SamplingBatch

_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def uniforms(seed: Tensor, position: Tensor) -> Tensor:
    """``reference.philox`` of each row, in [0, 1)."""
    seeds, places = (each.numpy().astype(np.uint64) for each in (seed, position))
    keys = [seeds & _WORD, seeds >> _HALF]
    counter = [places & _WORD, places >> _HALF, np.zeros_like(places), np.zeros_like(places)]
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * counter[0], np.uint64(0xCD9E8D57) * counter[2]
        high, low = b >> _HALF ^ counter[1] ^ keys[0], a >> _HALF ^ counter[3] ^ keys[1]
        counter = [high, b & _WORD, low, a & _WORD]
        keys = [keys[0] + np.uint64(0x9E3779B9) & _WORD, keys[1] + np.uint64(0xBB67AE85) & _WORD]
    return torch.from_numpy((counter[0] << _HALF | counter[1]).astype(np.float64) / 2.0**64)


def all_rows(logits: Tensor, batch: SamplingBatch, blocks: Logits | None = None) -> Sampled:
    """``reference.sample``."""
    assert batch.history is None
    biased = logits.float().clone()
    if batch.bias is not None:
        real = batch.bias.tokens >= 0
        values = torch.where(real, batch.bias.values, 0.0)
        biased.scatter_add_(1, batch.bias.tokens.clamp(min=0).long(), values)
    x = reference.adjust(biased, replace(batch, bias=None))
    status = reference.find_status(logits, x)
    ordered, order = x.double().sort(dim=-1, descending=True, stable=True)
    warm = batch.temperature.double().clamp(min=1e-9)[:, None]
    weights = ((ordered - ordered[:, :1]) / warm).exp()
    rank = torch.arange(x.shape[1])[None, :]
    kept = ~((batch.top_k[:, None] > 0) & (rank >= batch.top_k[:, None]))
    before = (weights * kept).cumsum(1) - weights * kept
    kept &= (batch.top_p[:, None] >= 1) | (
        before < batch.top_p[:, None].double() * (weights * kept).sum(1, keepdim=True)
    )
    kept &= weights >= batch.min_p[:, None].double() * weights[:, :1]
    in_place = torch.zeros_like(weights).scatter_(1, order, weights * kept)
    cumulated = in_place.cumsum(1) / in_place.sum(1, keepdim=True)
    last = (in_place > 0).int() * torch.arange(1, x.shape[1] + 1)
    drawn = (cumulated <= uniforms(batch.seed, batch.position)[:, None]).sum(1)
    drawn = torch.minimum(drawn, last.max(1).values - 1)
    chosen = torch.where(batch.temperature > 0, drawn, order[:, 0]).int()
    return reference._scored(logits, chosen, status, batch.top_logprobs)
