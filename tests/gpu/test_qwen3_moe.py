"""Qwen3-MoE on a real GPU with the kernels that the oracle chooses, against float32 references there."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from microscale.backends.ops import Preference
from microscale.backends.precision import make_precision
from microscale.engine.generate import Generation
from microscale.engine.loading.options import LoadOptions
from microscale.engine.sampling_params import SamplingParams
from microscale.models.families import AnyModel
from microscale.prove.inventory import Setting
from support.forward import all_logits
from support.loading import load_model

# Widths and heads of the real one, few layers and few experts: of 128, whose logits lie close together, roundings
# choose another one too often to compare. Their router has a test of its own (``tests/kernels/cases_small.py``).
MODEL = "qwen3-30b-a3b"
SHAPE = {"num_hidden_layers": 4, "num_experts": 16, "vocab_size": 4096, "eos_token_id": [1]}
FORMATS = [
    pytest.param(fmt, marks=pytest.mark.starts(MODEL, SHAPE, Setting(experts=fmt))) for fmt in ("mxfp8", "mxfp4")
]
CHOSEN = {"mxfp8": "triton_w8a16", "mxfp4": "triton_w4a16"}
# bf16 activations through these layers move the logits by 1.0 % in the median and 1.6 % in the third quartile (CPU).
BOUND = 0.03
PROMPTS = [list(range(1, 301)), [5, 6, 7], list(range(1000, 2200))]


def load(dtype: str, preference: Preference, fmt: str) -> AnyModel:
    precision = make_precision(layer_formats=(f"experts={fmt}",))
    options = LoadOptions(
        MODEL,
        load_format="dummy",
        device="cuda",
        dtype=dtype,
        preference=preference,
        overrides=SHAPE,
        precision=precision,
    )
    return load_model(options)


@cache
def truth(fmt: str) -> Tensor:
    return torch.cat(all_logits(load("float32", Preference("reference"), fmt), PROMPTS, 512))


@cache
def fast(fmt: str) -> AnyModel:
    return load("bfloat16", Preference(), fmt)


@pytest.mark.parametrize("chunk", [1200, 20, 1])
@pytest.mark.parametrize("fmt", FORMATS)
def test_fast_kernels_give_the_references_logits(fmt: str, chunk: int) -> None:
    """As ``test_gpt_oss``: the median and most rows are held, since a rounding may choose another expert.

    A token at a time goes through attention with the heads' norms in the same launch.
    """
    model = fast(fmt)
    chosen = {decision.op: decision.chosen for decision in model.ops.plan.decisions.values()}
    assert chosen["moe"] == CHOSEN[fmt]
    assert chosen["attention"] == "triton_paged"
    assert chosen["small"] == "triton_small"
    prompts = [prompt[:100] for prompt in PROMPTS] if chunk == 1 else PROMPTS
    ours = all_logits(model, prompts, chunk)
    lengths = [len(prompt) for prompt in PROMPTS]
    wanted = [rows[: len(got)] for rows, got in zip(truth(fmt).split(lengths), ours, strict=True)]
    error = torch.cat([(got - rows).norm(dim=-1) / rows.norm(dim=-1) for got, rows in zip(ours, wanted, strict=True)])
    assert error.median() < BOUND
    assert error.quantile(0.75) < 2 * BOUND


@pytest.mark.parametrize("fmt", FORMATS)
def test_graphs_decode_what_single_launches_do(fmt: str) -> None:
    """Greedy decoding through captured graphs, against the largest logits of one pass over all tokens."""
    model = fast(fmt)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    (completion,) = Generation(model, PROMPTS[:1], params).run()
    tokens = PROMPTS[0] + completion.token_ids
    (logits,) = all_logits(model, [tokens], 1200)
    chosen = logits[len(PROMPTS[0]) - 1 : -1].gather(1, torch.tensor(completion.token_ids, device="cuda")[:, None])
    largest = logits[len(PROMPTS[0]) - 1 : -1].amax(dim=1, keepdim=True)
    # Another order of sums may turn a near tie: what was chosen is within bf16's noise of the largest.
    assert ((largest - chosen) <= 0.05 * logits.std()).all()
