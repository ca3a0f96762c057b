"""Requests as the SDKs' own types describe them, filled at random: OpenAI's and Anthropic's documents, as installed.

Whatever is in them, an answer comes and never a 5xx; a refusal has the shape that the SDK reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from anthropic.types.message_count_tokens_params import MessageCountTokensParams as CountParams
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming as MessageParams
from hypothesis import HealthCheck, Phase, given, settings
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as TextParams
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming as ResponsesParams

from support.live_server import KEY, MODEL, Live, live
from support.sdk_bodies import bodies

pytestmark = pytest.mark.nightly
HEADERS = {"Authorization": f"Bearer {KEY}"}
EXAMPLES = 50
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
}
KINDS: list[tuple[str, Any]] = [
    ("/v1/completions", TextParams),
    ("/v1/chat/completions", ChatParams),
    ("/v1/responses", ResponsesParams),
    ("/v1/messages", MessageParams),
    ("/v1/messages/count_tokens", CountParams),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    log = tmp_path_factory.mktemp("server") / "log"
    with live(log, step_s=0, max_model_len=256) as running:
        yield running
        assert "Traceback" not in log.read_text()


@pytest.mark.parametrize(("path", "kind"), KINDS, ids=[path for path, _ in KINDS])
@pytest.mark.parametrize("answerable", [False, True], ids=["", "with a good question"])
def test_what_the_types_allow_is_answered_or_refused(server: Live, path: str, kind: Any, answerable: bool) -> None:
    statuses: set[int] = set()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    @given(params=bodies(kind))
    def send(params: dict[str, Any]) -> None:
        body = params | {"model": MODEL} | (GOOD[path] if answerable else {})
        # JSON of the standard library says NaN, which is none: a 400 like any other.
        data = json.dumps(body, ensure_ascii=True).encode()
        headers = HEADERS | {"Content-Type": "application/json"}
        reply = httpx.post(server.address + path, content=data, headers=headers, timeout=30)
        statuses.add(reply.status_code)
        assert reply.status_code < 500, (body, reply.text)
        if reply.status_code >= 400:
            assert reply.json()["error"]["message"]

    send()
    assert 400 in statuses or answerable
    assert 200 in statuses or not answerable
    good = httpx.post(server.address + path, json=GOOD[path], headers=HEADERS, timeout=30)
    assert good.status_code == 200
