"""Routing: the twins in plain torch, and the kernels under the interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from microscale.kernels.launch import Kernel, recording
from microscale.kernels.moe import routing
from microscale.kernels.moe.routing import tile_bound
from microscale_lab.cases.routing_twins import RouterKind, reference_dispatch, reference_route
from support.interpreter import first_and_all, run_cases


@first_and_all
def test_under_the_interpreter(which: str) -> None:
    run_cases("cases_moe_routing.py", which, beside=__file__)


def test_both_kinds_of_router_are_one_function() -> None:
    logits = 3 * torch.randn(50, 128, generator=torch.Generator().manual_seed(0))
    first = reference_route(logits, 8, RouterKind.TOPK_SOFTMAX)
    second = reference_route(logits, 8, RouterKind.SOFTMAX_TOPK)
    assert torch.equal(first.expert_ids, second.expert_ids)
    torch.testing.assert_close(first.weights, second.weights, rtol=1e-5, atol=0)


def test_the_twin_agrees_with_topk() -> None:
    logits = torch.randn(50, 128, generator=torch.Generator().manual_seed(0))
    values, ids = logits.topk(4, dim=-1)
    twin = reference_route(logits, 4, RouterKind.TOPK_SOFTMAX)
    assert torch.equal(twin.expert_ids, ids.int())
    torch.testing.assert_close(twin.weights, values.softmax(-1))


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 40), st.integers(1, 12), st.integers(1, 9), st.integers(0, 2**31))
def test_tiles_cover_each_pair_once(tokens: int, num_experts: int, block: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    top_k = min(3, num_experts)
    ids = torch.rand(tokens, num_experts, generator=generator).argsort(-1)[:, :top_k].int()
    found = reference_dispatch(ids, num_experts, block)
    assert sorted(found.order.tolist()) == list(range(ids.numel()))
    places = [0] * ids.numel()
    for index, (expert, start, count, first) in enumerate(found.tiles.tolist()):
        if expert < 0:
            assert (start, count, first) == (0, 0, 0)
            continue
        assert 1 <= count <= block
        assert start == found.offsets[expert] + (index - first) * block
        for place in range(start, start + count):
            places[place] += 1
            assert ids.flatten()[found.order[place]] == expert
    assert places == [1] * ids.numel()


def test_the_bound_is_reached_and_tight() -> None:
    # One pair on each of 3 experts and all others on the first: 1 + 1 + 1 + (10 - 3) // 4 tiles.
    assert tile_bound(10, 3, 4) == 4
    assert tile_bound(2, 128, 16) == 2
    assert tile_bound(0, 128, 16) == 0
    ids = torch.tensor([0] * 8 + [1, 2], dtype=torch.int32)[:, None]
    assert int((reference_dispatch(ids, 3, 4).tiles[:, 0] >= 0).sum()) == 4


@pytest.mark.parametrize(("experts", "top_k"), [(32, 4), (128, 8), (512, 16)])
def test_kernels_depend_on_the_path_and_not_on_the_number_of_tokens(experts: int, top_k: int) -> None:
    """A router of up to 64 tokens: one kernel for each power of two; of more: one. A sort: the same three for all."""

    def routers(tokens: int) -> set[Kernel]:
        logits = torch.empty((tokens, experts), dtype=torch.bfloat16, device="meta")
        with recording() as found:
            routing.route(logits, top_k)
        return set(found)

    def sorters(tokens: int) -> set[Kernel]:
        ids = torch.empty((tokens, top_k), dtype=torch.int32, device="meta")
        with recording() as found:
            routing.dispatch(ids, experts, 64)
        return set(found)

    assert [kernel.short_name for kernel in routers(5)] == ["choose_many"]
    assert routers(5) == routers(7) == routers(8) != routers(4)
    assert routers(3000) == routers(3001) == routers(4096) != routers(5)
    assert {kernel.short_name for kernel in sorters(3000)} == {"choose_many", "prefix_counts", "place_many"}
    assert sorters(65) == sorters(3000) == sorters(3001) == sorters(4096)
