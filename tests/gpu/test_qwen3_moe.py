"""Qwen3-MoE on a real GPU with the kernels that the oracle chooses, against float32 references there."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from microscale.engine.config import EngineConfig
from microscale.models.families import AnyModel
from microscale_lab.prove.inventory import Setting
from support.forced_routing import Run, assert_as_good_as_bf16, forced_run, reference_run
from support.forward import all_logits
from support.greedy import assert_decodes_the_likeliest, near_tie
from support.loading import load_model

# Widths and heads of the real one, few layers and few experts; the router of 128 has a test of its own
# (``tests/kernels/cases_small.py``).
MODEL = "qwen3-30b-a3b"
SHAPE: dict[str, object] = {"num_hidden_layers": 4, "num_experts": 16, "vocab_size": 4096, "eos_token_id": [1]}
FORMATS = [
    pytest.param(fmt, marks=pytest.mark.starts(MODEL, SHAPE, Setting(experts=fmt))) for fmt in ("mxfp8", "mxfp4")
]
CHOSEN = {"mxfp8": "triton_w8a16", "mxfp4": "triton_w4a16"}
PROMPTS = [list(range(1, 301)), [5, 6, 7], list(range(1000, 2200))]
SHORT = [prompt[:100] for prompt in PROMPTS]


def load(dtype: str, backend: str | None, fmt: str, shape: dict[str, object] = SHAPE) -> AnyModel:
    options = EngineConfig(
        MODEL,
        load_format="dummy",
        device="cuda",
        dtype=dtype,
        backend=backend,
        hf_overrides=shape,
        layer_format=(f"experts={fmt}",),
    )
    return load_model(options)


@cache
def truth(fmt: str, short: bool) -> Run:
    return reference_run(load("float32", "reference", fmt), SHORT if short else PROMPTS, 512)


@cache
def plain(fmt: str, short: bool) -> Run:
    model = load("bfloat16", "reference", fmt)
    return forced_run(model, SHORT if short else PROMPTS, 512, truth(fmt, short))


@cache
def fast(fmt: str) -> AnyModel:
    return load("bfloat16", None, fmt)


@pytest.mark.parametrize("chunk", [1200, 20, 1])
@pytest.mark.parametrize("fmt", FORMATS)
def test_fast_kernels_give_the_references_logits(fmt: str, chunk: int) -> None:
    """Every row, with the experts that the reference chose; see ``support/forced_routing.py``.

    A token at a time goes through attention with the heads' norms in the same launch.
    """
    model = fast(fmt)
    chosen = {decision.op: decision.chosen for decision in model.ops.plan.decisions.values()}
    assert chosen["moe"] == CHOSEN[fmt]
    assert chosen["attention"] == "triton_paged"
    assert chosen["small"] == "triton_small"
    short = chunk == 1
    run = forced_run(model, SHORT if short else PROMPTS, chunk, truth(fmt, short))
    assert_as_good_as_bf16(run, plain(fmt, short), truth(fmt, short))


ALL_EXPERTS = {**SHAPE, "num_experts": 8}
"""Every token goes to all: one that a rounding sends elsewhere has another answer, and not a less exact one."""


@pytest.mark.parametrize(
    "fmt",
    [
        pytest.param(fmt, marks=pytest.mark.starts(MODEL, ALL_EXPERTS, Setting(experts=fmt)))
        for fmt in ("mxfp8", "mxfp4")
    ],
)
def test_graphs_decode_what_single_launches_do(fmt: str) -> None:
    references = [load(dtype, "reference", fmt, ALL_EXPERTS) for dtype in ("float32", "bfloat16")]
    exact, plain = (torch.cat(all_logits(model, SHORT, 512)) for model in references)
    assert_decodes_the_likeliest(load("bfloat16", None, fmt, ALL_EXPERTS), PROMPTS[0], near_tie(plain, exact))
