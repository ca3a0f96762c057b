"""Routing kernels against their torch twins. Runs under the interpreter, or on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from microscale.errors import Unsupported
from microscale.hardware import known
from microscale.kernels.moe import routing
from microscale_lab.cases import routing as cases
from microscale_lab.cases.case import hold
from microscale_lab.cases.routing import SIZES
from microscale_lab.cases.routing_twins import RouterKind, reference_dispatch, reference_route

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = known("gb10")


def make_logits(tokens: int, num_experts: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return cases.make_logits(tokens, num_experts, DEVICE, dtype)


def assert_same_dispatch(actual: routing.Dispatch, expected: routing.Dispatch) -> None:
    hold(cases.hold_dispatch(actual, expected))


@pytest.mark.parametrize("kind", list(RouterKind))
@pytest.mark.parametrize("tokens, num_experts, top_k", SIZES)
def test_route_is_the_twin(tokens: int, num_experts: int, top_k: int, kind: RouterKind) -> None:
    hold(cases.RouteCase("", tokens, num_experts, top_k, kind).start(GPU, DEVICE)())


@pytest.mark.parametrize("block", [8, 32])
@pytest.mark.parametrize("tokens, num_experts, top_k", SIZES)
def test_dispatch_is_the_twin(tokens: int, num_experts: int, top_k: int, block: int) -> None:
    hold(cases.DispatchCase("", tokens, num_experts, top_k, block).start(GPU, DEVICE)())


@pytest.mark.parametrize("tokens", [9, 150])
def test_all_tokens_on_the_same_experts(tokens: int) -> None:
    logits = torch.zeros(tokens, 128, device=DEVICE)  # all tie: experts 0 to 3 win
    chosen = routing.route(logits, 4)
    found = routing.dispatch(chosen.expert_ids, 128, 16)
    assert chosen.expert_ids.tolist() == [[0, 1, 2, 3]] * tokens
    assert found.counts.tolist() == [tokens] * 4 + [0] * 124
    assert_same_dispatch(found, reference_dispatch(chosen.expert_ids, 128, 16))


@pytest.mark.parametrize("tokens", [4, 70])
def test_equal_logits_go_to_the_lowest_index(tokens: int) -> None:
    logits = torch.zeros(tokens, 64, device=DEVICE)
    logits[:, 10::2] = -0.0
    logits[:, 20] = 1.0
    assert routing.route(logits, 4).expert_ids.tolist() == [[20, 0, 1, 2]] * tokens


@pytest.mark.parametrize("tokens", [5, 130])
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), float("-inf")])
def test_broken_logits_stay_in_range(tokens: int, bad: float) -> None:
    logits = make_logits(tokens, 40)
    logits[1, 7] = bad
    logits[2, :] = bad
    chosen = routing.route(logits, 4)
    found = routing.dispatch(chosen.expert_ids, 40, 8)
    want = reference_route(logits, 4, RouterKind.TOPK_SOFTMAX)
    assert torch.equal(chosen.expert_ids, want.expert_ids)
    assert chosen.expert_ids[2].tolist() == [0, 1, 2, 3]
    assert torch.equal(chosen.weights.isnan(), want.weights.isnan())
    assert chosen.weights[2].isnan().all()
    assert not chosen.weights[0].isnan().any()
    assert_same_dispatch(found, reference_dispatch(chosen.expert_ids, 40, 8))


def test_rows_of_a_wider_matrix() -> None:
    wide = make_logits(6, 64)
    wide[:, 48:] = float("nan")  # poison beside the logits
    actual = routing.route(wide[:, :48], 4)
    assert torch.equal(actual.expert_ids, reference_route(wide[:, :48], 4, RouterKind.TOPK_SOFTMAX).expert_ids)
    assert not actual.weights.isnan().any()


def test_no_tokens() -> None:
    chosen = routing.route(torch.empty(0, 16, device=DEVICE), 4)
    found = routing.dispatch(chosen.expert_ids, 16, 8)
    assert chosen.expert_ids.shape == chosen.weights.shape == (0, 4)
    assert_same_dispatch(found, reference_dispatch(chosen.expert_ids, 16, 8))


@pytest.mark.parametrize("num_experts, top_k", [(513, 4), (64, 17), (4, 5), (8, 0)])
def test_what_does_not_fit_is_refused(num_experts: int, top_k: int) -> None:
    with pytest.raises(Unsupported, match=r"Routing takes"):
        routing.route(torch.zeros(2, num_experts, device=DEVICE), top_k)
