"""``--speculative-config`` over HTTP: the same answers, streams and stop strings, ``usage`` and metrics."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from microscale.engine.config import EngineConfig
from microscale.engine.generate import Generation
from microscale.engine.sampling_params import SamplingParams
from microscale.text.byte_tokenizer import byte_tokenizer
from support.loading import load_model
from support.serve_command import PATIENCE_S, serving

pytestmark = pytest.mark.nightly
PROMPT = list(b"abcd abcd abcd abcd abcd ab")
NEW = 60
# The length is fixed: what is drafted must not depend on how busy the machine is.
CONFIG = """{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 4,
             "num_speculative_tokens_per_batch_size": {"1": 4}}"""

TINY = ["gpt-oss-tiny", "--load-format", "dummy", "--served-model-name", "tiny", "--max-model-len", "512"]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("serve") / "log"
    with serving([*TINY, "--speculative-config", CONFIG], log) as found:
        yield found


@pytest.fixture(scope="module")
def text() -> str:
    """What the model says without drafts."""
    model = load_model(EngineConfig("gpt-oss-tiny", load_format="dummy", device="cpu"))
    [completion] = Generation(model, [PROMPT], SamplingParams(max_tokens=NEW, ignore_eos=True)).run()
    return byte_tokenizer().decode(completion.token_ids)


def client_of(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


def ask(address: str, **options: Any) -> Any:
    """A completion, or a stream of it."""
    asked: dict[str, Any] = {"max_tokens": NEW, "temperature": 0, "extra_body": {"ignore_eos": True}, **options}
    return client_of(address).completions.create(model="tiny", prompt=PROMPT, **asked)


def drafts_of(usage: openai.types.CompletionUsage | None) -> tuple[int, int]:
    """Accepted and rejected."""
    assert usage is not None
    details = usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens is not None
    assert details.rejected_prediction_tokens is not None
    return details.accepted_prediction_tokens, details.rejected_prediction_tokens


def counters(address: str) -> dict[str, float]:
    page = urllib.request.urlopen(f"{address}/metrics", timeout=PATIENCE_S).read().decode()
    return {
        name + place: float(value)
        for name, place, value in re.findall(
            r'^microscale:(spec_decode_\w+)_total\{model_name="tiny"(?:,position="(\d)")?\} (\S+)$', page, re.MULTILINE
        )
    }


def test_answers_streams_and_counts(address: str, text: str) -> None:
    before = counters(address)
    assert before["spec_decode_num_drafts"] == 0
    reply = ask(address)
    assert reply.choices[0].text == text
    accepted, rejected = drafts_of(reply.usage)
    assert accepted > 0
    assert accepted + rejected > 0
    after = counters(address)
    assert after["spec_decode_num_accepted_tokens"] == accepted
    assert after["spec_decode_num_draft_tokens"] == accepted + rejected
    by_place = [after[f"spec_decode_num_accepted_tokens_per_pos{place}"] for place in range(4)]
    assert sum(by_place) == accepted
    assert by_place == sorted(by_place, reverse=True)
    assert 0 < by_place[0] <= after["spec_decode_num_drafts"]

    chunks = list(ask(address, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == text
    assert drafts_of(chunks[-1].usage) == (accepted, rejected)


def test_a_stop_string_in_the_midst_of_a_draft(address: str, text: str) -> None:
    """The engine tells several tokens at once; what comes after the stop string is not shown."""
    for place in (10, 23, 31, 44):
        stop = text[place : place + 3]
        reply = ask(address, stop=[stop])
        assert reply.choices[0].text == text[: text.index(stop)]
        assert reply.choices[0].finish_reason == "stop"


def test_penalties_run_without_drafts_and_usage_says_so(address: str) -> None:
    assert drafts_of(ask(address, presence_penalty=0.5).usage) == (0, 0)


def test_chat_says_it_beside_the_reasoning(address: str) -> None:
    reply = client_of(address).chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=30, temperature=0
    )
    assert min(drafts_of(reply.usage)) >= 0
    assert reply.usage is not None
    assert reply.usage.completion_tokens_details is not None
    assert reply.usage.completion_tokens_details.reasoning_tokens is not None


def test_a_draft_head_changes_no_answer(text: str, tmp_path: Path) -> None:
    """A random one of the model's own widths."""
    config = """{"method": "dflash", "num_speculative_tokens": 2, "model": "dflash-tiny",
                 "num_speculative_tokens_per_batch_size": {"1": 2}}"""
    with serving([*TINY, "--speculative-config", config], tmp_path / "log") as found:
        reply = ask(found)
        assert reply.choices[0].text == text
        assert sum(drafts_of(reply.usage)) > NEW


def test_the_plan_says_who_drafts(address: str) -> None:
    plan = json.load(urllib.request.urlopen(f"{address}/plan", timeout=PATIENCE_S))
    told = plan["speculative"]
    assert (told["method"], told["num_speculative_tokens"], told["length"]) == ("ngram", 4, "fixed")
    assert told["predicted"] == []  # on a CPU predictions only rank kernels
