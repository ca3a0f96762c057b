"""The engine on a real model (gpt-oss-tiny, random weights, float32 on a CPU): greedy tokens never depend on the
others, on how prompts are cut or filled up, on pages, on the prefix cache or on preemption."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from microscale.engine.config import EngineConfig
from microscale.engine.limits import Limits
from microscale.engine.loading.build import assemble
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.models.config import LayerKind
from microscale.models.gpt_oss.model import GptOss
from support.families import load_gpt_oss
from support.step_calls import COUNTED_STEPS, count_calls

NEW = 24


@pytest.fixture(scope="module")
def models() -> dict[int, GptOss]:
    options = EngineConfig("gpt-oss-tiny", load_format="dummy", device="cpu")
    return {size: load_gpt_oss(replace(options, block_size=size)) for size in (4, 16)}


def prompts(vocab: int) -> list[list[int]]:
    chooser = random.Random(0)
    shared = [chooser.randrange(vocab) for _ in range(40)]
    own = [[chooser.randrange(vocab) for _ in range(length)] for length in (1, 7, 33, 60)]
    return [*own, shared + own[0], shared + own[1], shared]


def run(
    model: GptOss, limits: Limits, full: int, sliding: int, *, fill: bool = False
) -> tuple[list[list[int]], int, int]:
    """Tokens of each prompt, how many tokens came from the prefix cache, and how often someone was preempted."""
    engine = assemble(model, limits, {LayerKind.FULL: full, LayerKind.SLIDING: sliding}, fill_up_prompts=fill)
    requests = []
    for index, prompt in enumerate(prompts(model.config.vocab_size)):
        requests.append(Request(str(index), prompt, SamplingParams(max_tokens=NEW, ignore_eos=True)))
        engine.submit(requests[-1])
        engine.step()
    while engine.has_work:
        engine.step()
    cached = sum(request.num_cached for request in requests)
    return [request.tokens[request.num_prompt :] for request in requests], cached, engine.stats().num_preemptions


def limits_for(model: GptOss, **changes: object) -> Limits:
    numbers = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 512} | changes
    return Limits(page_size=model.page_size, window=model.config.sliding_window, **numbers)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone(models: dict[int, GptOss]) -> list[list[int]]:
    """One request at a time, without the prefix cache."""
    limits = limits_for(models[16], max_num_seqs=1, prefix_caching=False)
    return run(models[16], limits, 64, 64)[0]


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("budget", [8, pytest.param(64, marks=pytest.mark.nightly), 512])
@pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "no prefix cache"])
@pytest.mark.parametrize("fill", [True, False], ids=["filled up", "as they are"])
def test_company_changes_nothing(
    models: dict[int, GptOss], alone: list[list[int]], size: int, budget: int, caching: bool, fill: bool
) -> None:
    limits = limits_for(models[size], max_num_batched_tokens=budget, prefix_caching=caching)
    tokens, cached, _ = run(models[size], limits, 1024 // size, 1024 // size, fill=fill)
    assert tokens == alone
    assert (cached > 0) == caching


@pytest.mark.usefixtures("admits_until_pages_run_out")
@pytest.mark.parametrize("fill", [True, False], ids=["filled up", "as they are"])
def test_preemption_changes_nothing(models: dict[int, GptOss], alone: list[list[int]], fill: bool) -> None:
    tokens, _, preempted = run(models[4], limits_for(models[4]), 48, 40, fill=fill)
    assert preempted > 0
    assert tokens == alone


def test_a_decoding_step_takes_few_calls_outside_of_the_model() -> None:
    """On the host they stand between two steps of the GPU wherever a step cannot run ahead, as with a grammar."""
    assert sum(count_calls().values()) / COUNTED_STEPS < 85
