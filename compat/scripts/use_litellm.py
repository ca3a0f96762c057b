"""LiteLLM: chat, text completion and Responses, its messages handed back as they are."""

from __future__ import annotations

from typing import Any

import litellm
from checks import KEY, MODEL, SUM, V1, WEATHER, check, main

to: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": V1, "api_key": KEY, "temperature": 0, "num_retries": 0}
tools = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


@check("completion")
def completion() -> None:
    reply = litellm.completion(messages=[{"role": "user", "content": SUM}], max_tokens=400, **to)
    assert "42" in reply.choices[0].message.content
    assert reply.choices[0].message.reasoning_content


@check("completion, streamed and built together again")
def stream() -> None:
    chunks = list(
        litellm.completion(
            messages=[{"role": "user", "content": SUM}],
            max_tokens=400,
            stream=True,
            stream_options={"include_usage": True},
            **to,
        )
    )
    whole = litellm.stream_chunk_builder(chunks)
    assert "42" in whole.choices[0].message.content


@check("tools: its own message handed back")
def handed_back() -> None:
    messages: list[Any] = [{"role": "user", "content": WEATHER}]
    reply = litellm.completion(messages=messages, tools=tools, max_tokens=400, **to)
    message = reply.choices[0].message
    call = message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": '{"temperature": 21}'}
    for form in (message, message.model_dump(), message.json()):
        again = litellm.completion(messages=[*messages, form, result], tools=tools, max_tokens=400, **to)
        assert "21" in again.choices[0].message.content, again


@check("tools streamed: the built message handed back")
def stream_back() -> None:
    messages: list[Any] = [{"role": "user", "content": WEATHER}]
    chunks = list(litellm.completion(messages=messages, tools=tools, max_tokens=400, stream=True, **to))
    message = litellm.stream_chunk_builder(chunks).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": '{"temperature": 21}'}
    again = litellm.completion(messages=[*messages, message.model_dump(), result], tools=tools, max_tokens=400, **to)
    assert "21" in again.choices[0].message.content, again


@check("response_format")
def structured() -> None:
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    said = [{"role": "user", "content": "Ann is 30 years old. Name and age as JSON."}]
    reply = litellm.completion(messages=said, response_format=Person, max_tokens=400, **to)
    Person.model_validate_json(reply.choices[0].message.content)


@check("cache_control in content parts")
def cached() -> None:
    part = {"type": "text", "text": SUM, "cache_control": {"type": "ephemeral"}}
    reply = litellm.completion(messages=[{"role": "user", "content": [part]}], max_tokens=400, **to)
    assert "42" in reply.choices[0].message.content


@check("text_completion")
def text() -> None:
    options = to | {"model": f"text-completion-openai/{MODEL}"}
    assert litellm.text_completion(prompt="The capital of France is", max_tokens=8, **options).choices[0].text


@check("responses()")
def responses() -> None:
    options = {key: value for key, value in to.items() if key != "num_retries"}
    reply = litellm.responses(input=SUM, max_output_tokens=400, **options)
    assert "42" in str(reply.output)


@check("anthropic messages through the server's own /v1/messages")
def messages() -> None:
    from checks import ADDRESS

    reply = litellm.completion(
        model=f"anthropic/{MODEL}",
        api_base=ADDRESS,
        api_key=KEY,
        messages=[{"role": "user", "content": SUM}],
        max_tokens=400,
        temperature=0,
    )
    assert "42" in reply.choices[0].message.content


main()
