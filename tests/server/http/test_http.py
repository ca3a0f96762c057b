"""HTTP as clients count on it: HEAD, request ids, packed bodies, errors that arrive, browsers' preflights."""

from __future__ import annotations

import gzip
import http.client
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest

from microscale.errors import BadSetting
from microscale.server.errors import BodyTooLarge
from microscale.server.http.body import unzip
from microscale.server.options import read_origins
from support.browser import chromium
from support.live_server import KEY, SEEDS, Live, live

HEADERS = {"Authorization": f"Bearer {KEY}"}
ASK = {"messages": [{"role": "user", "content": "Hi"}], "seed": SEEDS["answer"]}
PAGE = "https://chat.example"
MIB = 2**20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    log = tmp_path_factory.mktemp("server") / "log"
    with live(log, step_s=0, allowed_origins=[PAGE, "http://localhost:3000/"]) as running:
        yield running
        assert "Traceback" not in log.read_text()


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Without ``--allowed-origin``, and slow enough to be looked at."""
    with live(tmp_path_factory.mktemp("closed") / "log", step_s=0.002) as running:
        yield running


@pytest.mark.parametrize("path", ["/", "/health", "/ping", "/v1/models", "/metrics", "/openapi.json", "/nowhere"])
def test_head_is_get_without_a_body(server: Live, path: str) -> None:
    get, head = (httpx.request(method, server.address + path, headers=HEADERS) for method in ("GET", "HEAD"))
    assert head.status_code == get.status_code
    assert head.content == b""
    assert head.headers["content-type"] == get.headers["content-type"]
    if path != "/metrics":
        assert head.headers["content-length"] == str(len(get.content))


def test_ping_and_load(closed: Live) -> None:
    assert httpx.get(f"{closed.address}/ping").json() == {"status": "ok"}
    assert httpx.get(f"{closed.address}/load").status_code == 401
    assert httpx.get(f"{closed.address}/load", headers=HEADERS).json() == {"server_load": 0}
    body = {"prompt": "x", "max_tokens": 4000, "stream": True}
    with httpx.stream("POST", f"{closed.v1}/completions", headers=HEADERS, json=body) as reply:
        lines = reply.iter_lines()  # a name for it: one that is let go closes the connection
        next(lines)
        assert httpx.get(f"{closed.address}/load", headers=HEADERS).json() == {"server_load": 1}


def test_a_request_keeps_its_id(server: Live) -> None:
    def asked(**headers: str) -> httpx.Response:
        return httpx.post(f"{server.v1}/chat/completions", json=ASK, headers=HEADERS | headers)

    assert asked(**{"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    while "x_request_id=mine-1 " not in server.log.read_text():  # the line is written after the answer
        time.sleep(0.05)
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
    with pytest.raises(BodyTooLarge):
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


def test_without_the_option_no_header_is_sent(closed: Live) -> None:
    for reply in (preflight(closed, PAGE), httpx.get(f"{closed.v1}/models", headers=HEADERS | {"Origin": PAGE})):
        assert not [name for name in reply.headers if name.startswith(("access-control", "vary"))]


def test_every_page_of_the_web_needs_a_key(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="--api-key-file"):
        read_origins(["*"], has_keys=False)
    for wrong in ("chat.example", "https://chat.example/path", "https://"):
        with pytest.raises(BadSetting, match="not an origin"):
            read_origins([wrong], has_keys=True)
    assert read_origins(["*", PAGE], has_keys=True) == ("*", PAGE)
    with live(tmp_path / "log", step_s=0, allowed_origins=["*"]) as anybody:
        assert preflight(anybody, "https://any.example").headers["access-control-allow-origin"] == "*"


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
    page_address: str, closed: Live, tmp_path: Path
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
            page.evaluate(script, closed.address)
