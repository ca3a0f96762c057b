"""openai-agents: a run with a tool, over Responses (its default) and over chat, streamed and not."""

from __future__ import annotations

import agents
import openai
from checks import KEY, MODEL, SUM, V1, WEATHER, check, main
from pydantic import BaseModel

agents.set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0)
settings = agents.ModelSettings(temperature=0, max_tokens=400)


@agents.function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return '{"temperature": 21}'


class Person(BaseModel):
    name: str
    age: int


def models() -> dict[str, agents.Model]:
    return {
        "responses": agents.OpenAIResponsesModel(MODEL, client),
        "chat": agents.OpenAIChatCompletionsModel(MODEL, client),
    }


@check("an answer, over Responses and chat")
async def answer() -> None:
    for model in models().values():
        agent = agents.Agent("A", instructions="Answer.", model=model, model_settings=settings)
        assert "42" in (await agents.Runner.run(agent, SUM)).final_output


@check("a tool and its result, over Responses and chat")
async def tool() -> None:
    for model in models().values():
        agent = agents.Agent("A", model=model, tools=[get_weather], model_settings=settings)
        result = await agents.Runner.run(agent, WEATHER)
        assert "21" in result.final_output, result.final_output
        on = await agents.Runner.run(agent, [*result.to_input_list(), {"role": "user", "content": SUM}])
        assert on.final_output


@check("a tool and its result, streamed, over Responses and chat")
async def stream() -> None:
    for model in models().values():
        agent = agents.Agent("A", model=model, tools=[get_weather], model_settings=settings)
        result = agents.Runner.run_streamed(agent, WEATHER)
        async for _ in result.stream_events():
            pass
        assert "21" in str(result.final_output), result.final_output


@check("output_type, over Responses and chat")
async def typed() -> None:
    for model in models().values():
        agent = agents.Agent("A", model=model, output_type=Person, model_settings=settings)
        result = await agents.Runner.run(agent, "Ann is 30 years old. Name and age as JSON.")
        assert isinstance(result.final_output, Person)


@check("a session over several turns")
async def session() -> None:
    for model in models().values():
        agent = agents.Agent("A", model=model, tools=[get_weather], model_settings=settings)
        kept = agents.SQLiteSession("one")
        await agents.Runner.run(agent, WEATHER, session=kept)
        assert (await agents.Runner.run(agent, SUM, session=kept)).final_output


main()
