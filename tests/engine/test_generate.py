"""Generation with a scripted model: stopping, limits, order within a budget, and pages that come back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from microscale import hardware
from microscale.engine.generate import Generation, check_prompt
from microscale.engine.sampling_params import SamplingParams
from microscale.errors import BadLogits, BadRequest
from microscale.kernels.dense.reference import summarise
from microscale.kernels.dense.spec import Logits
from microscale.models.batch import ForwardBatch, KvCache
from microscale.models.config import LayerKind
from microscale.models.taps import Taps
from microscale.planning.ops import Activations, AttentionBatch, Ops, Preference
from support.families import gpt_oss_preset
from support.sampling import sampling_on_cpu

VOCAB = 16
EOS = 9
CONFIG = replace(gpt_oss_preset("gpt-oss-tiny"), vocab_size=VOCAB, eos_token_ids=(EOS,), max_context=40)


class Layer(NamedTuple):
    kind: LayerKind


class Scripted:
    """A model whose next token is the last one plus one; it keeps what it was asked."""

    config = CONFIG
    device = torch.device("cpu")
    page_size = 4
    layers = (Layer(LayerKind.FULL),)
    sampling = sampling_on_cpu(VOCAB)
    ops = Ops(hardware.cpu(), Activations.FLOAT32, Preference())

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.positions: list[list[int]] = []

    def new_cache(self, num_pages: dict[LayerKind, int]) -> KvCache:
        return KvCache((), self.page_size)

    def forward(self, batch: ForwardBatch, kv: KvCache, taps: Taps | None = None) -> Logits:
        tokens, positions = self.body(batch, kv)
        rows = slice(None) if batch.logits is None else batch.logits.rows
        return self.tail(tokens[rows], positions[rows], {}, kv)

    def body(self, batch: ForwardBatch, kv: KvCache, taps: Taps | None = None) -> tuple[Tensor, Tensor]:
        self.steps.append(batch.token_ids.tolist())
        self.positions.append(batch.positions.tolist())
        return batch.token_ids, batch.positions

    def tail(self, q: Tensor, x: Tensor, queries: Mapping[LayerKind, AttentionBatch], kv: KvCache) -> Logits:
        return summarise(torch.nn.functional.one_hot((q + 1) % VOCAB, VOCAB).float() * 4)


def complete(prompt: list[int], **params: object) -> tuple[list[int], str]:
    done = Generation(Scripted(), [prompt], SamplingParams(**params)).run()[0]  # type: ignore[arg-type]
    assert len(done.logprobs) == len(done.token_ids)
    return done.token_ids, done.finish_reason


def test_an_end_token_stops_and_is_the_last() -> None:
    assert complete([6], max_tokens=10) == ([7, 8, EOS], "stop")


def test_an_end_token_on_the_last_place_is_a_stop() -> None:
    assert complete([6], max_tokens=3) == ([7, 8, EOS], "stop")


def test_ignore_eos_goes_on() -> None:
    assert complete([6], max_tokens=5, ignore_eos=True) == ([7, 8, 9, 10, 11], "length")


def test_an_end_token_in_the_prompt_stops_nothing() -> None:
    assert complete([EOS, 1], max_tokens=2) == ([2, 3], "length")


def test_prompts_are_checked() -> None:
    check_prompt([0] * 30, 10, CONFIG)
    with pytest.raises(BadRequest, match="31 prompt tokens and 10 new ones exceed the model's context of 40"):
        check_prompt([0] * 31, 10, CONFIG)
    with pytest.raises(BadRequest, match="empty"):
        check_prompt([], 1, CONFIG)
    for token in (-1, VOCAB):
        with pytest.raises(BadRequest, match=f"{token} is not in the vocabulary"):
            check_prompt([0, token], 1, CONFIG)
        with pytest.raises(BadRequest):
            Generation(Scripted(), [[1], [token]], SamplingParams())
    with pytest.raises(BadRequest, match="at least one token"):
        Generation(Scripted(), [[1]], SamplingParams(), max_num_batched_tokens=0)


def test_a_budget_cuts_prompts_and_decoding_goes_first() -> None:
    model = Scripted()
    generation = Generation(model, [[1], [2, 3, 4, 5, 6]], SamplingParams(max_tokens=3), max_num_batched_tokens=3)
    done = generation.run()
    assert [c.token_ids for c in done] == [[2, 3, 4], [7, 8, 9]]
    # The first sequence decodes in every step; the second one's prompt takes what is left of the budget.
    assert model.steps[:3] == [[1, 2, 3], [2, 4, 5], [3, 6]]
    assert model.positions[:3] == [[0, 0, 1], [1, 2, 3], [2, 4]]
    assert all(len(step) <= 3 for step in model.steps)


def test_sequences_do_not_see_each_other() -> None:
    prompts = [[3, 4], [1], [11, 12, 13]]
    params = SamplingParams(max_tokens=4)
    together = Generation(Scripted(), prompts, params).run()
    assert [c.token_ids for c in together] == [complete(p, max_tokens=4)[0] for p in prompts]


def test_pages_come_back() -> None:
    generation = Generation(Scripted(), [[6], [1, 2, 3, 4, 5]], SamplingParams(max_tokens=6))
    generation.run()
    assert all(used == 0 for used, _ in generation.engine.stats().pages.values())


def test_logprobs_are_of_the_untempered_distribution() -> None:
    cold, hot = (
        Generation(Scripted(), [[1]], SamplingParams(max_tokens=1, temperature=t, seed=0)).run()[0] for t in (0.0, 0.01)
    )
    assert cold.token_ids == hot.token_ids
    # Of float64 here. An implementation may take the difference in float32: the logit and the logarithm of the sum are
    # both between 4 and 8, where float32's step is 2**-21, and each is rounded to it at most once or twice.
    truth = 4.0 - math.log(math.exp(4.0) + 15)
    assert cold.logprobs == hot.logprobs == [pytest.approx(truth, rel=0, abs=3 * 2.0**-21)]
    # What temperature 0.01 would say is far from that.
    assert truth < -0.2


def test_broken_logits_are_an_error() -> None:
    class Broken(Scripted):
        def forward(self, batch: ForwardBatch, kv: KvCache, taps: Taps | None = None) -> Logits:
            return summarise(super().forward(batch, kv).values * torch.nan)

    with pytest.raises(BadLogits):
        Generation(Broken(), [[1]], SamplingParams()).run()
