"""Log-probabilities of prompts through ``/v1/completions``, against those of transformers: what lm-eval reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
import torch

from microscale.models import embedded
from microscale.text.tokenizer import Tokenizer
from support.serve_command import serving
from support.truth import load_transformers

PROMPTS = ["The capital of France is Paris.", "Two and two make four, naïve 日本 🙂", "a"]
# Both compute in float32, in another order: sums over 4096 tokens of logits of magnitude 30, a step of 2e-6 each.
NEAR = 2e-4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    # Prompts run in several steps, so that their parts must fit together.
    arguments = ["--dtype", "float32", "--max-num-batched-tokens", "16", "--max-num-seqs", "8"]
    with serving(arguments, tmp_path_factory.mktemp("server") / "log") as address:
        yield address


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(embedded.embedded_folder())


@pytest.fixture(scope="module")
def truth(tokenizer: Tokenizer) -> dict[str, torch.Tensor]:
    """For each prompt log-probabilities ``[tokens, vocabulary]``."""
    model = load_transformers(embedded.embedded_folder())
    found = {}
    for text in PROMPTS:
        with torch.no_grad():
            found[text] = model(torch.tensor([tokenizer.encode(text)])).logits[0].log_softmax(-1)
    return found


def complete(server: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server}/v1/completions", json=fields, timeout=60)


@pytest.mark.parametrize("text", PROMPTS)
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_an_echo_tells_how_likely_the_prompt_was(
    server: str, tokenizer: Tokenizer, truth: dict[str, torch.Tensor], text: str, max_tokens: int
) -> None:
    body = {"prompt": text, "echo": True, "logprobs": 2, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    reply = complete(server, **body).json()
    [choice] = reply["choices"]
    told, ids = choice["logprobs"], tokenizer.encode(text)
    assert choice["text"].startswith(text)
    assert choice["finish_reason"] == "length"
    assert reply["usage"]["prompt_tokens"] == len(ids)
    assert reply["usage"]["completion_tokens"] == max_tokens
    assert {len(column) for column in told.values()} == {len(ids) + max_tokens}
    assert (told["token_logprobs"][0], told["top_logprobs"][0], told["text_offset"][0]) == (None, None, 0)
    wanted = truth[text]
    for at, token in enumerate(ids[1:], 1):
        row = wanted[at - 1]
        assert told["token_logprobs"][at] == pytest.approx(row[token].item(), abs=NEAR)
        assert max(told["top_logprobs"][at].values()) == pytest.approx(row.max().item(), abs=NEAR)
        assert 2 <= len(told["top_logprobs"][at]) <= 3
    if max_tokens:
        assert told["token_logprobs"][len(ids)] == pytest.approx(wanted[-1].max().item(), abs=NEAR)
    starts = zip(told["text_offset"], told["tokens"], strict=True)
    assert all(choice["text"].startswith(token, at) for at, token in starts if not token.startswith("bytes:"))


def test_token_ids_several_prompts_and_a_stream(server: str, tokenizer: Tokenizer) -> None:
    lists = [tokenizer.encode(text) for text in PROMPTS]
    body = {"prompt": lists, "echo": True, "logprobs": 1, "max_tokens": 0}
    whole = complete(server, **body).json()["choices"]
    alone = [complete(server, **body | {"prompt": text}).json()["choices"][0] for text in PROMPTS]
    assert [choice["text"] for choice in whole] == PROMPTS
    for together, single in zip(whole, alone, strict=True):
        assert together["logprobs"]["token_logprobs"][1:] == pytest.approx(
            single["logprobs"]["token_logprobs"][1:], abs=NEAR
        )
    streamed = complete(server, **body | {"prompt": PROMPTS[0], "stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in streamed if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == PROMPTS[0]
    assert events[0]["choices"][0]["logprobs"]["tokens"] == alone[0]["logprobs"]["tokens"]


def test_a_prompt_that_was_seen_before_is_told_in_full(server: str) -> None:
    body = {"prompt": PROMPTS[0] * 4, "echo": True, "logprobs": 0, "max_tokens": 1, "temperature": 0}
    first, second = (complete(server, **body).json()["choices"][0]["logprobs"] for _ in range(2))
    assert None not in second["token_logprobs"][1:]
    assert first["token_logprobs"][1:] == pytest.approx(second["token_logprobs"][1:], abs=NEAR)


def test_prompt_logprobs_have_the_form_of_vllms(
    server: str, tokenizer: Tokenizer, truth: dict[str, torch.Tensor]
) -> None:
    reply = complete(server, prompt=PROMPTS[0], prompt_logprobs=3, max_tokens=2, temperature=0).json()
    told, ids = reply["choices"][0]["prompt_logprobs"], tokenizer.encode(PROMPTS[0])
    assert told[0] is None
    assert len(told) == len(ids)
    for at, entries in enumerate(told[1:], 1):
        row = truth[PROMPTS[0]][at - 1]
        own = entries[str(ids[at])]
        assert own["logprob"] == pytest.approx(row[ids[at]].item(), abs=NEAR)
        assert own["decoded_token"] == tokenizer.decode([ids[at]])
        ranks = [entry["rank"] for entry in entries.values() if entry["rank"] is not None]
        assert sorted(ranks) == [1, 2, 3]
    assert not reply["choices"][0]["text"].startswith(PROMPTS[0])


def test_an_echo_without_logprobs_costs_no_scores(server: str) -> None:
    reply = complete(server, prompt=PROMPTS[0], echo=True, max_tokens=2, temperature=0).json()
    assert reply["choices"][0]["text"].startswith(PROMPTS[0])
    assert reply["choices"][0]["logprobs"] is None
    only = complete(server, prompt=PROMPTS[0], echo=True, max_tokens=0).json()
    assert only["choices"][0]["text"] == PROMPTS[0]
    assert only["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(server: str, fields: dict[str, Any], param: str) -> None:
    reply = complete(server, prompt="x", **fields)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert complete(server, prompt="x", max_tokens=1, best_of=1, suffix="").status_code == 200
