"""The comparison of ``tests/gpu`` with the reference, on a CPU: it passes what only rounds, and sees what does more."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from microscale.engine.config import EngineConfig
from microscale.kernels.moe.spec import Routing
from microscale.models.families import AnyModel
from support.forced_routing import Run, assert_as_good_as_bf16, forced_run, reference_run, replaced, row_errors
from support.loading import load_model

SHAPES: dict[str, dict[str, object]] = {
    "gpt-oss-20b": {"num_local_experts": 16, "intermediate_size": 128},
    "gemma-4-26b-a4b": {"num_experts": 16, "intermediate_size": 128, "moe_intermediate_size": 64, "eos_token_id": [1]},
    "qwen3-30b-a3b": {"num_experts": 16, "moe_intermediate_size": 64, "eos_token_id": [1]},
}
SMALL = {"num_hidden_layers": 3, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
PROMPTS = [list(range(1, 51)), [5, 6, 7], list(range(100, 130))]
CHUNK = 20


@cache
def load(name: str, dtype: str, backend: str | None) -> AnyModel:
    overrides = SMALL | {"vocab_size": 256} | SHAPES[name]
    options = EngineConfig(
        name, load_format="dummy", device="cpu", dtype=dtype, backend=backend, hf_overrides=overrides
    )
    return load_model(options)


@cache
def truth(name: str) -> Run:
    return reference_run(load(name, "float32", "reference"), PROMPTS, 512)


@cache
def plain(name: str) -> Run:
    return forced_run(load(name, "bfloat16", "reference"), PROMPTS, 512, truth(name))


@pytest.mark.parametrize("name", SHAPES)
def test_bf16_in_another_order_passes(name: str) -> None:
    model = load(name, "bfloat16", None)
    assert {d.chosen for d in model.ops.plan.decisions.values() if d.op in ("moe", "dense")} == {"dequantized"}
    layers: Any = model.layers
    small = [layer.small for layer in layers]
    run = forced_run(model, PROMPTS, CHUNK, truth(name))
    assert_as_good_as_bf16(run, plain(name), truth(name))
    assert [layer.small for layer in layers] == small
    assert any(len(margins) for margins in run.ties.values()), "no token was near a tie: nothing was forced"
    assert row_errors(plain(name), truth(name)).min() > 0


def test_the_truths_own_routing_is_what_it_would_choose_again() -> None:
    name = "gpt-oss-20b"
    again = forced_run(load(name, "float32", "reference"), PROMPTS, 512, truth(name))
    assert torch.equal(again.logits, truth(name).logits)
    assert not any(len(margins) for margins in again.ties.values())


class Faulty:
    """Experts of which some rows come out wrong."""

    def __init__(self, experts: Any, rows: slice) -> None:
        self._experts, self._rows = experts, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        y: Tensor = self._experts(x, routing)
        y[self._rows] = y[self._rows].roll(1, dims=0)
        return y


@pytest.mark.parametrize("rows", [slice(None, None, 5), slice(3, 5)], ids=["a fifth", "two rows"])
def test_rows_that_are_ruined_are_seen(rows: slice) -> None:
    """Of most steps a fifth of the rows; the median and the third quartile show nothing of it."""
    name = "gpt-oss-20b"
    model = load(name, "bfloat16", None)
    layer: Any = model.layers[1]
    with replaced(layer, "experts", Faulty(layer.experts, rows)):
        run = forced_run(model, PROMPTS, CHUNK, truth(name))
    errors, usual = row_errors(run, truth(name)), row_errors(plain(name), truth(name))
    assert errors.median() < 2 * usual.median()
    with pytest.raises(AssertionError, match=r"row \d+ is off by"):
        assert_as_good_as_bf16(run, plain(name), truth(name))


class Elsewhere:
    """Small ops whose router sends one token of a step to the expert that it likes least."""

    def __init__(self, small: Any) -> None:
        self._small = small

    def __getattr__(self, name: str) -> Any:
        return getattr(self._small, name)

    def add_norm_route(self, x: Tensor, residual: Tensor, *others: Any) -> tuple[Tensor, Tensor, Routing]:
        normed, total, routing = self._small.add_norm_route(x, residual, *others)
        router = others[2]
        ids = routing.expert_ids.clone()
        ids[0, -1] = (normed[0].float() @ router.weight.float().T + router.bias.float()).argmin()
        return normed, total, Routing(ids, routing.weights)


def test_a_router_that_chooses_an_expert_far_below_is_seen() -> None:
    """Forcing the experts must not hide it."""
    name = "gpt-oss-20b"
    model = load(name, "bfloat16", None)
    layer: Any = model.layers[1]
    with replaced(layer, "small", Elsewhere(layer.small)):
        run = forced_run(model, PROMPTS, CHUNK, truth(name))
    with pytest.raises(AssertionError, match="layer 1 chose an expert"):
        assert_as_good_as_bf16(run, plain(name), truth(name))


def test_nan_is_seen() -> None:
    name = "gpt-oss-20b"
    run = plain(name)
    ruined = Run(run.logits.clone(), run.routings, run.ties)
    ruined.logits[7, 3] = torch.nan
    with pytest.raises(AssertionError):
        assert_as_good_as_bf16(ruined, plain(name), truth(name))
