"""Drafts on real models on a CPU: greedy and seeded tokens are those without, whatever is drafted, in any company."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from microscale.backends.plan import Setup
from microscale.engine.engine import Engine
from microscale.engine.limits import Limits
from microscale.engine.loading.build import assemble
from microscale.engine.loading.memory import Workload
from microscale.engine.loading.options import LoadOptions
from microscale.engine.output import Stats
from microscale.engine.request import Finish, Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.speculation.config import SpeculativeConfig
from microscale.engine.speculation.length import ByArithmetic
from microscale.engine.speculation.predicted import predicted_costs
from microscale.engine.speculation.speculation import Speculation
from microscale.models.config import LayerKind
from microscale.models.families import AnyModel
from microscale.models.outline import outline
from microscale.text.grammar import Schema, Turn
from microscale.text.harmony.grammar import of_turn
from microscale.text.harmony.tokens import RETURN
from support.chance_service import SCHEMA, harmony_vocabulary
from support.chance_service import VOCAB as CHANCE_VOCAB
from support.chance_service import engine as chance_engine
from support.demo_prompts import demo_model, demo_prompts
from support.drafters import Uneven, replaying
from support.loading import load_model
from support.tiny_tokenizers import tiny

Tokens = list[list[int]]
NEW = 24
NGRAM = SpeculativeConfig("ngram", 4, prompt_lookup_min=2, prompt_lookup_max=4)


def limits_for(model: AnyModel, **changes: Any) -> Limits:
    numbers = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 512} | changes
    return Limits(page_size=model.page_size, window=model.config.sliding_window, **numbers)


def run_all(engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> tuple[Tokens, Stats]:
    """Tokens of each prompt. They come one a step, and pages are checked after each."""
    requests = [Request(str(at), p, q) for at, (p, q) in enumerate(zip(prompts, params, strict=True))]
    for request in requests:
        engine.submit(request)
        engine.step()
        engine.check()
    while engine.has_work:
        engine.step()
        engine.check()
    return [request.tokens[request.num_prompt :] for request in requests], engine.stats()


def generate(
    model: AnyModel,
    prompts: Sequence[Sequence[int]],
    speculation: Speculation | None,
    limits: Limits,
    pages: int = 400,
    *,
    fill: bool = False,
    **options: Any,
) -> tuple[Tokens, Stats]:
    pools = dict.fromkeys(LayerKind, pages)
    engine = assemble(model, limits, pools, fill_up_prompts=fill, speculation=speculation)
    params = [SamplingParams(**({"max_tokens": NEW} | options), seed=at) for at in range(len(prompts))]
    return run_all(engine, prompts, params)


# ---- the embedded model ----------------------------------------------------------------------------------------------

PROMPTS = 8


@cache
def undrafted() -> tuple[list[list[int]], Tokens]:
    prompts = demo_prompts(PROMPTS)
    model = demo_model()
    return prompts, generate(model, prompts, None, limits_for(model))[0]


def drafters(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], vocab: int) -> Mapping[str, Speculation]:
    """What a drafter may be worth: some, nothing, everything, and half of it in drafts of every length."""
    uneven = replaying(pairs, vocab, 4, luck=0.7)
    uneven._length = Uneven(4)
    return {
        "ngram": Speculation.of(NGRAM),
        "random": replaying(pairs, vocab, 2, luck=0.0),
        "perfect": replaying(pairs, vocab, 4),
        "uneven": uneven,
    }


@pytest.mark.parametrize("name", ["ngram", "random", "perfect", "uneven"])
def test_the_embedded_model_says_the_same(name: str) -> None:
    prompts, want = undrafted()
    model = demo_model()
    speculation = drafters(list(zip(prompts, want, strict=True)), model.config.vocab_size)[name]
    found, stats = generate(model, prompts, speculation, limits_for(model))
    assert found == want
    assert stats.num_drafts > 0
    if name == "random":
        assert stats.num_accepted_tokens == 0
    elif name == "perfect":
        assert stats.num_accepted_tokens == stats.num_draft_tokens
    else:
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


# ---- a tiny model in every situation ---------------------------------------------------------------------------------


@cache
def tiny_model(name: str, page_size: int) -> AnyModel:
    return load_model(LoadOptions(name, load_format="dummy", device="cpu", workload=Workload(page_size=page_size)))


def tiny_prompts(vocab: int) -> list[list[int]]:
    shared = [(7 * n * n + 3) % vocab for n in range(40)]
    own = [[(5 * n * n + length) % vocab for n in range(length)] for length in (1, 7, 33, 60)]
    return [*own, shared + own[0], shared + own[1], shared]


@cache
def tiny_alone(name: str, **options: Any) -> Tokens:
    """One request at a time, without prefix cache or drafts."""
    model = tiny_model(name, 16)
    limits = limits_for(model, max_num_seqs=1, prefix_caching=False)
    prompts = tiny_prompts(model.config.vocab_size)
    return generate(model, prompts, None, limits, ignore_eos=True, **options)[0]


FAMILIES = ["gpt-oss-tiny", "gemma-4-tiny", "qwen3-moe-tiny"]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("luck", [0.0, 0.8, 1.0])
def test_every_family_says_the_same(name: str, luck: float) -> None:
    model = tiny_model(name, 16)
    prompts, want = tiny_prompts(model.config.vocab_size), tiny_alone(name)
    speculation = replaying(list(zip(prompts, want, strict=True)), model.config.vocab_size, 5, luck)
    assert generate(model, prompts, speculation, limits_for(model), ignore_eos=True)[0] == want


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("budget", [12, 64, 512])
@pytest.mark.parametrize("fill", [True, False], ids=["filled up", "as they are"])
def test_pages_budgets_and_prompts_beside_drafts_change_nothing(size: int, budget: int, fill: bool) -> None:
    model = tiny_model("gpt-oss-tiny", size)
    prompts, want = tiny_prompts(model.config.vocab_size), tiny_alone("gpt-oss-tiny")
    speculation = replaying(list(zip(prompts, want, strict=True)), model.config.vocab_size, 6, 0.7)
    limits = limits_for(model, max_num_batched_tokens=budget)
    found, stats = generate(model, prompts, speculation, limits, 1024 // size, fill=fill, ignore_eos=True)
    assert found == want
    assert stats.num_drafts > 0
    assert stats.prefix_hits > 0


@pytest.mark.parametrize("luck", [0.0, 0.8, 1.0])
def test_preemption_changes_nothing(luck: float) -> None:
    model = tiny_model("gpt-oss-tiny", 4)
    prompts, want = tiny_prompts(model.config.vocab_size), tiny_alone("gpt-oss-tiny")
    speculation = replaying(list(zip(prompts, want, strict=True)), model.config.vocab_size, 6, luck)
    found, stats = generate(model, prompts, speculation, limits_for(model), 48, ignore_eos=True)
    assert stats.num_preemptions > 0
    assert found == want


@pytest.mark.parametrize("luck", [0.0, 0.9])
def test_lengths_by_arithmetic_change_nothing(luck: float) -> None:
    """They follow the times of steps on this machine, whatever these are: tokens do not."""
    model = tiny_model("gpt-oss-tiny", 4)
    prompts, want = tiny_prompts(model.config.vocab_size), tiny_alone("gpt-oss-tiny")
    shape = outline("gpt-oss-tiny", model.config, model.ops.activations, 4, model.config.max_context)
    prior = predicted_costs(shape, model.ops.plan, Setup(model.ops.gpu, model.ops.activations), 6, 8)
    speculation = replaying(list(zip(prompts, want, strict=True)), model.config.vocab_size, 6, luck)
    speculation._length = ByArithmetic(prior, 6)
    found, _ = generate(model, prompts, speculation, limits_for(model), 48, ignore_eos=True)
    assert found == want


@pytest.mark.parametrize("luck", [0.5, 1.0])
def test_seeded_tokens_are_those_without_drafts(luck: float) -> None:
    model = tiny_model("gpt-oss-tiny", 16)
    options: dict[str, Any] = {"temperature": 1.5, "top_p": 0.9, "top_k": 50}
    prompts, want = tiny_prompts(model.config.vocab_size), tiny_alone("gpt-oss-tiny", **options)
    assert want != tiny_alone("gpt-oss-tiny")
    speculation = replaying(list(zip(prompts, want, strict=True)), model.config.vocab_size, 5, luck)
    found, stats = generate(model, prompts, speculation, limits_for(model), ignore_eos=True, **options)
    assert found == want
    assert stats.num_accepted_tokens > 0


@pytest.mark.parametrize("pages", [500, 30], ids=["room", "preemption"])
def test_turns_that_follow_a_schema_are_those_without_drafts(pages: int) -> None:
    """Sampled, with a grammar, and some with a short way out; a draft may be what the grammar forbids."""
    limits = Limits(page_size=8, window=16, max_num_seqs=6, max_num_batched_tokens=64, max_model_len=512)
    stop = tiny().control[RETURN]
    params = SamplingParams(
        temperature=1.0, max_tokens=200, stop_token_ids=(stop,), grammar=of_turn(Turn(Schema(SCHEMA)))
    )
    prompts = [[n + 20] * 20 for n in range(6)]
    asked = [replace(params, seed=seed) for seed in range(6)]

    def run(speculation: Speculation | None, room: int) -> tuple[Tokens, Stats]:
        engine = chance_engine(harmony_vocabulary(), limits, dict.fromkeys(LayerKind, room), speculation)
        return run_all(engine, prompts, asked)

    want, _ = run(None, 500)
    assert all(tokens[-1] == stop for tokens in want)
    found, stats = run(replaying(list(zip(prompts, want, strict=True)), CHANCE_VOCAB, 4, 0.8), pages)
    assert found == want
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert bool(stats.num_preemptions) == (pages == 30)


def test_log_probabilities_are_the_models_own() -> None:
    model = tiny_model("gpt-oss-tiny", 16)
    prompts, want = tiny_prompts(model.config.vocab_size), tiny_alone("gpt-oss-tiny")

    def told(speculation: Speculation | None) -> list[tuple[int | None, float, list[int]]]:
        engine = assemble(model, limits_for(model), dict.fromkeys(LayerKind, 400), speculation=speculation)
        engine.submit(Request("r", prompts[2], SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=3)))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        assert outputs[-1].finish is Finish.LENGTH
        return [(o.token, o.logprob or 0.0, [token for token, _ in o.top_logprobs]) for o in outputs]

    plain = told(None)
    drafted = told(replaying(list(zip(prompts, want, strict=True)), model.config.vocab_size, 5, 0.8))
    assert [(token, top) for token, _, top in drafted] == [(token, top) for token, _, top in plain]
    assert [logprob for _, logprob, _ in drafted] == pytest.approx([logprob for _, logprob, _ in plain], abs=1e-4)
