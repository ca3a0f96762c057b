"""Anthropic's API around the messages: counting, models, keys, errors."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import anthropic
import httpx2 as httpx
import pytest

from support.anthropic_client import ASK, WEATHER, asked, create
from support.live_server import CONTEXT, KEY, MODEL, Live, live
from support.scripted_service import CRASH, NOT_FINITE, REFUSE

# ---- counting, models, keys ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"system": "Be brief."},
        {"tools": [WEATHER], "tool_choice": {"type": "auto"}},
        {"tools": [WEATHER], "tool_choice": {"type": "none"}},
        {"thinking": {"type": "enabled", "budget_tokens": 20000}},
        {"output_config": {"effort": "low"}},
        {"messages": [*ASK, {"role": "assistant", "content": "It is"}]},
    ],
)
def test_count_tokens_equals_the_usage(client: anthropic.Anthropic, options: dict[str, Any]) -> None:
    counted = client.messages.count_tokens(**({"model": MODEL, "messages": ASK} | options))
    usage = create(client, "answer", **options).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_models(client: anthropic.Anthropic) -> None:
    models = client.models.list()
    assert [model.id for model in models] == [MODEL, "other-name"]
    assert (models.has_more, models.first_id, models.last_id) == (False, MODEL, "other-name")
    one = client.models.retrieve("other-name")
    assert (one.type, one.display_name, one.max_input_tokens, one.lifecycle) == (
        "model",
        "other-name",
        CONTEXT - 1,
        "active",
    )
    assert one.created_at.tzinfo is not None
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.models.retrieve("claude-3")
    assert missing.value.type == "not_found_error"


def test_either_header_has_the_key(server: Live) -> None:
    for given in (
        {"x-api-key": KEY},
        {"authorization": f"Bearer {KEY}"},
        {"x-api-key": KEY, "authorization": "Bearer x"},
    ):
        reply = httpx.post(f"{server.v1}/messages/count_tokens", json={"messages": ASK}, headers=given)
        assert reply.status_code == 200, given
    for given in ({}, {"x-api-key": ""}, {"x-api-key": "sk-tes"}, {"authorization": KEY}):
        assert httpx.get(f"{server.v1}/models", headers=given).status_code == 401
    token = anthropic.Anthropic(base_url=server.address, auth_token=KEY, max_retries=0)
    assert create(token, "answer").stop_reason == "end_turn"


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_errors_have_anthropics_classes(client: anthropic.Anthropic) -> None:
    for error, kind, options in (
        (anthropic.NotFoundError, "not_found_error", {"model": "claude-3"}),
        (anthropic.BadRequestError, "invalid_request_error", {"messages": []}),
        (anthropic.RateLimitError, "rate_limit_error", {"extra": {"seed": REFUSE}}),
        (anthropic.InternalServerError, "api_error", {"extra": {"seed": NOT_FINITE}}),
        (anthropic.RateLimitError, "rate_limit_error", {"extra": {"seed": REFUSE, "stream": True}}),
    ):
        with pytest.raises(error) as caught:
            create(client, "answer", **options)
        assert caught.value.type == kind
        assert caught.value.body["type"] == "error"  # type: ignore[index]
        assert caught.value.body["request_id"] == caught.value.request_id  # type: ignore[index]
    wrong = anthropic.Anthropic(base_url=str(client.base_url), api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as caught:
        create(wrong, "answer")
    assert caught.value.type == "authentication_error"
    assert caught.value.body["request_id"] == caught.value.request_id  # type: ignore[index]


def test_errors_before_and_beside_the_route(server: Live) -> None:
    def kind(reply: httpx.Response) -> tuple[int, str]:
        body = reply.json()
        assert (body["type"], body["request_id"]) == ("error", reply.headers["x-request-id"])
        assert body["error"]["message"]
        return reply.status_code, body["error"]["type"]

    key = {"x-api-key": KEY, "content-type": "application/json"}
    url = f"{server.v1}/messages"
    assert kind(httpx.post(url, content=b"{", headers=key)) == (400, "invalid_request_error")
    assert kind(httpx.post(url, content=b"x", headers={"x-api-key": KEY})) == (415, "invalid_request_error")
    assert kind(httpx.post(url, content=b"x" * 5 * 2**20, headers=key)) == (413, "request_too_large")
    assert kind(httpx.get(url, headers=key)) == (405, "invalid_request_error")
    assert kind(httpx.post(f"{url}/batches", json={}, headers=key)) == (404, "not_found_error")
    assert kind(httpx.post(f"{url}?beta=true", json={"messages": ASK})) == (401, "authentication_error")
    long = {"messages": [{"role": "user", "content": "x " * 9000}], "max_tokens": 1}
    reply = httpx.post(url, json=long, headers=key)
    assert reply.json()["error"]["message"].startswith("prompt is too long: ")


def test_a_failure_on_the_way(tmp_path: Path) -> None:
    with live(tmp_path / "log", step_s=0.1) as server:
        client = anthropic.Anthropic(base_url=server.address, api_key=KEY, max_retries=0)
        stream = client.messages.create(**asked("answer", {"stream": True}))
        assert next(stream).type == "message_start"
        with pytest.raises(anthropic.ServiceUnavailableError):
            create(client, CRASH)
        with pytest.raises(anthropic.APIStatusError) as caught:
            list(stream)
        assert (caught.value.type, caught.value.status_code) == ("api_error", 200)
        assert caught.value.body["error"]["message"]  # type: ignore[index]


def test_a_server_that_stops_is_overloaded(tmp_path: Path) -> None:
    with live(tmp_path / "log", step_s=0.1, drain_s=20) as server:
        client = anthropic.Anthropic(base_url=server.address, api_key=KEY, max_retries=0)
        begun = client.messages.create(**asked("answer", {"stream": True}))
        next(begun)
        assert create(client, "answer", max_tokens=1).stop_reason == "max_tokens"
        server.terminate()
        while httpx.get(f"{server.address}/health").status_code == 200:
            time.sleep(0.05)
        with pytest.raises(anthropic.APIStatusError) as caught:
            create(client, "answer")
        assert (caught.value.status_code, caught.value.type) == (529, "overloaded_error")
        assert caught.value.response.headers["retry-after"] == "1"
        assert [event.type for event in begun][-1] == "message_stop"
