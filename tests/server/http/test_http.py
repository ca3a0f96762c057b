"""HTTP: routes, keys, HEAD, request ids, compressed bodies, errors that arrive, browsers' preflights."""

from __future__ import annotations

import gzip
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from microscale.errors import BadSetting
from microscale.server.error_texts import RequestError
from microscale.server.http.cors import Cors
from microscale.server.http.read_body import unzip
from microscale.server.options import read_origins
from support.browser import chromium
from support.live_server import KEY, MODEL, PAGE, SEEDS, Live, live

HEADERS = {"Authorization": f"Bearer {KEY}"}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "seed": SEEDS["answer"]}
MIB = 2**20


@pytest.mark.parametrize("path", ["/", "/health", "/ping", "/v1/models", "/metrics", "/openapi.json", "/nowhere"])
def test_head_is_get_without_a_body(server: Live, path: str) -> None:
    get, head = (httpx.request(method, server.address + path, headers=HEADERS) for method in ("GET", "HEAD"))
    assert head.status_code == get.status_code
    assert head.content == b""
    assert head.headers["content-type"] == get.headers["content-type"]
    if path != "/metrics":
        assert head.headers["content-length"] == str(len(get.content))


def test_ping_and_load(server: Live) -> None:
    def load() -> int:
        return httpx.get(f"{server.address}/load", headers=HEADERS).json()["server_load"]  # type: ignore[no-any-return]

    assert httpx.get(f"{server.address}/ping").json() == {"status": "ok"}
    assert httpx.get(f"{server.address}/load").status_code == 401
    wait_for(lambda: load() == 0)
    body = {"prompt": "x", "max_tokens": 4000, "stream": True, "priority": 2}
    with httpx.stream("POST", f"{server.v1}/completions", headers=HEADERS, json=body) as reply:
        lines = reply.iter_lines()  # dropping the iterator would close the connection
        next(lines)
        assert load() == 1
    wait_for(lambda: load() == 0)


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}])
def test_everything_but_health_needs_the_key(server: Live, headers: dict[str, str]) -> None:
    for path in ("/v1/models", "/metrics", "/plan", "/version", "/openapi.json", "/nowhere", "//health", "/health/"):
        assert httpx.get(server.address + path, headers=headers).status_code == 401, path
    assert httpx.post(f"{server.v1}/chat/completions", headers=headers, json=ASK).status_code == 401
    assert httpx.get(server.address + "/health", headers=headers).status_code == 200


def test_other_routes(server: Live) -> None:
    with httpx.Client(base_url=server.address, headers=HEADERS) as client:
        assert client.get("/nowhere").status_code == 404
        assert client.get("/v1/chat/completions").status_code == 405
        assert client.post("/v1/chat/completions", content=b"{}").status_code == 415
        assert client.get("/version").json()["version"]
        assert client.get("/plan").json()["plan"] == "scripted"
        assert "/v1/chat/completions" in client.get("/openapi.json").json()["paths"]
        ids = client.post("/tokenize", json={"prompt": "a <|end|> 日本"}).json()["tokens"]
        assert client.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "a <|end|> 日本"
        assert client.post("/tokenize", json={"messages": ASK["messages"]}).json()["count"] > 20


def test_metrics_and_the_log_report_a_request(server: Live) -> None:
    request_id = httpx.post(f"{server.v1}/chat/completions", json=ASK, headers=HEADERS).json()["id"]
    text = httpx.get(f"{server.address}/metrics", headers=HEADERS).text
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_hits_total",
        "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_sum", "e2e_request_latency_seconds_count",
        "generation_tokens_total", "prompt_tokens_total", 'request_success_total{finished_reason="stop"',
    ):  # fmt: skip
        assert f"\nmicroscale:{name}" in text, name
    assert f'microscale:kv_cache_usage_perc{{model_name="{MODEL}"}} 0.25' in text
    wait_for(lambda: f"id={request_id} " in server.log.read_text())
    line = next(line for line in server.log.read_text().splitlines() if f"id={request_id} " in line)
    assert "route=/v1/chat/completions status=200 " in line
    assert "finish=stop " in line
    assert "first_token_ms=" in line


def test_a_request_keeps_its_id(server: Live) -> None:
    def asked(**headers: str) -> httpx.Response:
        return httpx.post(f"{server.v1}/chat/completions", json=ASK, headers=HEADERS | headers)

    assert asked(**{"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    wait_for(lambda: "x_request_id=mine-1 " in server.log.read_text())  # the line is written after the reply
    made = [
        asked(**given).headers["x-request-id"]
        for given in ({}, {"x-request-id": "two words"}, {"x-request-id": "x" * 129})
    ]
    assert all(name.startswith("req_") for name in made)
    assert len(set(made)) == 3
    refused = httpx.get(f"{server.v1}/models", headers={"x-request-id": "mine-2"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (401, "mine-2")


# ---- bodies ----------------------------------------------------------------------------------------------------------


def test_a_body_may_be_gzipped(server: Live) -> None:
    packed = gzip.compress(json.dumps(ASK).encode())
    kind = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    reply = httpx.post(f"{server.v1}/chat/completions", content=packed, headers=HEADERS | kind)
    assert reply.json()["choices"][0]["message"]["content"].startswith("The answer")
    for broken in (packed[:-9], b"no gzip", packed + b"more"):
        reply = httpx.post(f"{server.v1}/chat/completions", content=broken, headers=HEADERS | kind)
        assert reply.status_code == 400
        assert "gzip" in reply.json()["error"]["message"]
    bomb = gzip.compress(b" " * (64 * MIB))
    assert len(bomb) < MIB
    reply = httpx.post(f"{server.v1}/chat/completions", content=bomb, headers=HEADERS | kind)
    assert reply.status_code == 413
    reply = httpx.post(
        f"{server.v1}/chat/completions", content=b"x", headers=HEADERS | kind | {"Content-Encoding": "br"}
    )
    assert reply.status_code == 415
    assert "gzip" in reply.json()["error"]["message"]


def test_unpacking_stops_at_the_bound() -> None:
    assert unzip(gzip.compress(b"x" * 100), 100) == b"x" * 100
    with pytest.raises(RequestError, match="The body has more than"):
        unzip(gzip.compress(b"x" * 101), 100)


@pytest.mark.parametrize("says_its_length", [True, False])
def test_a_client_that_sends_too_much_reads_why(server: Live, says_its_length: bool) -> None:
    """As most clients do: all of the body first, then the answer. A connection that is reset shows no answer."""
    where = urlsplit(server.address)
    assert where.hostname is not None
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=30)
    pieces = [b"x" * MIB] * 12
    headers = HEADERS | {"Content-Type": "application/json"}
    if says_its_length:
        headers["Content-Length"] = str(12 * MIB)
    connection.request(
        "POST", "/v1/chat/completions", body=iter(pieces), headers=headers, encode_chunked=not says_its_length
    )
    reply = connection.getresponse()
    assert reply.status == 413
    assert str(4 * MIB) in json.loads(reply.read())["error"]["message"]
    connection.close()


def test_a_client_that_asks_before_it_sends_is_told_at_once(server: Live) -> None:
    where = urlsplit(server.address)
    assert where.hostname is not None
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=10)
    connection.putrequest("POST", "/v1/chat/completions")
    asked = {"Content-Type": "application/json", "Content-Length": str(12 * MIB), "Expect": "100-continue"}
    for name, value in (HEADERS | asked).items():
        connection.putheader(name, value)
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


# ---- browsers --------------------------------------------------------------------------------------------------------


def preflight(server: Live, origin: str, **more: str) -> httpx.Response:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-stainless-os"}
    return httpx.options(f"{server.v1}/chat/completions", headers={"Origin": origin} | asks | more)


def test_an_allowed_origin_gets_its_consent(server: Live) -> None:
    reply = preflight(server, PAGE, **{"Access-Control-Request-Private-Network": "true"})
    assert reply.status_code == 204
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert reply.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
    assert reply.headers["access-control-allow-private-network"] == "true"
    assert reply.headers["vary"] == "Origin"
    asked = httpx.post(f"{server.v1}/chat/completions", json=ASK | {"stream": True}, headers=HEADERS | {"Origin": PAGE})
    assert asked.headers["access-control-allow-origin"] == PAGE
    assert "x-microscale-ignored" in asked.headers["access-control-expose-headers"]
    refused = httpx.get(f"{server.v1}/models", headers={"Origin": PAGE})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)


@pytest.mark.parametrize("origin", ["https://evil.example", "https://chat.example.evil", "http://chat.example", "null"])
def test_another_origin_gets_none(server: Live, origin: str) -> None:
    assert preflight(server, origin).status_code == 403
    reply = httpx.get(f"{server.v1}/models", headers=HEADERS | {"Origin": origin})
    assert not [name for name in reply.headers if name.startswith("access-control")]


def test_every_page_on_the_web_needs_a_key() -> None:
    with pytest.raises(BadSetting, match="--api-key-file"):
        read_origins(["*"], has_keys=False)
    for wrong in ("chat.example", "https://chat.example/path", "https://"):
        with pytest.raises(BadSetting, match="not an origin"):
            read_origins([wrong], has_keys=True)
    assert read_origins(["*", PAGE], has_keys=True) == ("*", PAGE)
    asks = {"Origin": "https://any.example", "Access-Control-Request-Method": "POST"}
    anybody = TestClient(Cors(FastAPI(), ["*"])).options("/v1/chat/completions", headers=asks)
    assert anybody.headers["access-control-allow-origin"] == "*"


ASKING = """
async (address) => {
  const headers = {"Authorization": "Bearer KEY", "Content-Type": "application/json"};
  const models = await (await fetch(address + "/v1/models", {headers})).json();
  const body = JSON.stringify({messages: [{role: "user", content: "Hi"}], seed: SEED, stream: true, odd: 1});
  const reply = await fetch(address + "/v1/chat/completions", {method: "POST", headers, body});
  return [models.data[0].id, reply.headers.get("x-microscale-ignored"), await reply.text()];
}
"""


class Blank(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>chat</title>")

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def page_address() -> Iterator[str]:
    """A page of another origin, as Open WebUI's direct connections come from."""
    pages = ThreadingHTTPServer(("127.0.0.1", 0), Blank)
    threading.Thread(target=pages.serve_forever, daemon=True).start()
    yield f"http://localhost:{pages.server_address[1]}"
    pages.shutdown()


def test_a_browser_chats_from_another_origin_if_that_is_allowed(
    page_address: str, server: Live, tmp_path: Path
) -> None:
    script = ASKING.replace("KEY", KEY).replace("SEED", str(SEEDS["answer"]))
    with live(tmp_path / "log", step_s=0, allowed_origins=[page_address]) as allowing, chromium() as browser:
        page = browser.new_page()
        page.goto(page_address)
        model, ignored, events = page.evaluate(script, allowing.address)
        assert (model, ignored) == ("scripted", "odd")
        deltas = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
        said = [delta["choices"][0]["delta"].get("content", "") for delta in deltas]
        assert "".join(said) == "The answer is 4. 日本"
        assert events.endswith("data: [DONE]\n\n")
        with pytest.raises(Exception, match="Failed to fetch"):
            page.evaluate(script, server.address)
