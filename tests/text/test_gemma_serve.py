"""A tiny Gemma 4 checkpoint behind ``microscale serve``: its own template, calls and forms in its own format."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from microscale.errors import BadCheckpoint
from microscale.text.chat_template import ChatTemplate
from microscale.text.formats import self_test
from microscale.text.gemma.format import GemmaFormat
from microscale.text.gemma.tokens import GemmaTokens
from support.tiny_gemma4 import CASES, random_gemma4, routers, to_modelopt, write_gemma4
from support.tiny_gemma_text import TEMPLATE, tiny_gemma, write_gemma_text

PATIENCE_S = 120
VOCAB = 512


def test_the_self_test_knows_gemma() -> None:
    chat_format = GemmaFormat(tiny_gemma(), ChatTemplate(TEMPLATE, "test"))
    end = chat_format.answer_end
    self_test(chat_format, VOCAB, [1, end])
    with pytest.raises(BadCheckpoint, match="do not belong together"):
        self_test(chat_format, VOCAB, [1])
    forgetful = GemmaFormat(tiny_gemma(), ChatTemplate("{{ bos_token }}<|turn>model\n", "test"))
    with pytest.raises(BadCheckpoint, match="does not give a prompt back"):
        self_test(forgetful, VOCAB, [end])


@pytest.mark.slow
def test_serve_a_checkpoint(tmp_path: Path) -> None:
    tokens = GemmaTokens.of(tiny_gemma())
    config = replace(CASES["shared_kv"], vocab_size=VOCAB, eos_token_ids=(tokens.end_turn,))
    folder = write_gemma4(tmp_path / "model", config, to_modelopt(random_gemma4(config)), ignore=routers(config))
    write_gemma_text(folder)
    log = tmp_path / "log"
    command = [sys.executable, "-m", "microscale", "serve", str(folder), "--device", "cpu", "--port", "0"]
    command += ["--served-model-name", "gemma", "--max-model-len", "512"]
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=errors, stderr=errors, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        client = openai.OpenAI(base_url=f"{address(log)}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
        ask(client, tokens)
        score(client)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()


def ask(client: openai.OpenAI, tokens: GemmaTokens) -> None:
    def chat(**options: Any) -> Any:
        return client.chat.completions.create(
            model="gemma",
            messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello <turn|> world"}],
            max_tokens=options.pop("max_tokens", 64),
            temperature=0,
            reasoning_effort="low",
            extra_body={"return_token_ids": True},
            **options,
        )

    reply = chat(max_tokens=8)
    prompt = tiny_gemma().decode(reply.model_extra["prompt_token_ids"], show_control=True)
    assert prompt == (
        "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nHello <turn|> world<turn|>\n"
        "<|turn>model\n<|channel>thought\n<channel|>"
    )
    assert sum(map(tiny_gemma().is_control, reply.model_extra["prompt_token_ids"])) == 8
    # Random weights: a form, and no thoughts or texts without an end.
    quiet = {str(token): -100 for token in (tokens.channel, tokens.quote)}
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    reply = chat(response_format=form, logit_bias=quiet)
    assert json.loads(reply.choices[0].message.content)["n"] in (1, 2)
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]
    closing = {str(tiny_gemma().encode(text)[0]): 100 for text in "}]"} | {str(tokens.end_call): 100}
    closing[str(tiny_gemma().control["<|tool_response>"])] = 100
    reply = chat(tools=tools, tool_choice="required", logit_bias=quiet | closing)
    assert reply.choices[0].finish_reason == "tool_calls"
    (call,) = reply.choices[0].message.tool_calls
    assert call.function.name in ("f", "g")
    assert json.loads(call.function.arguments) == {}
    with pytest.raises(openai.BadRequestError, match="does not write arguments as JSON"):
        chat(tools=[{"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}])


def score(client: openai.OpenAI) -> None:
    """Log-probabilities of a prompt: those after ``<bos>``, at the places that the text has without it."""

    def echoed(prompt: str | list[int], max_tokens: int = 2, **options: Any) -> tuple[str, Any, int]:
        reply = client.completions.create(
            model="gemma",
            prompt=prompt,
            echo=True,
            logprobs=1,
            max_tokens=max_tokens,
            temperature=0,
            extra_body={"ignore_eos": True, **options},
        )
        assert reply.usage is not None
        return reply.choices[0].text, reply.choices[0].logprobs, reply.usage.prompt_tokens

    ids = tiny_gemma().encode("the world")
    bos = tiny_gemma().control["<bos>"]
    text, told, length = echoed("the world")
    assert text.startswith("the world")
    assert length == len(ids) + 1
    assert told.tokens[0] == "<bos>"
    assert told.token_logprobs[0] is None
    assert None not in told.token_logprobs[1:]
    assert told.text_offset[:2] == [0, 0]
    places = zip(told.text_offset[1:], told.tokens[1:], strict=True)
    assert all(text.startswith(token, at) for at, token in places if not token.startswith(("bytes:", "<")))
    # The same tokens as ids have the same likelihoods; their text has them all.
    text, same, length = echoed([bos, *ids])
    assert text.startswith("<bos>the world")
    assert same.token_logprobs == told.token_logprobs
    assert same.text_offset[1 : length + 1] == [at + len("<bos>") for at in told.text_offset[1 : length + 1]]
    text, without, length = echoed("the world", 0, add_special_tokens=False)
    assert (text, length, without.text_offset[0]) == ("the world", len(ids), 0)
    assert without.token_logprobs[1:] != told.token_logprobs[2 : length + 1]


def address(log: Path) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = re.search(r"Serving .* at (http://\S+)", log.read_text())
        if found:
            return found.group(1)
        time.sleep(0.1)
    raise AssertionError(log.read_text())
