"""What a server must survive: nonsense, strangers, clients that leave or do not read, many at once, its own end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from support.live_server import KEY, SEEDS, Live, live
from support.scripted_service import CRASH

pytestmark = pytest.mark.nightly
HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
GOOD = {"messages": [{"role": "user", "content": "Hi"}], "seed": SEEDS["answer"]}
LIMITS = {"max_body_bytes": 200_000, "max_header_bytes": 4096, "read_timeout_s": 1.0, "write_timeout_s": 0.5}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    log = tmp_path_factory.mktemp("server") / "log"
    with live(log, limits=LIMITS, max_model_len=2**20) as running:
        yield running
        assert "Traceback" not in log.read_text()


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[httpx.Client]:
    with session(server) as made:
        yield made


def chat_with(**changes: Any) -> bytes:
    return json.dumps(GOOD | changes).encode()


def tool(parameters: object) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(depth):
        inner = {"items": inner}
    return inner


def form(schema: bytes) -> bytes:
    """A request whose answer must follow a schema, which is JSON that Python would not write."""
    format_ = b'{"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": ' + schema + b"}}"
    return chat_with()[:-1] + b', "response_format": ' + format_ + b"}"


HORRORS: list[tuple[str, bytes, int, str]] = [
    (CHAT, b"", 400, "body"),
    (CHAT, b"{", 400, "body"),
    (CHAT, b"[]", 400, "body"),
    (CHAT, b"\xff\xfe", 400, "body"),
    (CHAT, b'{"messages": ' + b"[" * 50_000, 400, "body"),
    (CHAT, b'{"messages": "\\ud800"}', 400, "body"),
    (CHAT, b'{"messages": [], "temperature": NaN}', 400, "messages"),
    (CHAT, chat_with(temperature=1e400), 400, "temperature"),
    (CHAT, chat_with(temperature="hot"), 400, "temperature"),
    (CHAT, chat_with(temperature=-1), 400, "temperature"),
    (CHAT, chat_with(max_tokens=10**30), 200, ""),
    (CHAT, chat_with(max_tokens=0), 400, "max_tokens"),
    (CHAT, chat_with(n=10**9), 400, "n must be"),
    (CHAT, chat_with(n=True), 400, "n"),
    (CHAT, chat_with(seed=-5), 400, "seed"),
    (CHAT, chat_with(top_k=2**40), 400, "top_k"),
    (CHAT, chat_with(stop=["x"] * 17), 400, "stop"),
    (CHAT, chat_with(stop=[""]), 400, "stop"),
    (CHAT, chat_with(logit_bias={"x": 1}), 400, "logit_bias"),
    (CHAT, chat_with(logit_bias={str(n): 1 for n in range(513)}), 400, "513"),
    (CHAT, chat_with(logit_bias={"5": 1000}), 400, "logit_bias"),
    (CHAT, chat_with(messages=[]), 400, "messages"),
    (CHAT, chat_with(messages=[{"role": "user", "content": "x"}] * 2049), 400, "2049"),
    (CHAT, chat_with(messages=[{"role": "alien", "content": "x"}]), 400, "messages[0]"),
    (CHAT, chat_with(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400, "messages[0].content"),
    (CHAT, chat_with(messages=[{"role": "user", "content": "x", "weight": 1}]), 200, ""),
    (CHAT, chat_with(messages=[{"role": "tool", "content": "x", "tool_call_id": "none"}]), 400, "none"),
    (CHAT, chat_with(stream_options={"include_usage": True}), 400, "stream_options"),
    (CHAT, chat_with(top_logprobs=3), 400, "top_logprobs"),
    (CHAT, chat_with(logprobs=True, top_logprobs=10_000), 400, "logprobs"),
    (CHAT, chat_with(chat_template="{{ x }}"), 400, "chat_template"),
    (CHAT, chat_with(store=True, user="me", metadata={"a": "b"}, service_tier="auto"), 200, ""),
    (CHAT, chat_with(tool_choice="required"), 400, "tool_choice"),
    (CHAT, chat_with(**tool(nested(33))), 400, "32 levels"),
    (CHAT, chat_with(**tool({"x": "y " * 40_000})), 400, "bytes"),
    (CHAT, chat_with(**tool({"enum": ["y" * 5000]})), 400, "word"),
    (CHAT, chat_with(**tool({"type": 7, "properties": [1]})), 200, ""),
    (CHAT, chat_with(response_format={"type": "json_object"}), 200, ""),
    (CHAT, form(b'{"maximum": 1e400}'), 400, "schema"),
    (CHAT, form(b'{"maximum": NaN}'), 400, "schema"),
    (CHAT, form(b'{"maximum": 1' + b"0" * 5000 + b"}"), 400, "out of range"),
    (CHAT, form(b'{"maximum": 1' + b"0" * 4000 + b"}"), 400, "schema"),
    (CHAT, form(b'{"const": 1' + b"0" * 400 + b"}"), 400, "schema"),
    (CHAT, form(b'{"enum": ["\\ud800"]}'), 400, "body"),
    (CHAT, form(b'{"properties": {"\\u0000": {"const": "\\u0000"}}}'), 200, ""),
    (CHAT, form(b'{"$ref": "#"}'), 400, "schema"),
    (CHAT, form(b'{"items": ' * 40 + b"{}" + b"}" * 40), 400, "32 levels"),
    (CHAT, form(b'{"x-guidance": {"lenient": true}, "not": {}}'), 400, "not"),
    (CHAT, chat_with(guided_regex="(((a{1,1000}){1,1000}){1,1000}){1,1000}"), 200, ""),
    (CHAT, chat_with(guided_regex="(" * 20_000 + ")" * 20_000), 400, "guided_regex"),
    (CHAT, chat_with(guided_grammar="start: " + "(" * 30_000), 400, "guided_grammar"),
    (CHAT, chat_with(guided_grammar="start: start start | " + "start " * 5000), 400, "guided_grammar"),
    (CHAT, chat_with(guided_choice=["x" * 60_000]), 200, ""),
    (CHAT, chat_with(**tool({"enum": [10**400]}), tool_choice="required"), 400, "out of range"),
    (RESPONSES, b'{"input": ' + b"[" * 50_000, 400, "body"),
    (RESPONSES, json.dumps({"input": "x", "metadata": {"k": 10**400}}).encode(), 400, "metadata"),
    (RESPONSES, json.dumps({"input": "x", "previous_response_id": "../../etc"}).encode(), 404, "etc"),
    (RESPONSES, json.dumps({"input": [{"type": "reasoning"}], "seed": 0}).encode(), 400, "input"),
    (CHAT, b" " * 300_000, 413, "200000"),
    (CHAT, b"[" * 10_000_000, 413, "200000"),
    (COMPLETIONS, json.dumps({"prompt": ""}).encode(), 400, "empty"),
    (COMPLETIONS, json.dumps({"prompt": []}).encode(), 400, "prompt"),
    (COMPLETIONS, json.dumps({"prompt": [[1], "x"]}).encode(), 400, "prompt"),
    (COMPLETIONS, json.dumps({"prompt": [-1]}).encode(), 400, "prompt"),
    (COMPLETIONS, json.dumps({"prompt": ["x"] * 65}).encode(), 400, "65 prompts"),
    (COMPLETIONS, json.dumps({"prompt": "x", "echo": 1}).encode(), 400, "echo"),
    ("/tokenize", b'{"text": 1}', 400, ""),
    ("/detokenize", b'{"tokens": [99999999999]}', 400, "tokens"),
    ("/detokenize", b'{"tokens": [1000000000]}', 400, "not in the vocabulary"),
    ("/detokenize", b'{"tokens": [599, 5]}', 200, ""),
]


@pytest.mark.parametrize(("path", "body", "status", "names"), HORRORS)
def test_nonsense_is_refused_by_name(client: httpx.Client, path: str, body: bytes, status: int, names: str) -> None:
    reply = client.post(path, content=body)
    assert (reply.status_code, names in reply.text) == (status, True), reply.text
    if status != 200:
        assert reply.json()["error"]["type"] == "invalid_request_error"


def test_a_body_that_never_ends_is_cut_off(client: httpx.Client) -> None:
    def pieces() -> Iterator[bytes]:
        yield from (b" " * 65_536 for _ in range(160))

    # It may be hung up on while it still sends.
    with contextlib.suppress(httpx.WriteError, httpx.RemoteProtocolError):
        assert client.post(CHAT, content=pieces()).status_code == 413
    assert client.post(CHAT, content=chat_with()).status_code == 200


def running(client: httpx.Client) -> float:
    text = client.get("/metrics").text
    return float(next(line for line in text.splitlines() if "num_requests_running{" in line).rpartition(" ")[2])


def wait_for(true: Callable[[], bool], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_aborted(client: httpx.Client, server: Live, stream: bool) -> None:
    body = {"prompt": "on and on", "max_tokens": 500_000, "stream": stream, "n": 2}
    with connect(server) as left:
        left.sendall(request(COMPLETIONS, body))
        wait_for(lambda: running(client) == 2)
        if stream:
            assert b"200 OK" in left.recv(4096)
    wait_for(lambda: running(client) == 0)


def test_a_client_that_does_not_read_is_hung_up_on(client: httpx.Client, server: Live) -> None:
    body = {"prompt": "x", "max_tokens": 500_000, "stream": True, "logprobs": 20}
    with connect(server) as deaf:
        deaf.sendall(request(COMPLETIONS, body))
        wait_for(lambda: running(client) == 1)
        wait_for(lambda: running(client) == 0, within_s=20)
    assert client.post(CHAT, content=chat_with()).status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/chat/completions HT",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-test\r\n"
        b"Content-Type: application/json\r\nContent-Length: 500\r\n\r\n{",
        b"GET /health HTTP/1.1\r\nX: " + b"y" * 8000,
        b"\x16\x03\x01\x02\x00 no HTTP at all\r\n\r\n",
        b"GET /health HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 7\r\n\r\n",
    ],
    ids=["half a head", "half a body", "a long head", "not HTTP", "two lengths"],
)
def test_half_requests_are_hung_up_on(client: httpx.Client, server: Live, sent: bytes) -> None:
    with connect(server) as half:
        half.settimeout(10)
        half.sendall(sent)
        heard = b""
        try:
            while piece := half.recv(4096):
                heard += piece
        except ConnectionResetError:
            pass
    assert b" 200 " not in heard
    assert b" 500 " not in heard
    assert client.get("/health").status_code == 200


GET = b"GET /health HTTP/1.1\r\n"
POST = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: "
CHUNK = b'\r\n\r\ne\r\n{"prompt": "x"}\r\n0\r\n\r\n'


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (GET + b"Host: x\r\n\r\n", b"200"),
        (GET + b"Host: x\r\nX: " + b"y" * 4000 + b"\r\n\r\n", b"200"),
        (GET + b"Host: x\r\nX: " + b"y" * 5000 + b"\r\n\r\n", b"431"),
        (GET + b"Host: x\r\nX: " + b"y" * 2**20 + b"\r\n\r\n", b"431"),
        (b"GET /health?" + b"y" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", b"431"),
        (GET + b"\r\n", b"400"),
        (b"GET /health HTTP/1.0\r\n\r\n", b"200"),
        (POST + b"gzip, chunked" + CHUNK, b"501"),
        (POST + b"gzip\r\nTransfer-Encoding: chunked" + CHUNK, b"501"),
    ],
    ids=["plain", "4 KB", "5 KB", "1 MB", "a long path", "no host", "no host in 1.0", "gzip, chunked", "two encodings"],
)
def test_a_head_is_refused_with_a_reply(server: Live, sent: bytes, status: bytes) -> None:
    with connect(server) as client:
        client.settimeout(10)
        client.sendall(sent)
        assert client.recv(4096).split()[1] == status


def connect(server: Live) -> socket.socket:
    host, _, port = server.address.removeprefix("http://").partition(":")
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.connect((host, int(port)))
    return made


def request(path: str, body: object) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def test_200_streams_at_once_are_not_mixed_up(tmp_path: Path) -> None:
    """On a server of its own, which gives those time that a busy machine lets wait."""

    async def one(many: httpx.AsyncClient, number: int) -> tuple[str, str]:
        prompt = f"client {number:03d} "
        body = {"prompt": prompt, "max_tokens": 60, "stream": True}
        text = ""
        async with many.stream("POST", COMPLETIONS, json=body) as reply:
            assert reply.status_code == 200
            async for line in reply.aiter_lines():
                data = line.removeprefix("data: ")
                if line and data != "[DONE]":
                    text += json.loads(data)["choices"][0]["text"]
        return prompt, text

    async def all_of_them(server: Live) -> list[tuple[str, str]]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=server.address, headers=HEADERS, timeout=60, limits=limits) as many:
            return await asyncio.gather(*(one(many, number) for number in range(200)))

    with live(tmp_path / "log") as server:
        for prompt, text in asyncio.run(all_of_them(server)):
            assert len(text) > 2 * len(prompt)
            assert (prompt * 60).startswith(text)
        with session(server) as client:
            wait_for(lambda: running(client) == 0)


def session(server: Live) -> httpx.Client:
    return httpx.Client(base_url=server.address, headers=HEADERS, timeout=60)


def events(reply: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_sigterm_lets_open_requests_finish(tmp_path: Path) -> None:
    with (
        live(tmp_path / "log", step_s=0.02) as server,
        httpx.Client(base_url=server.address, headers=HEADERS) as client,
    ):
        body = {"prompt": "word ", "max_tokens": 120, "stream": True}
        with client.stream("POST", COMPLETIONS, json=body) as reply:
            assert reply.status_code == 200
            server.terminate()
            wait_for(lambda: httpx.get(server.address + "/health").status_code == 503)
            refused = httpx.post(server.address + CHAT, headers=HEADERS, content=chat_with())
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            *heard, done = events(reply)
        assert done == "[DONE]"
        assert heard[-1]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(10) == 0


def test_the_drain_has_an_end(tmp_path: Path) -> None:
    with (
        live(tmp_path / "log", drain_s=0.3) as server,
        httpx.Client(base_url=server.address, headers=HEADERS) as client,
    ):
        body = {"prompt": "word ", "max_tokens": 4000, "stream": True}
        other = {"input": "word ", "stream": True}
        with (
            client.stream("POST", COMPLETIONS, json=body) as reply,
            client.stream("POST", RESPONSES, json=other) as response,
        ):
            server.terminate()
            assert events(reply)[-1]["error"]["code"] == "draining"
            last = [line for line in response.iter_lines() if line]
            assert last[-2] == "event: response.failed"
            assert json.loads(last[-1].removeprefix("data: "))["response"]["error"]["code"] == "server_error"
        assert server.process.wait(10) == 0


def test_the_engines_death_is_told_to_all(tmp_path: Path) -> None:
    with (
        live(tmp_path / "log", step_s=0.02) as server,
        httpx.Client(base_url=server.address, headers=HEADERS) as client,
    ):
        body = {"prompt": "word ", "max_tokens": 4000, "stream": True}
        with client.stream("POST", COMPLETIONS, json=body) as reply:
            assert reply.status_code == 200
            crashed = httpx.post(server.address + CHAT, headers=HEADERS, content=chat_with(seed=CRASH))
            assert (crashed.status_code, crashed.json()["error"]["code"]) == (503, "engine_died")
            assert events(reply)[-1]["error"]["code"] == "engine_died"
        later = httpx.post(server.address + CHAT, headers=HEADERS, content=chat_with())
        assert later.status_code == 503
        assert httpx.get(server.address + "/health").status_code == 503
        assert server.process.wait(10) == 1
        assert "The engine has ended" in server.log.read_text()
