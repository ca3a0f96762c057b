"""llama-index: OpenAILike, chat and completion, streamed and with tools."""

from __future__ import annotations

from typing import Any

from checks import KEY, MODEL, SUM, V1, WEATHER, check, main
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

options: dict[str, Any] = {"model": MODEL, "api_base": V1, "api_key": KEY, "temperature": 0, "max_tokens": 400}
options |= {"max_retries": 0, "context_window": 4096, "timeout": 120}
chat = OpenAILike(is_chat_model=True, is_function_calling_model=True, **options)
asked = [ChatMessage(role="user", content=SUM)]


@check("chat, streamed too")
def answer() -> None:
    assert "42" in str(chat.chat(asked).message.content)
    assert "42" in str(list(chat.stream_chat(asked))[-1].message.content)


@check("complete, streamed too")
def complete() -> None:
    plain = OpenAILike(is_chat_model=False, **options | {"max_tokens": 8})
    whole = plain.complete("The capital of France is").text
    assert whole
    assert list(plain.stream_complete("The capital of France is"))[-1].text == whole


@check("tools: call, result and its own message handed back")
def tools() -> None:
    def get_weather(city: str) -> dict[str, int]:
        """The weather in a city."""
        return {"temperature": 21}

    weather = FunctionTool.from_defaults(get_weather)
    reply = chat.chat_with_tools([weather], user_msg=WEATHER)
    calls = chat.get_tool_calls_from_response(reply)
    assert calls[0].tool_kwargs == {"city": "Paris"}, reply
    history = [ChatMessage(role="user", content=WEATHER), reply.message]
    history.append(
        ChatMessage(role="tool", content='{"temperature": 21}', additional_kwargs={"tool_call_id": calls[0].tool_id})
    )
    again = chat.chat_with_tools([weather], chat_history=history)
    assert "21" in str(again.message.content), again


@check("structured output")
def structured() -> None:
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    model = chat.as_structured_llm(Person)
    assert isinstance(model.chat([ChatMessage(role="user", content="Ann is 30 years old.")]).raw, Person)


main()
