"""Greedy decoding through the engine, held against one pass of the same model over all tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from microscale.engine.generate import Generation
from microscale.engine.sampling_params import SamplingParams
from microscale.models.families import AnyModel
from support.forward import all_logits

TIE = 10.0
"""Standard deviations of one logit in plain bf16 between two tokens that a rounding may turn. Each of two logits has an
error in each of two runs, which makes 2; the largest of some thousand draws is 4 times that; the rest is room for
kernels that round in other places."""


def near_tie(plain: Tensor, exact: Tensor) -> float:
    """How close two logits of a model must be for a rounding to turn them. ``plain``: its logits in bf16."""
    return TIE * float((plain - exact).square().mean().sqrt())


def assert_decodes_the_likeliest(model: AnyModel, prompt: list[int], near: float) -> None:
    """What decoding chose is within ``near`` of the largest logit of one pass over prompt and answer."""
    (completion,) = Generation(model, [prompt], SamplingParams(max_tokens=12, ignore_eos=True)).run()
    (logits,) = all_logits(model, [prompt + completion.token_ids], 1200)
    rows = logits[len(prompt) - 1 : -1]
    chosen = rows.gather(1, torch.tensor(completion.token_ids, device=rows.device)[:, None])[:, 0]
    gaps = rows.amax(dim=1) - chosen
    assert float(gaps.max()) <= near, f"{gaps.tolist()}; near is {near:.3f}"
