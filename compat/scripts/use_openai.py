"""openai-python: every call of its that the server answers, and what it returns handed back as it came."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
from checks import KEY, MODEL, SUM, V1, WEATHER, check, main, refused
from pydantic import BaseModel

client = openai.OpenAI(base_url=V1, api_key=KEY, max_retries=0)
asked: list[Any] = [{"role": "user", "content": SUM}]
weather: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
RESULT = json.dumps({"temperature": 21})


class Person(BaseModel):
    name: str
    age: int


@check("models")
def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


@check("chat")
def chat() -> None:
    reply = client.chat.completions.create(model=MODEL, messages=asked, temperature=0, max_tokens=400)
    assert "42" in (reply.choices[0].message.content or ""), reply
    assert reply.usage
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


@check("chat, streamed")
def chat_stream() -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=asked, temperature=0, max_tokens=400, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "42" in text, text
    assert chunks[-1].usage


@check("chat, streaming helper with events")
def chat_helper() -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=asked, temperature=0, max_tokens=400, logprobs=True, top_logprobs=2
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done", "logprobs.content.done"} <= kinds, kinds
    logprobs = final.choices[0].logprobs
    assert logprobs
    text = "".join(entry.token for entry in logprobs.content or [])
    assert text == final.choices[0].message.content, "logprobs.content does not align with content"


@check("chat, parse()")
def chat_parse() -> None:
    said: list[Any] = [{"role": "user", "content": "Ann is 30 years old. Name and age as JSON."}]
    reply = client.chat.completions.parse(
        model=MODEL, messages=said, response_format=Person, temperature=0, max_tokens=400
    )
    message = reply.choices[0].message
    assert isinstance(message.parsed, Person)
    again = client.chat.completions.create(
        model=MODEL, messages=[*said, message.model_dump(), *asked], temperature=0, max_tokens=400
    )
    assert again.choices[0].message.content


@check("chat, tools: parse(), call handed back by model_dump()")
def chat_tools() -> None:
    tools: Any = [{"type": "function", "function": weather}]
    said: list[Any] = [{"role": "user", "content": WEATHER}]
    reply = client.chat.completions.parse(model=MODEL, messages=said, tools=tools, temperature=0, max_tokens=400)
    message = reply.choices[0].message
    assert message.tool_calls, reply
    call = message.tool_calls[0]
    assert call.function.parsed_arguments == {"city": "Paris"}, call
    said += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    again = client.chat.completions.create(model=MODEL, messages=said, tools=tools, temperature=0, max_tokens=400)
    assert "21" in (again.choices[0].message.content or ""), again


@check("completions, streamed too")
def completions() -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}
    whole = client.completions.create(**options, logprobs=2)
    parts = list(client.completions.create(**options, stream=True))
    assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text
    assert whole.choices[0].logprobs
    assert len(whole.choices[0].logprobs.tokens or []) == 8


@check("responses, streamed too")
def responses() -> None:
    options: dict[str, Any] = {"model": MODEL, "input": SUM, "temperature": 0, "max_output_tokens": 400}
    reply = client.responses.create(**options)
    assert "42" in reply.output_text
    with client.responses.stream(**options) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == reply.output_text
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"


@check("responses, parse() handed back by model_dump()")
def responses_parse() -> None:
    said: list[Any] = [{"role": "user", "content": "Ann is 30 years old. Name and age as JSON."}]
    reply = client.responses.parse(model=MODEL, input=said, text_format=Person, temperature=0, max_output_tokens=400)
    assert isinstance(reply.output_parsed, Person)
    back = [*said, *(item.model_dump() for item in reply.output), *asked]
    again = client.responses.create(model=MODEL, input=back, temperature=0, max_output_tokens=400)
    assert again.output_text


@check("responses, tools: call handed back by model_dump(), and by previous_response_id")
def responses_tools() -> None:
    tools: Any = [{"type": "function", **weather}]
    said: list[Any] = [{"role": "user", "content": WEATHER}]
    reply = client.responses.parse(model=MODEL, input=said, tools=tools, temperature=0, max_output_tokens=400)
    call = next(item for item in reply.output if item.type == "function_call")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    back: list[Any] = [*said, *(item.model_dump() for item in reply.output), output]
    again = client.responses.create(model=MODEL, input=back, tools=tools, temperature=0, max_output_tokens=400)
    assert "21" in again.output_text, again.output
    on: Any = client.responses.create(
        model=MODEL, input=[output], previous_response_id=reply.id, tools=tools, temperature=0, max_output_tokens=400
    )
    assert on.output_text == again.output_text


@check("responses: retrieve, input_items, input_tokens, delete")
def responses_stored() -> None:
    reply = client.responses.create(model=MODEL, input=SUM, max_output_tokens=400)
    assert client.responses.retrieve(reply.id).id == reply.id
    items = list(client.responses.input_items.list(reply.id))
    assert items[0].type == "message"
    counted = client.responses.input_tokens.count(model=MODEL, input=SUM)
    assert reply.usage
    assert counted.input_tokens == reply.usage.input_tokens
    client.responses.delete(reply.id)
    refused(openai.NotFoundError, lambda: client.responses.retrieve(reply.id))


@check("keys that OpenAI's API has and the answer does not depend on")
def passed_over() -> None:
    client.chat.completions.create(
        model=MODEL,
        messages=asked,
        max_completion_tokens=20,
        store=True,
        metadata={"a": "b"},
        user="someone",
        service_tier="auto",
        prompt_cache_key="key",
        safety_identifier="someone",
        verbosity="low",
        reasoning_effort="minimal",
        extra_body={"prompt_cache_retention": "24h", "a_key_of_next_year": {"deep": [1]}},
    )
    client.responses.create(
        model=MODEL,
        input=SUM,
        max_output_tokens=20,
        truncation="auto",
        max_tool_calls=3,
        text={"verbosity": "low"},
        reasoning={"effort": "minimal", "summary": "auto"},
        include=["reasoning.encrypted_content"],
        extra_body={"a_key_of_next_year": {"deep": [1]}},
    )


@check("errors have OpenAI's types and codes")
def errors() -> None:
    long: list[Any] = [{"role": "user", "content": "word " * 9000}]
    too_long = refused(openai.BadRequestError, lambda: client.chat.completions.create(model=MODEL, messages=long))
    assert too_long.code == "context_length_exceeded", too_long
    stranger = openai.OpenAI(base_url=V1, api_key="wrong", max_retries=0)
    assert refused(openai.AuthenticationError, stranger.models.list).code == "invalid_api_key"


@check("async client: 8 streams at once")
async def streams() -> None:
    async with openai.AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0) as many:

        async def ask() -> str:
            stream = await many.chat.completions.create(
                model=MODEL, messages=asked, temperature=0, max_tokens=400, stream=True
            )
            return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

        assert all("42" in text for text in await asyncio.gather(*(ask() for _ in range(8))))


main()
