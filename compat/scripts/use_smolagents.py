"""smolagents: its OpenAI model, plain, streamed, and calling a tool."""

from __future__ import annotations

from checks import KEY, MODEL, SUM, V1, WEATHER, check, main
from smolagents import OpenAIServerModel, tool

model = OpenAIServerModel(model_id=MODEL, api_base=V1, api_key=KEY, temperature=0, max_tokens=400)


@tool
def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: The city.
    """
    return '{"temperature": 21}'


@check("generate, streamed too")
def generate() -> None:
    said = [{"role": "user", "content": [{"type": "text", "text": SUM}]}]
    assert "42" in str(model.generate(said).content)
    assert "42" in "".join(part.content or "" for part in model.generate_stream(said))


@check("a tool's call")
def call() -> None:
    said = [{"role": "user", "content": [{"type": "text", "text": WEATHER}]}]
    reply = model.generate(said, tools_to_call_from=[get_weather])
    assert reply.tool_calls, reply
    assert reply.tool_calls[0].function.name == "get_weather"


main()
