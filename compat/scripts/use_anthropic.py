"""The anthropic SDK: messages, streaming, tools, thinking and counting of tokens."""

from __future__ import annotations

from typing import Any

import anthropic
from checks import ADDRESS, KEY, MODEL, SUM, WEATHER, check, main, refused

client = anthropic.Anthropic(base_url=ADDRESS, api_key=KEY, max_retries=0)
# Version 2 has no argument for it.
greedy: dict[str, Any] = {"extra_body": {"temperature": 0}}
asked: list[Any] = [{"role": "user", "content": SUM}]
tools: list[Any] = [
    {
        "name": "get_weather",
        "description": "The weather in a city",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


@check("messages")
def create() -> None:
    reply = client.messages.create(model=MODEL, messages=asked, max_tokens=400, **greedy, system="Be brief.")
    assert "42" in text_of(reply), reply
    assert reply.stop_reason == "end_turn"
    assert reply.usage.input_tokens > 0


@check("messages, with a bearer token")
def token() -> None:
    bearer = anthropic.Anthropic(base_url=ADDRESS, auth_token=KEY, api_key=None, max_retries=0)
    assert bearer.messages.create(model=MODEL, messages=asked, max_tokens=20)


@check("messages, streamed with its helper")
def stream() -> None:
    with client.messages.stream(model=MODEL, messages=asked, max_tokens=400, **greedy) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert "42" in text
    assert text_of(final) == text
    assert final.usage.output_tokens > 0


@check("thinking blocks, handed back")
def thinking() -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 1500,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    reply = client.messages.create(messages=asked, **options)
    assert reply.content[0].type == "thinking", reply.content
    with client.messages.stream(messages=asked, **options) as events:
        kinds = {event.type for event in events}
    assert "thinking" in kinds, kinds
    again = client.messages.create(
        messages=[*asked, {"role": "assistant", "content": reply.content}, *asked], **options
    )
    assert text_of(again)


@check("tools: call and result")
def use_tools() -> None:
    said: list[Any] = [{"role": "user", "content": WEATHER}]
    reply = client.messages.create(model=MODEL, messages=said, tools=tools, max_tokens=400, **greedy)
    assert reply.stop_reason == "tool_use", reply
    call = next(block for block in reply.content if block.type == "tool_use")
    assert call.input == {"city": "Paris"}
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": [{"type": "text", "text": '{"temperature": 21}'}],
    }
    said += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
    again = client.messages.create(model=MODEL, messages=said, tools=tools, max_tokens=400, **greedy)
    assert "21" in text_of(again), again


@check("tools, streamed")
def stream_tools() -> None:
    said: list[Any] = [{"role": "user", "content": WEATHER}]
    with client.messages.stream(model=MODEL, messages=said, tools=tools, max_tokens=400, **greedy) as events:
        partial = "".join(event.partial_json for event in events if event.type == "input_json")
        final = events.get_final_message()
    call = next(block for block in final.content if block.type == "tool_use")
    assert call.input == {"city": "Paris"}
    assert "Paris" in partial


@check("tools: tool_runner")
def runner() -> None:
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather in a city.

        Args:
            city: The city.
        """
        return '{"temperature": 21}'

    final = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=400, **greedy, tools=[get_weather], messages=[{"role": "user", "content": WEATHER}]
    ).until_done()
    assert "21" in text_of(final), final


@check("count_tokens")
def count() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=asked)
    reply = client.messages.create(model=MODEL, messages=asked, max_tokens=1)
    # What came from the prefix cache is counted apart.
    assert counted.input_tokens == reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0)


@check("errors have Anthropic's form")
def errors() -> None:
    absent = {"model": "no-such-model", "messages": asked, "max_tokens": 1}
    error = refused(anthropic.NotFoundError, lambda: client.messages.create(**absent))
    assert error.body["error"]["type"] == "not_found_error", error.body
    stranger = anthropic.Anthropic(base_url=ADDRESS, api_key="wrong", max_retries=0)
    error = refused(anthropic.AuthenticationError, lambda: stranger.messages.create(**absent))
    assert error.body["error"]["type"] == "authentication_error", error.body


@check("models")
def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]


main()
