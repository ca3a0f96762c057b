"""Our own OpenAPI document, turned against us: whatever is sent, an answer comes, in time, and never a 500."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from support.live_server import KEY, SEEDS, Live, live

pytestmark = pytest.mark.nightly
HEADERS = {"Authorization": f"Bearer {KEY}"}
GOOD = {"messages": [{"role": "user", "content": "Hi"}], "seed": SEEDS["answer"]}
PATHS = [
    ("/v1/completions", "POST"),
    ("/v1/chat/completions", "POST"),
    ("/v1/responses", "POST"),
    ("/v1/responses/input_tokens", "POST"),
    ("/v1/responses/{response_id}/cancel", "POST"),
    ("/v1/responses/{response_id}/input_items", "GET"),
    ("/v1/messages", "POST"),
    ("/v1/messages/count_tokens", "POST"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/v1/models/{name}", "GET"),
    ("/v1/responses/{response_id}", "GET"),
    ("/v1/responses/{response_id}", "DELETE"),
]
EXAMPLES = 25
MOST_S = 10.0
"""Tokens are few and cost nothing: what takes longer hangs."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    log = tmp_path_factory.mktemp("server") / "log"
    with live(log, step_s=0, max_model_len=256) as running:
        yield running
        assert "Traceback" not in log.read_text()


@pytest.fixture(scope="module")
def document(server: Live) -> Any:
    return httpx.get(f"{server.address}/openapi.json", headers=HEADERS).json()


@pytest.fixture(scope="module")
def schema(document: Any) -> Any:
    return schemathesis.openapi.from_dict(document)


CASES = [(path, method, GenerationMode.POSITIVE) for path, method in PATHS]
# No path is wrong: a name in it may be anything.
CASES += [(path, method, GenerationMode.NEGATIVE) for path, method in PATHS if method == "POST" and "{" not in path]


@pytest.mark.parametrize(("path", "method", "mode"), CASES)
def test_no_request_is_too_much(server: Live, schema: Any, path: str, method: str, mode: GenerationMode) -> None:
    operation = schema[path][method]
    statuses = set()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        begun = time.monotonic()
        reply = case.call(base_url=server.address, headers=HEADERS, timeout=MOST_S)
        assert time.monotonic() - begun < MOST_S
        statuses.add(reply.status_code)
        assert reply.status_code < 500, reply.text
        if reply.status_code >= 400 and reply.headers.get("content-type") == "application/json":
            assert json.loads(reply.content)["error"]["message"]

    send()
    assert statuses
    good = httpx.post(f"{server.v1}/chat/completions", json=GOOD, headers=HEADERS)
    assert good.status_code == 200


def test_every_path_is_fuzzed_or_takes_nothing(document: Any) -> None:
    taking = {
        (path, method.upper())
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if "requestBody" in operation or operation.get("parameters")
    }
    assert taking == set(PATHS)


def test_the_page_of_the_document_is_whole_and_loads_nothing(server: Live, document: Any) -> None:
    assert httpx.get(f"{server.address}/docs").status_code == 401
    reply = httpx.get(f"{server.address}/docs", headers=HEADERS)
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    for path in document["paths"]:
        assert path in reply.text
    for name in document["components"]["schemas"]:
        assert f'id="{name}"' in reply.text
    assert set(re.findall(r'(?:src|href)="([^#"][^"]*)"', reply.text)) == {"/openapi.json"}
    assert "<script" not in reply.text
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    targets = set(re.findall(r'href="#([^"]+)"', reply.text))
    assert targets <= set(re.findall(r'id="([^"]+)"', reply.text))
