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
CALL = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
MORE = {
    "broken": CALL + '{"city": <|call|>',
    "no object": CALL + '["Paris"]<|call|>',
    "no input": CALL + "<|call|>",
    "preamble": "<|channel|>analysis<|message|>Hm.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>I look it up.<|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>Now.<|end|>"
    f'<|start|>assistant{CALL}{{"city":"Rome"}}<|call|>',
    "stop": "<|channel|>final<|message|>one two STOP three<|return|>",
    "continued": "and so on.<|return|>",
}
SCRIPTS = SEEDS | {name: len(SEEDS) + at for at, name in enumerate(MORE)}


def asked(script: str | int, options: dict[str, Any]) -> dict[str, Any]:
    seed = SCRIPTS[script] if isinstance(script, str) else script
    extra = {"seed": seed} | options.pop("extra", {})
    return {"model": MODEL, "max_tokens": 500, "messages": ASK, "extra_body": extra} | options


def create(client: anthropic.Anthropic, script: str | int, **options: Any) -> Any:
    return client.messages.create(**asked(script, options))


def stream(client: anthropic.Anthropic, script: str | int, **options: Any) -> tuple[list[Any], Any]:
    with client.messages.stream(**asked(script, options)) as events:
        return list(events), events.get_final_message()
