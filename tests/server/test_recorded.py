"""Recorded requests of real clients (keys, types and nesting are theirs, texts ours): each must be accepted, and
answered with a stream that the client can read. ``make test-clients`` runs the clients themselves."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from compat.rules import RULES
from support.live_server import KEY, Live, live

FOLDER = Path(__file__).parent / "recorded"
Event = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    headers: Mapping[str, str]
    text: str


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    log = tmp_path_factory.mktemp("recorded") / "log"
    with live(log, max_model_len=131072, rules=RULES) as running:
        yield running


def post(server: Live, request: Event, body: Any) -> Reply:
    """A refusal is an exception, with what the server said."""
    key = {"x-api-key": KEY} if "messages" in request["path"] else {"authorization": f"Bearer {KEY}"}
    headers = request["headers"] | key | {"content-type": "application/json"}
    asked = urllib.request.Request(server.address + request["path"], json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(asked, timeout=60) as reply:
            return Reply(reply.headers, reply.read().decode())
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{error.code}: {error.read().decode()}") from None


def filled(value: Any, replies: list[Any]) -> Any:
    """``value`` with the ids that the server made itself: ``{{0.output.1.id}}`` is of the first reply."""
    if isinstance(value, dict):
        return {key: filled(inner, replies) for key, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner, replies) for inner in value]
    found = re.fullmatch(r"{{([\w.]+)}}", value) if isinstance(value, str) else None
    if found is None:
        return value
    at: Any = replies
    for step in found[1].split("."):
        at = at[int(step)] if isinstance(at, list) else at[step]
    return at


def events_of(reply: Reply) -> list[Event]:
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in reply.text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        event = json.loads(fields["data"])
        assert fields["event"] == event["type"]
        events.append(event)
    return events


def response_of(events: list[Event]) -> Event:
    """The whole of a stream of Responses, once every rule that clients build on holds."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] == "response.completed"
    added = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    final: Event = events[-1]["response"]
    assert added == [item["id"] for item in done] == [item["id"] for item in final["output"]]
    assert done == final["output"]
    for kind, key in (("response.function_call_arguments", "arguments"), ("response.custom_tool_call_input", "input")):
        for item in done:
            own = [event for event in events if event.get("item_id") == item["id"]]
            parts = "".join(event["delta"] for event in own if event["type"] == f"{kind}.delta")
            if parts:
                assert parts == item[key]
    return final


def message_of(events: list[Event]) -> Event:
    """The whole of a stream of Messages, built as clients build it."""
    assert events[0]["type"] == "message_start"
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message: Event = events[0]["message"] | events[-2]["delta"]
    blocks: list[Event] = []
    is_open = False
    for event in events[1:-2]:
        if event["type"] == "ping":
            continue
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"parts": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            delta = event["delta"]
            blocks[-1]["parts"] += delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
        else:
            assert event["type"] == "content_block_stop"
        is_open = event["type"] != "content_block_stop"
    assert not is_open
    assert events[-2]["usage"]["output_tokens"] > 0
    return message | {"content": blocks}


def whole(reply: Reply, path: str, *, streamed: bool) -> Event:
    if not streamed:
        answer: Event = json.loads(reply.text)
        return answer
    return message_of(events_of(reply)) if path.startswith("/v1/messages") else response_of(events_of(reply))


def said(answer: Event) -> list[tuple[str, str]]:
    """What the model said but for its thoughts: the kind of each item, and the tool's name or the text."""
    found = []
    items: list[Event] = answer["output"] if "output" in answer else answer["content"]
    for item in items:
        if item["type"] in ("reasoning", "thinking"):
            continue
        text = item.get("parts") or (item.get("content") or [{}])[0].get("text", "")
        found.append((item["type"], item.get("name") or text))
    return found


FILES = "There is one file: first-file.txt."
# file → what the model says to each request.
CONVERSATIONS = {
    "codex_shell": [("function_call", "exec_command"), ("message", FILES)],
    "codex_custom_tool": [("custom_tool_call", "apply_patch"), ("message", "The patch is in.")],
    "claude_code_shell": [("tool_use", "Bash"), ("text", FILES)],
    "vercel_responses": [("function_call", "weather"), ("message", "It is 21 degrees.")],
    "vercel_responses_streamed": [("function_call", "weather"), ("message", "It is 21 degrees.")],
}


def test_every_recording_is_sent() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(CONVERSATIONS)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_recorded_conversation(server: Live, name: str) -> None:
    recorded = json.loads((FOLDER / f"{name}.json").read_text())
    replies: list[Any] = []
    for request, expected in zip(recorded["requests"], CONVERSATIONS[name], strict=True):
        body = filled(request["body"], replies)
        answer = whole(post(server, request, body), request["path"], streamed=body.get("stream", False))
        assert said(answer) == [expected]
        replies.append(answer)


def test_ignored_keys_are_named(server: Live) -> None:
    request = json.loads((FOLDER / "codex_shell.json").read_text())["requests"][0]
    reply = post(server, request, request["body"])
    ignored = set(reply.headers["x-microscale-ignored"].split(", "))
    assert {"client_metadata", "prompt_cache_key", "tools.web_search"} <= ignored
