"""Gemma 4 on a real GPU with the kernels that the oracle chooses, against float32 references there."""

from __future__ import annotations

import pytest

from microscale.engine.config import EngineConfig
from microscale.models.families import AnyModel
from support.forced_routing import Run, assert_as_good_as_bf16, forced_run, reference_run
from support.greedy import assert_decodes_the_likeliest
from support.loading import load_model

# Head sizes and widths of the real one, both kinds of layer, few experts: every fast kernel takes part.
SHAPE = {"num_hidden_layers": 6, "num_experts": 16, "vocab_size": 4096, "eos_token_id": [1]}
pytestmark = pytest.mark.starts("gemma-4-26b-a4b", SHAPE)
PROMPTS = [list(range(1, 301)), [5, 6, 7], list(range(1000, 2200))]


def load(dtype: str, backend: str | None) -> AnyModel:
    options = EngineConfig(
        "gemma-4-26b-a4b", load_format="dummy", device="cuda", dtype=dtype, backend=backend, hf_overrides=SHAPE
    )
    return load_model(options)


@pytest.fixture(scope="module")
def truth() -> Run:
    return reference_run(load("float32", "reference"), PROMPTS, 512)


@pytest.fixture(scope="module")
def plain(truth: Run) -> Run:
    return forced_run(load("bfloat16", "reference"), PROMPTS, 512, truth)


@pytest.fixture(scope="module")
def model() -> AnyModel:
    return load("bfloat16", None)


@pytest.mark.parametrize("chunk", [1200, 20])
def test_fast_kernels_give_the_references_logits(truth: Run, plain: Run, model: AnyModel, chunk: int) -> None:
    """Every row, with the experts that the reference chose; see ``support/forced_routing.py``."""
    chosen = {decision.op: decision.chosen for decision in model.ops.plan.decisions.values()}
    assert chosen["moe"] == "triton_w8a16"
    assert chosen["attention"] == "triton_paged"
    assert chosen["small"] == "triton_small"
    assert_as_good_as_bf16(forced_run(model, PROMPTS, chunk, truth), plain, truth)


def test_graphs_decode_what_single_launches_do(model: AnyModel, truth: Run) -> None:
    assert_decodes_the_likeliest(model, PROMPTS[0], 0.05 * float(truth.logits.std()))
