"""What a chat format decides of a reply, with one whose turns hold several calls and whose prompts begin with
``<bos>``: Gemma 4's, over a scripted engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2 as httpx
import openai
import pytest

from support.live_server import KEY, MODEL, SEEDS, Live, live
from support.tiny_gemma_text import tiny_gemma, write_gemma_text

THOUGHT = "<|channel>thought\nTwo of them.\n<channel|>"
TURNS = {
    "two": f"{THOUGHT}<|tool_call>call:f{{a:1}}<tool_call|><|tool_call>call:g{{b:2}}<tool_call|><|tool_response>",
    "not closed": "<|tool_call>call:f{a:1}<|tool_call>call:g{b:2}<tool_call|><|tool_response>",
    "none": "No call.<turn|>",
}
SEED = {name: len(SEEDS) + at for at, name in enumerate(TURNS)}
PARAMETERS = {"type": "object", "properties": {}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("f", "g")]
ASK: list[Any] = [{"role": "user", "content": "Both, please."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("server")
    text = write_gemma_text(folder / "text")
    with live(folder / "log", tokenizer=str(text), turns=list(TURNS.values())) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.v1, api_key=KEY, max_retries=0)


@pytest.mark.parametrize("options", [{}, {"tool_choice": "required"}, {"extra_body": {"ignore_eos": True}}])
@pytest.mark.parametrize("turn", ["two", "not closed"])
def test_chat_gives_one_call_where_one_is_asked_for(client: openai.OpenAI, turn: str, options: dict[str, Any]) -> None:
    def calls(**more: Any) -> tuple[list[str], str, int]:
        reply = client.chat.completions.create(
            model=MODEL, messages=ASK, tools=TOOLS, seed=SEED[turn], max_tokens=200, **options | more
        )
        [choice] = reply.choices
        assert reply.usage is not None
        return (
            [call.function.name for call in choice.message.tool_calls or []],
            choice.finish_reason,
            reply.usage.completion_tokens,
        )

    one, reason, length = calls(parallel_tool_calls=False)
    assert (one, reason) == (["f"], "tool_calls")
    if "extra_body" not in options:
        both, reason, whole = calls()
        assert (both, reason) == (["f", "g"], "tool_calls")
        assert calls(parallel_tool_calls=True)[0] == both
        # The engine itself ends there, so that nothing is computed in vain.
        assert turn == "not closed" or length == whole - len(tiny_gemma().encode("call:g{b:2}")) - 3


def test_a_stream_of_one_call(client: openai.OpenAI) -> None:
    def streamed(**options: Any) -> tuple[list[str], str]:
        chunks = client.chat.completions.create(
            model=MODEL, messages=ASK, tools=TOOLS, seed=SEED["two"], stream=True, **options
        )
        choices = [chunk.choices[0] for chunk in chunks]
        names = [call.function.name for choice in choices for call in choice.delta.tool_calls or [] if call.function]
        return [name for name in names if name], choices[-1].finish_reason or ""

    assert streamed() == (["f", "g"], "tool_calls")
    assert streamed(parallel_tool_calls=False) == (["f"], "tool_calls")


def test_an_answer_is_left_alone(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=TOOLS, seed=SEED["none"], parallel_tool_calls=False
    )
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("No call.", "stop")


def test_as_the_model_wrote_it(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        tools=TOOLS,
        seed=SEED["two"],
        parallel_tool_calls=False,
        extra_body={"skip_special_tokens": False},
    )
    text = reply.choices[0].message.content or ""
    assert text == THOUGHT + "<|tool_call>call:f{a:1}<tool_call|>"


@pytest.mark.parametrize("stream", [False, True])
def test_responses_give_one_call(client: openai.OpenAI, stream: bool) -> None:
    def calls(**options: Any) -> list[str]:
        tools: list[Any] = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
        asked = {"model": MODEL, "input": "Both.", "tools": tools, "extra_body": {"seed": SEED["two"]}, **options}
        if not stream:
            return [item.name for item in client.responses.create(**asked).output if item.type == "function_call"]
        events = list(client.responses.create(stream=True, **asked))
        assert events[-1].type == "response.completed"
        return [item.name for item in events[-1].response.output if item.type == "function_call"]

    assert calls() == calls(parallel_tool_calls=True) == ["f", "g"]
    assert calls(parallel_tool_calls=False) == ["f"]


@pytest.mark.parametrize("kind", ["auto", "any"])
def test_messages_give_one_call(server: Live, kind: str) -> None:
    client = anthropic.Anthropic(base_url=server.address, api_key=KEY, max_retries=0)

    def calls(**choice: Any) -> tuple[list[str], str | None]:
        asked: Any = {"type": kind, **choice}
        tools: Any = [{"name": name, "input_schema": PARAMETERS} for name in ("f", "g")]
        reply = client.messages.create(
            model=MODEL,
            max_tokens=200,
            messages=ASK,
            tools=tools,
            tool_choice=asked,
            extra_body={"seed": SEED["two"]},
        )
        return [block.name for block in reply.content if block.type == "tool_use"], reply.stop_reason

    assert calls() == calls(disable_parallel_tool_use=False) == (["f", "g"], "tool_use")
    assert calls(disable_parallel_tool_use=True) == (["f"], "tool_use")


def post(server: Live, path: str, **body: Any) -> Any:
    reply = httpx.post(f"{server.address}{path}", json=body, headers={"authorization": f"Bearer {KEY}"}, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply


BOS = "<bos>"


@pytest.mark.parametrize(
    ("prompt", "options", "begins"),
    [
        ("the world", {}, True),
        ("the world", {"add_special_tokens": True}, True),
        ("the world", {"add_special_tokens": False}, False),
        ("<bos>the world", {}, True),
        (["the world", "<bos>the world"], {}, True),
        (tiny_gemma().encode("the world"), {}, False),
        ([tiny_gemma().encode("the world")], {"add_special_tokens": True}, False),
    ],
)
def test_a_raw_prompt_begins_with_bos(server: Live, prompt: Any, options: dict[str, Any], begins: bool) -> None:
    wanted = tiny_gemma().encode_with_control(BOS if begins else "") + tiny_gemma().encode("the world")
    body = {"prompt": prompt, "max_tokens": 3, "return_token_ids": True, "seed": SEED["none"], **options}
    reply = post(server, "/v1/completions", **body)
    found = reply.json()
    assert all(choice["prompt_token_ids"] == wanted for choice in found["choices"])
    assert found["usage"]["prompt_tokens"] == len(wanted) * len(found["choices"])
    assert "x-microscale-ignored" not in reply.headers
    # What is sent back is what was sent, without the token that was added.
    echoed = post(server, "/v1/completions", **body, echo=True).json()["choices"]
    sent = prompt if isinstance(prompt, list) and isinstance(prompt[0], str) else [prompt]
    texts = [text if isinstance(text, str) else "the world" for text in sent]
    assert [choice["text"] for choice in echoed] == [f"{text}No " for text in texts]


def test_tokenize_keeps_the_same_rule(server: Live) -> None:
    def tokens(**body: Any) -> list[int]:
        return list(post(server, "/tokenize", **body).json()["tokens"])

    plain = tiny_gemma().encode("the world")
    bos = tiny_gemma().control[BOS]
    assert tokens(prompt="the world") == tokens(prompt="<bos>the world") == [bos, *plain]
    assert tokens(prompt="the world", add_special_tokens=False) == plain
    # A chat's template has it already.
    assert tokens(messages=ASK, add_special_tokens=True).count(bos) == 1
