"""A Messages request as a chat, and forms that an answer or a call must have."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
import pydantic
import pytest

from microscale.server.anthropic.request import CountRequest
from microscale.server.anthropic.thinking import carrying, display_of, effort_of
from microscale.server.anthropic.to_chat import chat_fields
from microscale.server.options import RequestLimits
from support.anthropic_client import ASK, WEATHER
from support.live_server import KEY, MODEL, Live


def request(**fields: Any) -> CountRequest:
    return CountRequest.model_validate({"messages": ASK} | fields)


def told(messages: list[Any], **fields: Any) -> list[dict[str, Any]]:
    """The chat's messages, what is empty left out."""
    chat = chat_fields(request(messages=messages, **fields), RequestLimits())
    return [message.model_dump(exclude_none=True) for message in chat.messages]


def test_blocks_fold_into_messages() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": [1, "é"]}}
    said: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "system", "content": "three"},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "?"},
                {"type": "thinking", "thinking": "four", "signature": "s"},
                {"type": "text", "text": "five"},
                {"type": "text", "text": "six"},
                call,
                call | {"id": "t2"},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "seven"},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                {"type": "text", "text": "eight"},
            ],
        },
        {"role": "assistant", "content": "nine"},
    ]
    made = told(said, system=[{"type": "text", "text": "zero"}, {"type": "text", "text": "and a half"}])
    function = {"name": "f", "arguments": '{"a":[1,"é"]}'}
    assert made == [
        {"role": "system", "content": "zero\n\nand a half"},
        {"role": "user", "content": "one\ntwo"},
        {"role": "system", "content": "three"},
        {
            "role": "assistant",
            "content": "five\nsix",
            "reasoning": "four",
            "tool_calls": [{"id": name, "type": "function", "function": function} for name in ("t1", "t2")],
        },
        {"role": "tool", "content": "seven", "tool_call_id": "t1"},
        {"role": "tool", "content": "Error: ", "tool_call_id": "t2"},
        {"role": "user", "content": "eight"},
        {"role": "assistant", "content": "nine"},
    ]


def test_text_of_other_blocks() -> None:
    text = [{"type": "text", "text": "found"}]
    blocks: list[Any] = [
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "plain"}, "title": "T"},
        {"type": "document", "source": {"type": "content", "content": text}, "context": "C"},
        {"type": "document", "source": {"type": "content", "content": "string"}},
        {"type": "search_result", "source": "https://a.example", "title": "S", "content": text},
    ]
    heard = "T\nplain\nC\nfound\nstring\nS\nhttps://a.example\nfound"
    assert told([{"role": "user", "content": blocks}]) == [{"role": "user", "content": heard}]
    blocks.append({"type": "tool_reference", "tool_name": "g"})
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": blocks}]}
    assert told([call, result])[1]["content"] == f"{heard}\ng"


def test_input_that_was_no_json_goes_back_as_it_was() -> None:
    broken = {"type": "tool_use", "id": "t", "name": "f", "input": {"INVALID_JSON": '{"city": '}}
    (message,) = told([{"role": "assistant", "content": [broken]}])
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": '


@pytest.mark.parametrize(
    ("thinking", "signature", "reasoning"),
    [
        ("shown", "anything", "shown"),
        ("", carrying("hidden 日本"), "hidden 日本"),
        ("", "from elsewhere", None),
        ("", "reasoning.%%%", None),
        ("", "reasoning._w==", None),
        ("", None, None),
    ],
)
def test_what_was_thought_comes_back(thinking: str, signature: str | None, reasoning: str | None) -> None:
    blocks = [{"type": "thinking", "thinking": thinking, "signature": signature}, {"type": "text", "text": "x"}]
    assert told([{"role": "assistant", "content": blocks}])[0].get("reasoning") == reasoning


@pytest.mark.parametrize(
    ("fields", "effort", "display"),
    [
        ({}, None, "hidden"),
        ({"thinking": {"type": "disabled"}}, "low", "hidden"),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, "low", "hidden"),
        ({"thinking": {"type": "adaptive"}}, None, "shown"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, "high", "shown"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, None, "omitted"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "low", "shown"),
        ({"thinking": {"type": "enabled", "budget_tokens": 4096}}, "medium", "shown"),
        ({"thinking": {"type": "enabled", "budget_tokens": 16384}}, "high", "shown"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "medium"}},
            "medium",
            "shown",
        ),
        ({"output_config": {"effort": "low"}}, "low", "hidden"),
    ],
)
def test_thinking_becomes_an_effort(fields: dict[str, Any], effort: str | None, display: str) -> None:
    asked = request(**fields)
    assert (effort_of(asked), display_of(asked)) == (effort, display)


# ---- forms -----------------------------------------------------------------------------------------------------------


class Report(pydantic.BaseModel):
    sky: Literal["clear", "cloudy"]
    wind: Literal["N", "E"]


@pytest.fixture(scope="module")
def chance_client(chance_server: Live) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=chance_server.address, api_key=KEY, max_retries=0, timeout=60)


@pytest.mark.parametrize("seed", range(2))
def test_an_answer_of_a_schema(chance_client: anthropic.Anthropic, seed: int) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 1000, "messages": ASK, "extra_body": {"seed": seed}}
    parsed = chance_client.messages.parse(output_format=Report, **asked)
    assert isinstance(parsed.parsed_output, Report)
    assert (parsed.stop_reason, parsed.model_extra) == ("end_turn", {})
    schema = anthropic.transform_schema(Report)
    format_: Any = {"type": "json_schema", "schema": schema}
    for named in ({"output_config": {"format": format_}}, {"extra_body": {"seed": seed, "output_format": format_}}):
        reply = chance_client.messages.create(**asked | named)
        block = reply.content[0]
        assert isinstance(block, anthropic.types.TextBlock)
        assert Report.model_validate_json(block.text)
    counted = chance_client.messages.count_tokens(model=MODEL, messages=ASK, output_config={"format": format_})
    assert reply.usage.cache_read_input_tokens is not None
    assert counted.input_tokens == reply.usage.input_tokens + reply.usage.cache_read_input_tokens


TIME: Any = {"name": "get_time", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}], ids=["any", "tool"])
def test_a_call_that_must_be_made(chance_client: anthropic.Anthropic, choice: Any, seed: int) -> None:
    tools = [WEATHER | {"input_schema": CITY, "strict": True}, TIME]
    reply = chance_client.messages.create(
        model=MODEL, max_tokens=1000, messages=ASK, tools=tools, tool_choice=choice, extra_body={"seed": seed}
    )
    assert reply.stop_reason == "tool_use"
    call = reply.content[-1]
    assert call.type == "tool_use"
    assert call.name in (("get_weather",) if "name" in choice else ("get_weather", "get_time"))
    assert call.input in ([{"city": "Paris"}, {"city": "Rome"}] if call.name == "get_weather" else [{}])
