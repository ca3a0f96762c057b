"""The whole model on a real GPU with the kernels that the oracle chooses, against float32 references there."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from microscale.engine.config import EngineConfig
from microscale.models.gpt_oss.model import GptOss
from microscale.planning import registry
from microscale.planning.ops import Routing
from support.families import load_gpt_oss
from support.forced_routing import Run, assert_as_good_as_bf16, forced_run, reference_run, replaced
from support.forward import all_logits

# Head size and hidden size of gpt-oss, few experts and layers: every fast kernel takes part.
SHAPE = {"num_hidden_layers": 4, "num_local_experts": 16, "vocab_size": 4096}
pytestmark = pytest.mark.starts("gpt-oss-20b", SHAPE)
PROMPTS = [list(range(1, 301)), [5, 6, 7], list(range(1000, 1100))]


def load(dtype: str, backend: str | None) -> GptOss:
    options = EngineConfig(
        "gpt-oss-20b", load_format="dummy", device="cuda", dtype=dtype, backend=backend, hf_overrides=SHAPE
    )
    return load_gpt_oss(options)


@pytest.fixture(scope="module")
def truth() -> Run:
    return reference_run(load("float32", "reference"), PROMPTS, 512)


@pytest.fixture(scope="module")
def plain(truth: Run) -> Run:
    return forced_run(load("bfloat16", "reference"), PROMPTS, 512, truth)


@pytest.mark.parametrize("chunk", [512, 20, 1])
def test_fast_kernels_give_the_references_logits(truth: Run, plain: Run, chunk: int) -> None:
    """Every row, with the experts that the reference chose; see ``support/forced_routing.py``."""
    model = load("bfloat16", None)
    chosen = {decision.op: decision.chosen for decision in model.ops.plan.decisions.values()}
    assert chosen["moe"] == "triton_w4a16"
    assert chosen["attention"] == "triton_paged"
    assert chosen["small"] == "triton_small"
    assert_as_good_as_bf16(forced_run(model, PROMPTS, chunk, truth), plain, truth)


def test_one_token_has_the_same_bits_with_its_norms_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the first layer QKV adds and norms the token itself, where the card has programmatic launches."""
    model, prompt = load("bfloat16", None), list(range(1, 101))
    (together,) = all_logits(model, [prompt], 1)
    monkeypatch.setattr(type(registry.dense("triton_bf16")), "sum_paths", ())
    (apart,) = all_logits(load("bfloat16", None), [prompt], 1)
    assert torch.equal(together, apart)


class SumsItself:
    """Experts that leave no sum to the norm behind them."""

    def __init__(self, experts: Any) -> None:
        self._experts = experts

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        y: Tensor = self._experts(x, routing)
        return y

    def why_not_parts(self, tokens: int) -> str:
        return "sums by itself"


@pytest.mark.odd_shapes
@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_sums_of_experts_in_the_norm_change_no_bit(chunk: int) -> None:
    """Three sequences: 3, 6 and 21 tokens a step."""
    model = load("bfloat16", None)
    layers: Any = model.layers
    prompts = [list(range(1, 41)), list(range(300, 340)), list(range(1000, 1040))]
    assert all(layer.experts.why_not_parts(3 * chunk) is None for layer in layers)
    found = all_logits(model, prompts, chunk)
    with ExitStack() as changed:
        for layer in layers:
            changed.enter_context(replaced(layer, "experts", SumsItself(layer.experts)))
        wanted = all_logits(model, prompts, chunk)
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
