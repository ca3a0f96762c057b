"""What the tests of Anthropic's API share: requests to the scripted engine through the ``anthropic`` client."""

from __future__ import annotations

from typing import Any

import anthropic

from support.live_server import MODEL, SEEDS

ASK: list[Any] = [{"role": "user", "content": "What is 2 + 2?"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
THINKING: Any = {"type": "adaptive"}


def asked(script: str | int, options: dict[str, Any]) -> dict[str, Any]:
    seed = SEEDS[script] if isinstance(script, str) else script
    extra = {"seed": seed} | options.pop("extra", {})
    return {"model": MODEL, "max_tokens": 500, "messages": ASK, "extra_body": extra} | options


def create(client: anthropic.Anthropic, script: str | int, **options: Any) -> Any:
    return client.messages.create(**asked(script, options))


def stream(client: anthropic.Anthropic, script: str | int, **options: Any) -> tuple[list[Any], Any]:
    with client.messages.stream(**asked(script, options)) as events:
        return list(events), events.get_final_message()
