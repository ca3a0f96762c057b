"""pydantic-ai: an agent with a tool and with an output type, over chat and over Responses."""

from __future__ import annotations

from checks import KEY, MODEL, SUM, V1, WEATHER, check, main
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.output import NativeOutput, ToolOutput
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

settings = ModelSettings(temperature=0, max_tokens=400)


class Person(BaseModel):
    name: str
    age: int


def models() -> list[OpenAIChatModel | OpenAIResponsesModel]:
    provider = OpenAIProvider(base_url=V1, api_key=KEY)
    return [OpenAIChatModel(MODEL, provider=provider), OpenAIResponsesModel(MODEL, provider=provider)]


@check("an answer and a second turn, over chat and Responses")
async def answer() -> None:
    for model in models():
        agent = Agent(model, model_settings=settings)
        first = await agent.run(SUM)
        assert "42" in first.output
        assert (await agent.run("What is 2 + 3?", message_history=first.all_messages())).output


@check("a tool and its result, over chat and Responses")
async def tool() -> None:
    for model in models():
        agent = Agent(model, model_settings=settings)

        @agent.tool_plain
        def get_weather(city: str) -> dict[str, int]:
            """The weather in a city."""
            return {"temperature": 21}

        result = await agent.run(WEATHER)
        assert "21" in result.output, result.output
        async with agent.run_stream(WEATHER) as streamed:
            assert "21" in await streamed.get_output()


@check("output types, native and by tool, over chat and Responses")
async def typed() -> None:
    for model in models():
        for form in (NativeOutput(Person), ToolOutput(Person)):
            agent = Agent(model, output_type=form, model_settings=settings)
            result = await agent.run("Ann is 30 years old. Name and age as JSON.")
            assert isinstance(result.output, Person)


main()
