"""Requests of Anthropic's API: what is passed over, what is refused, what Claude Code sends."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from support.anthropic_client import ASK, WEATHER
from support.live_server import KEY, MODEL, SEEDS, Live


def ignored(server: Live, body: dict[str, Any], path: str = "messages") -> list[str]:
    reply = httpx.post(f"{server.v1}/{path}?beta=true", json=body, headers={"x-api-key": KEY})
    assert reply.status_code == 200, reply.text
    return sorted(filter(None, reply.headers.get("x-microscale-ignored", "").split(", ")))


GOOD: dict[str, Any] = {"model": MODEL, "max_tokens": 50, "messages": ASK, "seed": SEEDS["answer"]}


def test_unknown_keys_are_named_at_every_level(server: Live) -> None:
    assert ignored(server, GOOD) == []
    use = {
        "type": "tool_use",
        "id": "t1",
        "name": "f",
        "input": {"not_a_key": 1},
        "x5": 1,
        "caller": {"type": "direct"},
    }
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "r", "x8": 1}], "x7": 1}
    body = GOOD | {
        "x1": 1,
        "metadata": {"user_id": "u"},
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}, "x2": 1}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "t", "x3": 1}], "x4": 1},
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "abc"}, use]},
            {"role": "user", "content": [result]},
        ],
        "tools": [WEATHER | {"x9": 1, "defer_loading": True}, {"type": "web_search_20250305", "name": "web_search"}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "adaptive", "x10": 1},
        "output_config": {"effort": "low", "task_budget": {}},
    }
    named = [
        *("metadata", "messages.content.caller", "messages.content.content.x8", "messages.content.data"),
        *("messages.content.x3", "messages.content.x5", "messages.content.x7", "messages.x4"),
        *("output_config.task_budget", "system.cache_control", "system.x2", "thinking.x10"),
        *("tools.defer_loading", "tools.web_search_20250305", "tools.x9", "x1"),
    ]
    assert ignored(server, body) == sorted(named)
    counted = {name: value for name, value in body.items() if name not in ("max_tokens", "seed")}
    assert ignored(server, counted, "messages/count_tokens") == sorted(named)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "this model reads only text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
        "messages[0].content[0].source.type: this model reads only text",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
        "messages[0].content[0].type: is not a supported block",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]}, "messages"),
    ({"messages": ASK * 2049}, "2049 messages"),
    ({"max_tokens": None}, "max_tokens"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1] has the same name as tools[0]"),
    (
        {"tools": [{"type": "bash_20250124", "name": "bash"}, WEATHER | {"strict": True, "input_schema": {"not": {}}}]},
        "tools[1].input_schema",
    ),
    (
        {"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "tool", "name": "bash"}},
        "tool_choice names 'bash', which does not run here",
    ),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences has 17"),
    ({"stop_sequences": [""]}, "empty"),
    ({"thread": {"type": "create"}}, "thread: is not supported: conversations are not stored"),
    ({"compaction": {"type": "summarize"}}, "compaction: is not supported"),
    ({"thinking": {"type": "always"}}, "thinking.type"),
    ({"output_config": {"effort": "most"}}, "output_config.effort"),
    ({"output_format": {"type": "json_schema", "schema": {"not": {}}}}, "output_format.schema"),
    (
        {
            "output_format": {"type": "json_schema", "schema": {}},
            "messages": [*ASK, {"role": "assistant", "content": "{"}],
        },
        "messages: a final assistant message cannot be combined",
    ),
]


@pytest.mark.parametrize(("fields", "told"), WRONG, ids=[told for _, told in WRONG])
def test_what_cannot_be_met_is_refused(server: Live, fields: dict[str, Any], told: str) -> None:
    reply = httpx.post(f"{server.v1}/messages", json=GOOD | fields, headers={"x-api-key": KEY}, timeout=30)
    assert reply.status_code == 400, reply.text
    assert told in reply.json()["error"]["message"]


def claude_code() -> dict[str, Any]:
    """Keys, types and nesting of its requests (2.1.197); the texts are ours."""
    hint = {"cache_control": {"type": "ephemeral"}}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"command": {"description": "What to run", "type": "string"}, "timeout": {"type": "number"}},
        "required": ["command"],
        "additionalProperties": False,
    }
    use = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls", "timeout": 3}}
    result = {"tool_use_id": "toolu_1", "type": "tool_result", "content": "a.txt", "is_error": False, **hint}
    return {
        "model": MODEL,
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "A reminder."}, {"type": "text", "text": "List files"}],
            },
            {"role": "system", "content": "There are agents."},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "think", "signature": "sig"}, use]},
            {"role": "user", "content": [result]},
        ],
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=00000;"},
            {"type": "text", "text": "You are an agent.", **hint},
        ],
        "tools": [{"name": "Bash", "description": "Runs a command.", "input_schema": schema}],
        "metadata": {"user_id": '{"device_id":"x"}'},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
        "seed": SEEDS["answer"],
    }


def test_what_claude_code_sends(server: Live) -> None:
    body = claude_code()
    headers = {
        "x-api-key": KEY,
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
        "anthropic-dangerous-direct-browser-access": "true",
        "x-app": "cli",
    }
    assert httpx.head(server.address).status_code == 200
    reply = httpx.post(f"{server.v1}/messages?beta=true", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-microscale-ignored"].split(", ") == [
        *("metadata", "context_management", "system.x-anthropic-billing-header"),
        *("messages.content.cache_control", "system.cache_control"),
    ]
    assert "event: message_stop" in reply.text
    # The billing line differs from turn to turn; the prompt does not.
    counts = set()
    for line in ("x-anthropic-billing-header: cch=1;", "x-anthropic-billing-header: cch=22222;"):
        counted = {"messages": body["messages"], "system": [{"type": "text", "text": line}], "tools": body["tools"]}
        counts.add(
            httpx.post(f"{server.v1}/messages/count_tokens", json=counted, headers=headers).json()["input_tokens"]
        )
    assert len(counts) == 1


# ---- whatever is sent ------------------------------------------------------------------------------------------------

ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    2**40,
    1e300,
    "",
    "text",
    "image",
    "\x00",
    [],
    {},
    [[]],
    [{}],
    {"type": 5},
    {"a": {}},
]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in ``value`` with each of its keys."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


@pytest.mark.parametrize("seed", range(2))
def test_odd_values_and_unknown_keys_anywhere(server: Live, seed: int) -> None:
    """An answer comes, or an error in Anthropic's shape; never a 500. The server's log shows no traceback either."""
    chance = random.Random(seed)
    statuses = set()
    with httpx.Client(headers={"x-api-key": KEY}) as client:
        for _ in range(60):
            body = claude_code() | {"max_tokens": 5}
            holder, key = chance.choice(list(places(body)))
            if isinstance(holder[key], dict) and chance.random() < 0.5:
                holder[key][f"unknown_{chance.randrange(99)}"] = chance.choice(ODD)
            elif isinstance(holder, dict) and chance.random() < 0.2:
                del holder[key]
            else:
                holder[key] = chance.choice(ODD)
            reply = client.post(f"{server.v1}/messages{chance.choice(['', '/count_tokens'])}", json=body)
            statuses.add(reply.status_code)
            assert reply.status_code < 500, (body, reply.text)
            assert "event: error" not in reply.text
            if reply.status_code != 200:
                assert reply.json()["type"] == "error"
                assert reply.json()["error"]["message"]
    assert {200, 400} <= statuses
