"""Tiny Qwen3-MoE and Gemma 4 checkpoints behind ``microscale serve``: templates, reasoning, calls and forms."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from microscale.text.chatml.tokens import ChatmlTokens
from microscale.text.gemma.tokens import GemmaTokens
from support.serve_command import PATIENCE_S, serving
from support.tiny_chatml_text import XML_CALLS, tiny_chatml, write_chatml_text
from support.tiny_gemma4 import CASES as GEMMA_CASES
from support.tiny_gemma4 import random_gemma4, routers, to_modelopt, write_gemma4
from support.tiny_gemma_text import tiny_gemma, write_gemma_text
from support.tiny_qwen3_moe import CASES, published, random_qwen3_moe, write_qwen3_moe

VOCAB = 512
MODEL = "qwen"
TOKENS = ChatmlTokens.of(tiny_chatml())
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"], "additionalProperties": False}
ASK: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello <|im_end|> <tool_call> world"},
]
PROMPT = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello <|im_end|> <tool_call> world<|im_end|>\n"
    "<|im_start|>assistant\n"
)
NO_THOUGHT = "<think>\n\n</think>\n\n"


@pytest.mark.nightly
def test_serve_qwen3(tmp_path: Path) -> None:
    config = replace(CASES["as_published"], vocab_size=VOCAB, max_context=1024, eos_token_ids=(TOKENS.end,))
    folder = write_qwen3_moe(tmp_path / "model", config, published(random_qwen3_moe(config)))
    write_chatml_text(folder)
    arguments = [str(folder), "--served-model-name", MODEL, "--layer-format", "experts=mxfp4"]
    with serving(arguments, tmp_path / "log") as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
        prompts(client)
        forms(client)
        calls(client)
        thoughts(client)


@pytest.mark.nightly
def test_serve_qwen3_with_xml_calls(tmp_path: Path) -> None:
    config = replace(CASES["as_published"], vocab_size=VOCAB, max_context=1024, eos_token_ids=(TOKENS.end,))
    folder = write_qwen3_moe(tmp_path / "model", config, published(random_qwen3_moe(config)))
    write_chatml_text(folder, XML_CALLS)
    arguments = [str(folder), "--served-model-name", MODEL, "--layer-format", "experts=mxfp4"]
    with serving(arguments, tmp_path / "log") as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
        calls(client, reasoning_effort="none")


def chat(client: openai.OpenAI, **options: Any) -> Any:
    extra = {"return_token_ids": True, **options.pop("extra_body", {})}
    asked = {"max_tokens": 64, "temperature": 0, **options}
    return client.chat.completions.create(model=MODEL, messages=ASK, extra_body=extra, **asked)


def prompts(client: openai.OpenAI) -> None:
    """By the checkpoint's own template, with and without a thought; the user's text stays text."""
    for extra, begun in (({}, ""), ({"chat_template_kwargs": {"enable_thinking": False}}, NO_THOUGHT)):
        ids = chat(client, max_tokens=4, extra_body=extra).model_extra["prompt_token_ids"]
        assert tiny_chatml().decode(ids, show_control=True) == PROMPT + begun
        assert sum(map(tiny_chatml().is_control, ids)) == 5 + begun.count("<")


# Random weights write what they like: thoughts without an end are kept away, and where a form ends is its own.
QUIET = {str(TOKENS.think): -100}


def forms(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    for effort in ("none", "high"):
        [choice] = chat(client, response_format=form, logit_bias=QUIET, reasoning_effort=effort).choices
        assert json.loads(choice.message.content)["n"] in (1, 22)
        assert choice.finish_reason == "stop"
    # With a thought that is wished for: it has the token, the form follows it.
    eager = {str(TOKENS.think): 100, str(TOKENS.end_think): 90}
    [choice] = chat(client, response_format=form, logit_bias=eager).choices
    assert json.loads(choice.message.content)["n"] in (1, 22)
    assert TOKENS.end_think in choice.model_extra["token_ids"]


def calls(client: openai.OpenAI, **common: Any) -> None:
    tools: list[Any] = [
        {"type": "function", "function": {"name": name, "strict": True, "parameters": SCHEMA}} for name in ("f", "g")
    ]

    def made(**options: Any) -> list[tuple[str, Any]]:
        [choice] = chat(client, tools=tools, logit_bias=QUIET | {str(TOKENS.end): 50}, **common, **options).choices
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        return [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]

    [(name, arguments)] = made(tool_choice="required")
    assert name in ("f", "g")
    assert arguments["n"] in (1, 22)
    [(name, arguments)] = made(tool_choice={"type": "function", "function": {"name": "g"}}, parallel_tool_calls=False)
    assert (name, arguments["n"] in (1, 22)) == ("g", True)
    # A second call where the model will not end, and none where one is all that may come.
    more = {str(TOKENS.end): -100, str(TOKENS.think): -100}
    asked: dict[str, Any] = {"tools": tools, "tool_choice": "required", "max_tokens": 150, "logit_bias": more, **common}
    [several] = chat(client, **asked).choices
    [one] = chat(client, **asked, parallel_tool_calls=False).choices
    assert len(several.message.tool_calls) > 1
    assert len(one.message.tool_calls) == 1
    assert one.finish_reason == "tool_calls"


def thoughts(client: openai.OpenAI) -> None:
    """In a thought that the request begins, what the model writes is reasoning, streamed or not."""
    marks = (TOKENS.think, TOKENS.end_think, TOKENS.call, TOKENS.end_call, *TOKENS.stops)
    begun: list[Any] = [*ASK, {"role": "assistant", "reasoning_content": "Hm", "content": ""}]
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": begun,
        "max_tokens": 24,
        "temperature": 0,
        "logit_bias": {str(token): -100 for token in marks},
        "extra_body": {"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True},
    }
    reply = client.chat.completions.create(**asked)
    ids = (reply.model_extra or {})["prompt_token_ids"]
    assert tiny_chatml().decode(ids, show_control=True) == f"{PROMPT}<think>\nHm"
    message = reply.choices[0].message
    reasoning = (message.model_extra or {})["reasoning_content"]
    assert reasoning
    assert not message.content
    chunks = client.chat.completions.create(**asked, stream=True)
    deltas = [chunk.choices[0].delta.model_extra or {} for chunk in chunks if chunk.choices]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == reasoning


# ---- Gemma 4 ---------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_serve_gemma(tmp_path: Path) -> None:
    tokens = GemmaTokens.of(tiny_gemma())
    config = replace(GEMMA_CASES["shared_kv"], vocab_size=VOCAB, eos_token_ids=(tokens.end_turn,))
    folder = write_gemma4(tmp_path / "model", config, to_modelopt(random_gemma4(config)), ignore=routers(config))
    write_gemma_text(folder)
    arguments = [str(folder), "--served-model-name", "gemma", "--max-model-len", "512"]
    with serving(arguments, tmp_path / "log") as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
        gemma_forms_and_calls(client, tokens)
        gemma_scores(client)


def gemma_forms_and_calls(client: openai.OpenAI, tokens: GemmaTokens) -> None:
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


def gemma_scores(client: openai.OpenAI) -> None:
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
