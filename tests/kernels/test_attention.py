"""Attention over paged KV against the formula on plain tensors: pages in any order, NaN in every slot never written."""

from __future__ import annotations

import math

import pytest
import torch

from microscale import hardware
from microscale.kernels.attention.cost import attention_flops, kv_bytes, visible
from microscale.kernels.attention.reference import ReferenceAttention, attend, attention, gather
from microscale.kernels.attention.spec import AttentionBatch, AttentionSpec, PagedKv
from microscale.kernels.op import Activations
from microscale.kernels.small.reference import write_kv


def spec_of(
    heads: int, kv_heads: int, dim: int, window: int | None, page_size: int, sinks: bool = True
) -> AttentionSpec:
    return AttentionSpec(heads, kv_heads, dim, window, sinks, page_size, Activations.FLOAT32, tokens=1, context=64)


def by_formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, window: int | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """One query, one head, one key at a time, in float64."""
    out = torch.zeros_like(q, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for i in range(q.shape[0]):
        position = first + i
        lowest = 0 if window is None else max(0, position - window + 1)
        for head in range(q.shape[1]):
            keys = k[lowest : position + 1, head // group].double()
            scores = keys @ q[i, head].double() / math.sqrt(q.shape[2])
            top = max(scores.max(), sinks[head].double()) if sinks is not None else scores.max()
            weights = (scores - top).exp()
            total = weights.sum() + ((sinks[head].double() - top).exp() if sinks is not None else 0.0)
            out[i, head] = (weights / total) @ v[lowest : position + 1, head // group].double()
    return out


def poisoned(pages: int, kv_heads: int, page_size: int, dim: int) -> PagedKv:
    shape = (pages, kv_heads, page_size, dim)
    return PagedKv(torch.full(shape, math.nan), torch.full(shape, math.nan))


AttentionCase = tuple[int, int, int, int | None, int, list[tuple[int, int]]]
CASES: list[AttentionCase] = [
    # heads, kv_heads, dim, window, page_size, [(cached, new), …]
    (4, 2, 16, None, 4, [(0, 5)]),
    (4, 2, 16, 3, 4, [(0, 9), (6, 1), (0, 1)]),
    (8, 1, 32, 1, 16, [(17, 4), (3, 2)]),
    (6, 3, 8, 7, 5, [(0, 23)]),
    (2, 2, 64, 128, 16, [(31, 1), (32, 1), (0, 33)]),
    (4, 1, 16, 4, 1, [(9, 3), (0, 0), (2, 2)]),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("sink", [None, 0.0, 30.0, -30.0])
def test_paged_attention_is_the_formula(case: AttentionCase, sink: float | None) -> None:
    heads, kv_heads, dim, window, page_size, sequences = case
    generator = torch.Generator().manual_seed(0)
    spec = spec_of(heads, kv_heads, dim, window, page_size, sink is not None)
    sinks = None if sink is None else sink + torch.randn(heads, generator=generator)
    lens = [cached + new for cached, new in sequences]
    pages_each = [-(-n // page_size) for n in lens]
    order = torch.randperm(sum(pages_each) + 3, generator=generator).tolist()
    kv = poisoned(len(order), kv_heads, page_size, dim)
    width = max(pages_each)
    table = torch.zeros(len(sequences), width, dtype=torch.int32)
    starts, queries, want = [0], [], []
    for seq, (cached, new) in enumerate(sequences):
        n = cached + new
        for page in range(pages_each[seq]):
            table[seq, page] = order.pop()
        k, v = (torch.randn(n, kv_heads, dim, generator=generator) for _ in range(2))
        # Positions that no query of this step can see are never written: reading them would show.
        first_needed = 0 if window is None else max(0, cached - window + 1)
        positions = torch.arange(first_needed, n)
        slots = table[seq].long()[positions // page_size] * page_size + positions % page_size
        write_kv(k[first_needed:], v[first_needed:], kv, slots)
        q = torch.randn(new, heads, dim, generator=generator)
        starts.append(starts[-1] + new)
        queries.append(q)
        want.append(by_formula(q, k, v, cached, window, sinks))
    batch = AttentionBatch(
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(lens, dtype=torch.int32),
        table,
        max(new for _, new in sequences),
    )
    out = attention(torch.cat(queries), kv, batch, spec, sinks)
    torch.testing.assert_close(out.double(), torch.cat(want), rtol=1e-5, atol=1e-5)


def test_gather_crosses_pages_in_table_order() -> None:
    cache = torch.arange(5 * 2 * 3 * 1, dtype=torch.float32).view(5, 2, 3, 1)
    rows = gather(cache, None, torch.tensor([4, 0, 2], dtype=torch.int32), 2, 7)
    flat = torch.cat([cache[4], cache[0], cache[2]], dim=1)[:, 2:7]
    assert torch.equal(rows, flat)


def test_attend_of_the_first_token_returns_its_value() -> None:
    spec = spec_of(2, 1, 4, None, 16, sinks=False)
    v = torch.randn(1, 1, 4)
    out = attend(torch.randn(1, 2, 4), torch.randn(1, 1, 4), v, 0, 0, spec, None)
    torch.testing.assert_close(out, v.expand(1, 2, 4))


def test_costs_and_support() -> None:
    sliding = AttentionSpec(64, 8, 64, 128, True, 16, Activations.BF16, tokens=2, context=8192)
    full = AttentionSpec(64, 8, 64, None, True, 16, Activations.BF16, tokens=2, context=8192)
    assert (visible(sliding), visible(full)) == (128, 8192)
    assert kv_bytes(full) == 2 * 2 * 8192 * 8 * 64 * 2
    assert attention_flops(sliding) == 4 * 2 * 128 * 64 * 64
    implementation = ReferenceAttention()
    assert implementation.supports(full, hardware.cpu()) is None
    assert "6 over 4" in (implementation.supports(spec_of(6, 4, 8, None, 16), hardware.cpu()) or "")
