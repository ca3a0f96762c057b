"""Log-probabilities of prompts, against transformers in float32: whole and in chunks, beside others, after a
preemption, with a filled prefix cache, without a token to follow, and through the engine process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from microscale.engine.client.client import EngineClient
from microscale.engine.config import EngineConfig
from microscale.engine.engine import Engine
from microscale.engine.limits import SCORED_TOKENS, Limits
from microscale.engine.loading.build import assemble
from microscale.engine.output import Output, Scored
from microscale.engine.request import Finish, Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.work import Work
from microscale.errors import BadLogits, BadRequest
from microscale.kernels.dense.reference import summarise
from microscale.kernels.dense.spec import Logits
from microscale.models.config import LayerKind
from microscale.models.gpt_oss.model import GptOss
from support.families import load_gpt_oss
from support.tiny_checkpoints import CASES, write_hf
from support.truth import load_transformers

NAMES = ["heads_4_2", "odd_constants"]  # last layers: full, sliding


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("checkpoints")
    return {name: write_hf(base / name, CASES[name], seed=i) for i, name in enumerate(NAMES)}


@cache
def load(folder: Path) -> GptOss:
    return load_gpt_oss(EngineConfig(str(folder), device="cpu", dtype="float32", block_size=4))


@cache
def true_logits(folder: Path, prompt: tuple[int, ...]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = load_transformers(folder)(torch.tensor([prompt]), use_cache=False).logits[0]
    return logits


def prompt_of(name: str, length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, CASES[name].vocab_size, (length,), generator=generator).tolist())


def engine_for(model: GptOss, budget: int = 2048, seqs: int = 8, pages: int = 256) -> Engine:
    limits = Limits(model.page_size, model.config.sliding_window, seqs, budget, model.config.max_context)
    return assemble(model, limits, dict.fromkeys(LayerKind, pages))


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, list[Output]]:
    outputs: dict[str, list[Output]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.check()
    return outputs


def scored(outputs: Sequence[Output]) -> list[Scored]:
    return [entry for output in outputs for entry in output.prompt_logprobs]


def scoring(name: str, prompt: Sequence[int], top: int, max_tokens: int = 0) -> Request:
    return Request(name, tuple(prompt), SamplingParams(max_tokens=max_tokens, prompt_logprobs=top, ignore_eos=True))


def check(found: list[Scored], folder: Path, prompt: tuple[int, ...], top: int) -> None:
    """Each prompt token but the first, with transformers' log-probability and the likeliest in their order."""
    logits = true_logits(folder, prompt)
    want = logits.log_softmax(-1)
    # Our logits differ by up to 2e-4 of their range (tests/models/test_gpt_oss.py); a log-softmax at most doubles that.
    near = 4e-4 * float(logits.max() - logits.min())
    assert [token for token, _, _ in found] == list(prompt[1:])
    for row, (token, logprob, likeliest) in zip(want, found, strict=False):
        assert logprob == pytest.approx(float(row[token]), abs=near)
        assert len({other for other, _ in likeliest}) == top
        values = [value for _, value in likeliest]
        assert values == sorted(values, reverse=True)
        assert values == pytest.approx(row.topk(top).values.tolist(), abs=near)
        assert values == pytest.approx([float(row[other]) for other, _ in likeliest], abs=near)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budget", [2048, 17, 1])
@pytest.mark.parametrize("top", [0, 5])
def test_they_equal_transformers(folders: dict[str, Path], name: str, budget: int, top: int) -> None:
    """In one step, in chunks, and token by token; with no token to follow."""
    prompt = prompt_of(name, 50)
    engine = engine_for(load(folders[name]), budget, seqs=1)
    outputs = run(engine, [scoring("r", prompt, top)])["r"]
    check(scored(outputs), folders[name], prompt, top)
    assert [output.token for output in outputs] == [None] * len(outputs)
    assert [output.finish for output in outputs] == [None] * (len(outputs) - 1) + [Finish.LENGTH]
    assert not outputs[-1].prompt_logprobs
    assert all(used == 0 for used, _ in engine.stats().pages.values())


def test_tokens_follow_as_without_them(folders: dict[str, Path]) -> None:
    """Beside requests that are not scored, and temperature and penalties change nothing of the prompt's."""
    folder, prompt = folders["heads_4_2"], prompt_of("heads_4_2", 40)
    model = load(folder)
    (plain,) = run(engine_for(model), [Request("r", prompt, SamplingParams(max_tokens=6, ignore_eos=True))]).values()
    hot = SamplingParams(6, 50.0, 1, True, repetition_penalty=3.0, logit_bias={prompt[3]: 9.0}, prompt_logprobs=2)
    requests = [
        scoring("scored", prompt, 2, 6),
        Request("plain", prompt[:9], plain_params()),
        Request("hot", prompt, hot),
    ]
    outputs = run(engine_for(model, budget=24), requests)
    assert [output.token for output in outputs["scored"] if output.token is not None] == [o.token for o in plain]
    assert outputs["scored"][-1].finish is Finish.LENGTH
    assert not scored(outputs["plain"])
    for name in ("scored", "hot"):
        check(scored(outputs[name]), folder, prompt, 2)
        assert [output.token is None for output in outputs[name]] == [*[True] * (len(outputs[name]) - 6), *[False] * 6]


def plain_params() -> SamplingParams:
    return SamplingParams(max_tokens=6, ignore_eos=True)


def test_the_prefix_cache_is_left_alone_and_filled(folders: dict[str, Path]) -> None:
    folder, prompt = folders["heads_4_2"], prompt_of("heads_4_2", 41)
    engine = engine_for(load(folder))
    before, again, after = (scoring(name, prompt, 1) for name in ("before", "again", "after"))
    for request in (before, again):
        outputs = run(engine, [request])[request.request_id]
        check(scored(outputs), folder, prompt, 1)
        assert (request.num_cached, outputs[-1].num_cached) == (0, 0)
    after = Request("after", prompt, plain_params())
    run(engine, [after])
    assert after.num_cached == 40


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_preemption_loses_and_repeats_nothing(folders: dict[str, Path], steps: int) -> None:
    """In the midst of a prompt, after 1 to 3 of its steps."""
    folder = folders["heads_4_2"]
    prompts = {name: prompt_of("heads_4_2", 60, seed) for seed, name in enumerate("ab", start=1)}
    requests = {name: scoring(name, prompt, 1, max_tokens=seed) for seed, (name, prompt) in enumerate(prompts.items())}
    engine = engine_for(load(folder), budget=16)
    found: dict[str, list[Output]] = {name: [] for name in requests}
    for request in requests.values():
        engine.submit(request)
    for step in range(1000):
        for output in engine.step():
            found[output.request_id].append(output)
        if step + 1 == steps:
            assert 0 < requests["a"].num_scored < 59
            engine._scheduler._preempt(requests["a"])
        if not engine.has_work:
            break
    assert requests["a"].num_preempted == 1
    for name, prompt in prompts.items():
        check(scored(found[name]), folder, prompt, 1)
        assert found[name][-1].finish is Finish.LENGTH


def test_a_step_scores_no_more_than_its_bound(folders: dict[str, Path]) -> None:
    """However many prompts are scored together; those that are not pass by."""
    model = load(folders["odd_constants"])
    rows: list[int] = []
    wide: list[int] = []
    engine = engine_for(model, seqs=5)
    forward = engine._runner.forward

    def counted(schedule: Sequence[Work], tokens: Tensor | None = None) -> Logits:
        logits = forward(schedule, tokens)
        rows.append(len(logits.values))
        wide.append(sum(work.count for work in schedule))
        return logits

    vars(engine._runner)["forward"] = counted
    long = {f"s{i}": prompt_of("odd_constants", 100, i) for i in range(4)}
    plain = Request("plain", prompt_of("odd_constants", 200, 9), plain_params())
    outputs = run(engine, [*(scoring(n, p, 0) for n, p in long.items()), plain])
    assert rows[0] == SCORED_TOKENS + 1
    assert wide[0] == SCORED_TOKENS + 200  # the plain prompt, which came last, began and ended in the first step
    assert max(rows) <= SCORED_TOKENS + 5
    for name, prompt in long.items():
        check(scored(outputs[name]), folders["odd_constants"], prompt, 0)


def test_one_token_has_nothing_before_it(folders: dict[str, Path]) -> None:
    (output,) = run(engine_for(load(folders["heads_4_2"])), [scoring("r", [3], 5)])["r"]
    assert (output.token, output.finish, output.prompt_logprobs) == (None, Finish.LENGTH, ())


def test_none_to_follow_needs_a_prompt_to_score() -> None:
    with pytest.raises(
        BadRequest, match="max_tokens is 0; at least one token must be asked for, or none and prompt_lo"
    ):
        SamplingParams(max_tokens=0)
    with pytest.raises(BadRequest, match="max_tokens is -1"):
        SamplingParams(max_tokens=-1, prompt_logprobs=0)
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0


def test_broken_logits_end_the_request_alone(folders: dict[str, Path]) -> None:
    model = load(folders["heads_4_2"])
    engine = engine_for(model)
    forward = engine._runner.forward

    def broken(schedule: Sequence[Work], tokens: Tensor | None = None) -> Logits:
        values = forward(schedule, tokens).values.clone()
        if len(values) > 2:  # the prompt that is scored, first in the schedule
            values[1] = torch.nan
        return summarise(values)

    vars(engine._runner)["forward"] = broken
    prompt = prompt_of("heads_4_2", 12)
    outputs = run(engine, [scoring("bad", prompt, 0, 3), Request("good", prompt, plain_params())])
    (last,) = outputs["bad"]
    assert last.finish is Finish.ERROR
    assert isinstance(last.error, BadLogits)
    assert len(outputs["good"]) == 6
    assert all(used == 0 for used, _ in engine.stats().pages.values())


def test_they_come_through_the_engine_process(folders: dict[str, Path]) -> None:
    """More prompt tokens than one message tells of, and a request that asks for no token at all."""
    folder, prompt = folders["odd_constants"], prompt_of("odd_constants", 200)
    config = EngineConfig(str(folder), device="cpu", dtype="float32", max_num_seqs=4, max_model_len=256)

    async def ask() -> list[list[Output]]:
        async with await EngineClient.start(config) as engine:
            streams = [await engine.submit(scoring(f"r{max_tokens}", prompt, 5, max_tokens)) for max_tokens in (0, 3)]
            return [[output async for output in stream] for stream in streams]

    without, with_tokens = asyncio.run(asyncio.wait_for(ask(), 120))
    for outputs in (without, with_tokens):
        check(scored(outputs), folder, prompt, 5)
        assert sum(bool(output.prompt_logprobs) for output in outputs) > 1
        assert outputs[-1].finish is Finish.LENGTH
    assert all(output.token is None for output in without)
    assert sum(output.token is not None for output in with_tokens) == 3
