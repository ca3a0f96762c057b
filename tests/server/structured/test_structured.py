"""Structured output from the client's fields to the last byte: a model of chance, whose answers have the asked form."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import httpx2 as httpx
import openai
import pydantic
import pytest

from support.live_server import KEY, MODEL, Live

ASK: list[Any] = [{"role": "user", "content": "The weather in Paris, as JSON."}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": CITY, "strict": True}}
TIME: Any = {"type": "function", "function": {"name": "get_weather_time"}}
SEEDS = range(3)


class Report(pydantic.BaseModel):
    sky: Literal["clear", "cloudy"]
    wind: list[Literal["N", "E", "S", "W"]]


@pytest.fixture(scope="module")
def client(chance_server: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=chance_server.v1, api_key=KEY, max_retries=0, timeout=60)


def ask(client: openai.OpenAI, **options: Any) -> list[Any]:
    asked: dict[str, Any] = {"model": MODEL, "messages": ASK, "max_tokens": 1000} | options
    choices = [choice for seed in SEEDS for choice in client.chat.completions.create(seed=seed, **asked).choices]
    for choice in choices:
        assert choice.finish_reason != "length", "the model of chance did not come to an end"
        assert "flaws" not in (choice.model_extra or {})
    return choices


def test_a_pydantic_model_is_the_form(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Report, n=3, seed=1)
    assert len(reply.choices) == 3
    assert all(isinstance(choice.message.parsed, Report) for choice in reply.choices)
    assert any((choice.message.model_extra or {}).get("reasoning") for choice in reply.choices)


def test_any_object(client: openai.OpenAI) -> None:
    for choice in ask(client, response_format={"type": "json_object"}):
        assert isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize(
    ("field", "matches"),
    [
        ({"guided_json": CITY}, r'\{\s*"city"\s*:\s*"(Paris|Rome)"\s*,\s*"days"\s*:\s*-?\d+\s*\}'),
        ({"guided_json": json.dumps(CITY)}, r'\{\s*"city"\s*:\s*"(Paris|Rome)"\s*,\s*"days"\s*:\s*-?\d+\s*\}'),
        ({"guided_regex": r"[a-z]{3}/\d+"}, r"[a-z]{3}/\d+"),
        ({"guided_choice": ["yes", "no\n"]}, r"yes|no\n"),
        ({"guided_grammar": 'start: word+\nword: "a" | "bc"'}, r"(a|bc)+"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, r"left|right"),
        ({"structured_outputs": {"regex": "x{2,4}"}}, r"x{2,4}"),
    ],
)
def test_the_names_of_other_servers(client: openai.OpenAI, field: dict[str, Any], matches: str) -> None:
    for choice in ask(client, extra_body=field):
        assert re.fullmatch(matches, choice.message.content)
    reply = client.completions.create(model=MODEL, prompt="x", max_tokens=500, seed=0, extra_body=field)
    assert re.fullmatch(matches, reply.choices[0].text)
    assert reply.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_is_forced(client: openai.OpenAI, choice: Any) -> None:
    names = set()
    # Which one is called is chance, and depends on what else is asked: all of twelve the same is one in two thousand.
    for answer in ask(client, tools=[WEATHER, TIME], tool_choice=choice, n=12):
        assert answer.finish_reason == "tool_calls"
        (call,) = answer.message.tool_calls
        names.add(call.function.name)
        arguments = json.loads(call.function.arguments)
        if call.function.name == "get_weather":
            assert arguments.keys() == {"city", "days"}
            assert arguments["city"] in ("Paris", "Rome")
    assert names == ({"get_weather"} if isinstance(choice, dict) else {"get_weather", "get_weather_time"})


def test_a_strict_tool_beside_a_free_answer(client: openai.OpenAI) -> None:
    answers = ask(client, tools=[WEATHER], n=4)
    calls = [answer.message.tool_calls[0] for answer in answers if answer.message.tool_calls]
    assert calls
    assert len(calls) < len(answers)
    for call in calls:
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


def test_a_strict_tool_beside_a_schema_streams(client: openai.OpenAI) -> None:
    spoken = set()
    for seed in range(12):
        form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
        stream: Any = client.chat.completions.create(
            model=MODEL,
            messages=ASK,
            tools=[WEATHER],
            response_format=form,
            seed=seed,
            stream=True,  # type: ignore[call-overload]
        )
        deltas = [chunk.choices[0].delta for chunk in stream]
        content = "".join(delta.content or "" for delta in deltas)
        arguments = "".join(call.function.arguments for delta in deltas for call in delta.tool_calls or [])
        assert json.loads(content or arguments)["city"] in ("Paris", "Rome")
        spoken.add(bool(content))
    assert spoken == {True, False}


def test_responses_keep_forms_too(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function"} | WEATHER["function"]
    for seed in SEEDS:
        extra = {"seed": seed}
        parsed = client.responses.parse(model=MODEL, input="x", text_format=Report, extra_body=extra)
        assert isinstance(parsed.output_parsed, Report)
        forced = client.responses.create(model=MODEL, input="x", tools=[tool], tool_choice="required", extra_body=extra)
        call: Any = forced.output[-1]
        assert (call.type, call.name) == ("function_call", "get_weather")
        assert json.loads(call.arguments)["city"] in ("Paris", "Rome")


def deep(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(depth):
        inner = {"type": "array", "items": inner}
    return inner


def schema(inner: Any, **options: Any) -> dict[str, Any]:
    spec = {"name": "s", "schema": inner, "strict": True} | options
    return {"response_format": {"type": "json_schema", "json_schema": spec}}


def tools(inner: Any) -> dict[str, Any]:
    return {"tools": [TIME, {"type": "function", "function": {"name": "f", "parameters": inner, "strict": True}}]}


WRONG: list[tuple[dict[str, Any], str, str]] = [
    (schema({"type": "array", "uniqueItems": True}), "uniqueItems", "response_format.json_schema.schema"),
    (schema({"type": 7}), "type", "response_format.json_schema.schema"),
    (schema(False), "an object", "response_format.json_schema.schema"),
    (schema({"$ref": "file:///etc/passwd"}), "retriev", "response_format.json_schema.schema"),
    (schema({"type": "string", "pattern": "(a)\\1"}), "backreferences", "response_format.json_schema.schema"),
    (schema(deep(40)), "32 levels", "response_format.json_schema.schema"),
    (schema({"enum": ["x" * 70_000]}), "65536", "response_format.json_schema.schema"),
    (schema({"type": "integer", "multipleOf": 999983}), "more than 1 s", "response_format.json_schema.schema"),
    (schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), "No text", "response_format"),
    (schema({}, name=""), "at least 1", "response_format.json_schema.name"),
    ({"response_format": {"type": "json_schema"}}, "required", "response_format.json_schema"),
    ({"response_format": {"type": "xml"}}, "text", "response_format.type"),
    (tools({"type": "object", "not": {}}), "not", "tools[1].function.parameters"),
    ({"tools": [TIME, TIME], "tool_choice": "required"}, "tools[0]", "tools"),
    ({"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "'x'", "tool_choice"),
    ({"guided_regex": "(a"}, "unclosed", "guided_regex"),
    ({"guided_regex": ""}, "empty", "guided_regex"),
    ({"guided_regex": "a" * 70_000}, "65536", "guided_regex"),
    ({"guided_choice": []}, "empty", "guided_choice"),
    ({"guided_grammar": "start: <|nope|>"}, "nope", "guided_grammar"),
    ({"guided_json": "{"}, "schema", "guided_json"),
    ({"guided_json": CITY, "guided_regex": "a"}, "guided_json", "guided_regex"),
    ({"structured_outputs": {"structural_tag": "a"}}, "use tools", "structured_outputs.structural_tag"),
    (schema(CITY) | {"ignore_eos": True}, "ignore_eos", "ignore_eos"),
    (schema(CITY) | {"min_tokens": 5}, "min_tokens", "min_tokens"),
]


@pytest.mark.parametrize(("fields", "says", "where"), WRONG, ids=[where + " " + says for _, says, where in WRONG])
def test_what_cannot_be_kept_is_refused_by_name(
    chance_server: Live, fields: dict[str, Any], says: str, where: str
) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    reply = httpx.post(
        f"{chance_server.v1}/chat/completions", json={"messages": ASK} | fields, headers=headers, timeout=30
    )
    error = reply.json()["error"]
    assert reply.status_code == 400, error
    assert says in error["message"]
    assert str(error["param"]).startswith(where)
    assert "\n" not in error["message"]


def test_what_is_not_strict_is_kept_as_far_as_it_can_be(client: openai.OpenAI) -> None:
    form = schema(CITY | {"not": {}}, strict=False)
    for choice in ask(client, **form):
        assert json.loads(choice.message.content).keys() == {"city", "days"}


def test_the_model_hears_of_the_schema(chance_server: Live) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"messages": ASK, "max_tokens": 1, "return_token_ids": True} | schema(CITY, description="Where and when.")
    reply = httpx.post(f"{chance_server.v1}/chat/completions", json=body, headers=headers).json()
    ids = {"tokens": reply["prompt_token_ids"]}
    text = httpx.post(f"{chance_server.address}/detokenize", json=ids, headers=headers).json()["prompt"]
    spelt = json.dumps(CITY, separators=(",", ":"))
    assert f"<|start|>developer<|message|># Response Formats\n\n## s\n\n// Where and when.\n{spelt}<|end|>" in text
