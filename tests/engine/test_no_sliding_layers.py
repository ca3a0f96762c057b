"""The engine on a model whose layers all see everything (qwen3-moe-tiny, random weights, float32 on a CPU): as few
pages of sliding layers as ``num_pages`` gives never hold anyone up, and the prefix cache needs none of them."""

from __future__ import annotations

import random

import pytest

from microscale.engine.config import EngineConfig
from microscale.engine.generate import Generation
from microscale.engine.limits import Limits
from microscale.engine.loading.build import assemble
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.models.config import LayerKind
from microscale.models.families import AnyModel
from support.loading import load_model

NEW = 24
PAGE = 4
SEQUENCES = 4
PARAMS = SamplingParams(max_tokens=NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> AnyModel:
    return load_model(
        EngineConfig("qwen3-moe-tiny", load_format="dummy", device="cpu", dtype="float32", block_size=PAGE)
    )


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    chooser = random.Random(0)
    shared = [chooser.randrange(512) for _ in range(40)]
    own = [[chooser.randrange(512) for _ in range(length)] for length in (1, 7, 33, 90)]
    return [*own, shared + own[0], shared + own[1], shared]


@pytest.fixture(scope="module")
def alone(model: AnyModel, prompts: list[list[int]]) -> list[list[int]]:
    """One request at a time, without the prefix cache."""
    return [Generation(model, [prompt], PARAMS, prefix_caching=False).run()[0].token_ids for prompt in prompts]


@pytest.mark.parametrize("budget", [8, 64])
def test_few_pages_of_sliding_layers_hold_nobody_up(
    model: AnyModel, prompts: list[list[int]], alone: list[list[int]], budget: int
) -> None:
    limits = Limits(PAGE, model.config.sliding_window, SEQUENCES, budget, max_model_len=512)
    sliding = 2 * SEQUENCES + budget // PAGE
    engine = assemble(model, limits, {LayerKind.FULL: 400, LayerKind.SLIDING: sliding})
    requests = [Request(str(index), prompt, PARAMS) for index, prompt in enumerate(prompts)]
    for request in requests:
        engine.submit(request)
        engine.step()
    while engine.has_work:
        engine.step()
    assert [request.tokens[request.num_prompt :] for request in requests] == alone
    assert engine.stats().num_preemptions == 0
    # The last two share nearly all of the 40 tokens that the fifth began with.
    assert min(request.num_cached for request in requests[-2:]) >= 36
