"""How many CPU threads steps get: by model and size, by the user's word, and in the runner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch

from microscale import hardware
from microscale.engine.config import EngineConfig
from microscale.engine.generate import Generation
from microscale.engine.sampling_params import SamplingParams
from microscale.errors import BadSetting
from microscale.models.batch import ForwardBatch
from microscale.models.families import PRESETS
from microscale.models.gpt_oss.model import GptOss
from microscale.models.outline import outline
from microscale.planning import threads
from microscale.planning.decision import Plan
from microscale.planning.ops import Activations
from microscale.planning.plan import Setup, make_plan
from microscale.planning.threads import StepThreads, product_us, wanted_threads
from support.families import gpt_oss_preset
from support.loading import load_model

CPU = hardware.cpu()
MOST = 3


@cache
def plan_of(model: str) -> Plan:
    shape = outline(model, PRESETS[model], Activations.FLOAT32, 16, 4096)
    return make_plan(model, shape.uses, Setup(CPU, Activations.FLOAT32))


@pytest.fixture
def given_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that torch was given ``MOST`` threads in."""
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "all_threads", lambda: MOST)
    monkeypatch.setattr("microscale.engine.loading.load.all_threads", lambda: MOST)
    torch.set_num_threads(MOST)
    yield
    torch.set_num_threads(before)


def test_small_products_have_one_thread_and_large_ones_all() -> None:
    tiny = [wanted_threads(plan_of("gpt-oss-tiny"), CPU, tokens, MOST) for tokens in (1, 8, 64, 1024, 2048)]
    assert tiny == [1, 1, 1, MOST, MOST]
    # The weights of a real model are read from memory by every step: that wants all cores.
    assert [wanted_threads(plan_of("gpt-oss-20b"), CPU, tokens, MOST) for tokens in (1, 8, 64, 1024)] == [MOST] * 4


def test_the_estimate_is_of_one_product() -> None:
    """By hand, for a prompt that reaches every expert: FLOPs of qkv, o and the experts over what a core computes."""
    config, tokens = gpt_oss_preset("gpt-oss-tiny"), 4096
    heads = config.num_heads + 2 * config.num_kv_heads
    dense = [(heads * config.head_dim, config.hidden), (config.hidden, config.num_heads * config.head_dim)]
    flops = sum(2 * rows * columns * tokens for rows, columns in dense)
    flops += 2 * 3 * config.hidden * config.intermediate * config.top_k * tokens
    want = 1e6 * flops / threads.CORE_FLOPS / (2 + 2 * config.num_experts)
    assert product_us(plan_of("gpt-oss-tiny"), CPU, tokens) == pytest.approx(want, rel=0.05)


def test_steps_get_their_threads(given_threads: None) -> None:
    steps = StepThreads(plan_of("gpt-oss-tiny"), CPU, None)
    for tokens, want in ((1, 1), (2048, MOST), (64, 1), (64, 1)):
        steps.give(tokens)
        assert torch.get_num_threads() == want
    fixed = StepThreads(plan_of("gpt-oss-tiny"), CPU, 2)
    for tokens in (1, 2048):
        fixed.give(tokens)
        assert torch.get_num_threads() == 2
    torch.set_num_threads(MOST)
    StepThreads(plan_of("gpt-oss-tiny"), hardware.known("h100"), None).give(1)
    assert torch.get_num_threads() == MOST


@pytest.mark.parametrize("fixed", [None, 2])
def test_a_generation_decodes_with_one_and_reads_its_prompt_with_all(given_threads: None, fixed: int | None) -> None:
    options = EngineConfig("gpt-oss-tiny", load_format="dummy", device="cpu", threads=fixed)
    model = load_model(options)
    assert isinstance(model, GptOss)
    seen: list[tuple[int, int]] = []

    def counted(run: Callable[..., Any], batch: ForwardBatch, *rest: Any) -> Any:
        seen.append((len(batch.token_ids), torch.get_num_threads()))
        return run(batch, *rest)

    vars(model).update(forward=partial(counted, model.forward), body=partial(counted, model.body))
    Generation(model, [[1] * 600], SamplingParams(max_tokens=3, ignore_eos=True)).run()
    assert seen == [(600, fixed or MOST), (1, fixed or 1), (1, fixed or 1)]
    # A model that is loaded after it is packed with all again.
    load_model(options)
    assert torch.get_num_threads() == (fixed or MOST)


def test_the_option_reaches_the_engine() -> None:
    assert EngineConfig("m", threads=3).threads == 3
    assert EngineConfig("m").threads is None
    for wrong in (0, -1, threads.MAX_THREADS + 1):
        with pytest.raises(BadSetting, match=f"--threads {wrong} is not between 1 and 1024"):
            load_model(EngineConfig("gpt-oss-tiny", load_format="dummy", threads=wrong))
