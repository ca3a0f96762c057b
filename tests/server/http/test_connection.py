"""What a connection allows a client: requests ahead, unread answers, half a connection, and no traceback in the log."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest

from support.live_server import KEY, OTHER_KEY, Live, live

WRITE_TIMEOUT_S = 1.0
LIMITS = {"write_timeout_s": WRITE_TIMEOUT_S, "read_timeout_s": 5.0, "max_body_bytes": 100_000}
HEADERS = {"Authorization": f"Bearer {KEY}"}
GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
MIB = 2**20
PATHS: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True},
    "/v1/completions": {"prompt": "on and on"},
    "/v1/responses": {"input": "x", "ignore_eos": True},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "model": "scripted"},
    "/tokenize": {"prompt": "x"},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    log = tmp_path_factory.mktemp("connections") / "log"
    with live(log, limits=LIMITS, max_model_len=2**17) as running:
        yield running
        assert "Traceback" not in log.read_text()


def connect(server: Live, unread_bytes: int = 4096) -> socket.socket:
    where = urlsplit(server.address)
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, unread_bytes)
    made.connect((where.hostname, where.port))
    made.settimeout(10)
    return made


def post(path: str, body: bytes, extra: str = "", length: int | None = None) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n{extra}"
    )
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


def body_of(path: str, **more: object) -> bytes:
    most = {"/v1/responses": "max_output_tokens", "/tokenize": "ignored"}.get(path, "max_tokens")
    return json.dumps(PATHS[path] | {most: 2000, "stream": True} | more).encode()


def read_all(client: socket.socket) -> bytes:
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(2**16):
            answer += piece
    return answer


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def resident(server: Live) -> int:
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


# ---- a client that sends ahead, or does not read ----


def test_pipelined_requests_are_answered_in_order(server: Live) -> None:
    asked = post("/tokenize", b'{"prompt": "a"}') + HEALTH + post("/tokenize", b"x" * 3000) + HEALTH * 200
    with connect(server, MIB) as client:
        client.sendall(asked + b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = read_all(client)
    found = [piece.split()[0] for piece in answer.split(b"HTTP/1.1 ")[1:]]
    assert found == [b"200", b"200", b"400", *[b"200"] * 201]


def test_garbage_behind_a_request_does_not_take_its_answer(server: Live) -> None:
    with connect(server, MIB) as client:
        client.sendall(HEALTH + post("/v1/completions", body_of("/v1/completions", max_tokens=20)) + b"\0\xff\r\n\r\n")
        answer = read_all(client)
    assert [piece.split()[0] for piece in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"400"]
    assert b"data: [DONE]" in answer


def test_unread_pipelines_take_no_memory(server: Live) -> None:
    httpx.get(f"{server.address}/metrics", headers=HEADERS)
    before = resident(server)
    clients = [connect(server) for _ in range(6)]
    try:
        unsent = [b""] * 6
        for client in clients:
            client.setblocking(False)
        begin, open_clients = time.monotonic(), set(range(6))
        while open_clients:
            assert time.monotonic() < begin + 30 * WRITE_TIMEOUT_S
            for number in list(open_clients):
                try:
                    unsent[number] = unsent[number] or GET * 5000
                    unsent[number] = unsent[number][clients[number].send(unsent[number]) :]
                except BlockingIOError:
                    continue
                except OSError:
                    open_clients.remove(number)  # the server has closed it
            assert httpx.get(f"{server.address}/health").status_code == 200
            assert resident(server) < before + 40 * MIB
            time.sleep(0.05)
    finally:
        for client in clients:
            client.close()


def num_running(server: Live) -> float:
    text = httpx.get(f"{server.address}/metrics", headers=HEADERS).text
    return float(next(line for line in text.splitlines() if "num_requests_running{" in line).rpartition(" ")[2])


def wait_for_running(server: Live, num: int) -> None:
    deadline = time.monotonic() + 20
    while num_running(server) != num:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_unread_stream_is_aborted(server: Live, path: str) -> None:
    with connect(server) as client:
        client.sendall(post(path, body_of(path, max_tokens=100_000)))
        wait_for_running(server, 1)
        wait_for_running(server, 0)
        assert b"[DONE]" not in read_all(client)


def test_an_unread_stream_is_aborted_before_its_socket_is_full(server: Live) -> None:
    with connect(server) as client:
        # 20 ms a token: they take six seconds to fill the server's buffer.
        client.sendall(post("/v1/completions", body_of("/v1/completions", max_tokens=100_000, priority=20)))
        wait_for_running(server, 1)
        wait_for_running(server, 0)
    last = next(line for line in reversed(log_lines(server)) if "route=/v1/completions" in line)
    assert int(last.partition("completion_tokens=")[2].split()[0]) < 250


def test_a_pipelined_request_does_not_hide_that_a_client_leaves(server: Live) -> None:
    """The server underneath ends only the last request of a connection."""
    body = body_of("/v1/completions", max_tokens=100_000, stream=False)
    with connect(server) as client:
        client.sendall(post("/v1/completions", body) + HEALTH)
        wait_for_running(server, 1)
    wait_for_running(server, 0)


# ---- half of a connection ----


ANSWER = post("/v1/completions", body_of("/v1/completions", max_tokens=50, stream=False, priority=20))
STREAM = post("/v1/completions", body_of("/v1/completions", max_tokens=50))
OLD_GET = b"GET /health HTTP/1.0\r\n\r\n"


@pytest.mark.parametrize(
    "asked",
    [HEALTH, HEALTH * 3, HEALTH * 3000, GET, ANSWER, STREAM, ANSWER + HEALTH + STREAM, OLD_GET],
    ids=["one", "three", "many", "metrics", "answer", "stream", "both", "HTTP/1.0"],
)
def test_a_client_that_ends_its_side_gets_what_it_asked_for(server: Live, asked: bytes) -> None:
    with connect(server, MIB) as client:
        client.sendall(asked)
        client.shutdown(socket.SHUT_WR)
        answer = read_all(client)
    assert answer.count(b"HTTP/1.1 200 OK") == asked.count(b" HTTP/1.")
    assert answer.count(b"[DONE]") == asked.count(b'"stream": true')
    assert answer.count(b'"finish_reason":"length"') == asked.count(b"/v1/completions")


# ---- heads, and what is around a body ----

CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n"
CHUNKED += b'Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nf\r\n{"prompt": "x"}'


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (CHUNKED + b"\r\n0\r\nA: b\r\n\r\n", b"200"),
        (CHUNKED + b"\r\n0\r\n" + b"A: b\r\n" * 2**18, b"431"),
        (CHUNKED + b"\r\n0\r\nA: " + b"b" * 2**20, b"431"),
        (CHUNKED + b"\r\n1;" + b"b" * 2**20, b"431"),
        (b"\r\n" * 2**19, b"431"),
    ],
    ids=["a trailer", "trailers", "a long trailer", "a long extension", "empty lines"],
)
def test_what_is_around_a_body_has_a_limit(server: Live, sent: bytes, status: bytes) -> None:
    with connect(server) as client:
        client.sendall(sent)
        assert client.recv(4096).split()[1] == status


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n", b"400"),
        (b"GET /health HTTP/2.0\r\n\r\n", b"400"),
        (b"GET /health\r\n\r\n", b"400"),
    ],
    ids=["two", "HTTP/2.0 without", "HTTP/0.9"],
)
def test_a_request_has_one_host(server: Live, head: bytes, status: bytes) -> None:
    with connect(server) as client:
        client.sendall(head)
        assert client.recv(4096).split()[1] == status


# ---- whom a request is for ----


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET http://x/health HTTP/1.1", b"200"),
        (b"GET http://evil.example/health HTTP/1.1", b"400"),
        (b"GET ftp://x/health HTTP/1.1", b"400"),
        (b"CONNECT evil.example:443 HTTP/1.1", b"400"),
    ],
)
def test_this_is_no_proxy(server: Live, line: bytes, status: bytes) -> None:
    with connect(server) as client:
        client.sendall(line + b"\r\nHost: x\r\n\r\n")
        assert client.recv(4096).split()[1] == status


def test_the_host_of_an_absolute_uri_is_checked_too(tmp_path: Path) -> None:
    with live(tmp_path / "log", keys=[]) as keyless, connect(keyless) as client:
        client.sendall(b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n")
        assert client.recv(4096).split()[1] == b"403"


# ---- what the log gets ----

UPGRADE = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
ODD_HEADS = [
    b"GET /h\xc3\xa9alth HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /v1/responses/%ed%a0%80%00 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: \xff\r\nAuthorization: Bearer \xff\xfe\r\nX-Request-Id: \xff\r\n\r\n",
    b"GET http://[::1/health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    UPGRADE,
    UPGRADE + b"\x81\x85frame",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2;" + b"a" * 70_000,
    HEALTH[:-2] + b"Content-Length: 500\r\n\r\nabc",
]


def test_no_client_leaves_more_than_a_line_in_the_log(server: Live) -> None:
    faults: list[bytes] = [head for head in ODD_HEADS for _ in range(2)]
    for path in PATHS:
        body = body_of(path)
        chunked = post(path, b"", extra="Transfer-Encoding: chunked\r\n").replace(b"Content-Length: 0\r\n", b"")
        faults += [
            post(path, body),  # reset in its answer
            post(path, body[:5], length=len(body)),  # and in its body
            post(path, body[:5], extra="Expect: 100-continue\r\n", length=len(body)),
            post(path, b"x", length=10**9),
            post(path, b"x", length=10**25),
            post(path, b"\xff\xfe\xed\xa0\x80" + body),
            post(path, b"\x1f\x8bxx", extra="Content-Encoding: gzip\r\n"),
            chunked + b"5\r\n" + body[:5] + b"\r\nzz\r\n",
            chunked + b"5\r\n" + body[:5] + b"\r\nffffffffffffffff1\r\n",
        ]
        faults += [post(path, body) * 40, post(path, body) + b"\0\xff\r\n\r\n"]
    for fault in faults:
        for pause_s in (0.0, 0.02):
            before = log_lines(server)
            client = connect(server)
            client.sendall(fault)
            time.sleep(pause_s)
            if pause_s:
                with contextlib.suppress(OSError, TimeoutError):
                    client.settimeout(0.1)
                    client.recv(4096)
            reset(client)
            assert httpx.get(f"{server.address}/health").status_code == 200
            new = [line for line in log_lines(server)[len(before) :] if not line.startswith("request id=")]
            assert len(new) <= 2, new  # this client's, and the last one's
            assert not [line for line in new if "rror" in line or "ASGI" in line], new
    wait_for_running(server, 0)
    assert "Traceback" not in server.log.read_text()


def log_lines(server: Live) -> list[str]:
    return server.log.read_text().splitlines()


# ---- fairness ----


def test_a_client_has_a_number_of_requests(tmp_path: Path) -> None:
    limits = {"max_requests_per_client": 2}
    with live(tmp_path / "log", limits=limits, keys=[KEY, OTHER_KEY]) as server, contextlib.ExitStack() as stack:
        url, body = f"{server.v1}/completions", {"prompt": "x", "max_tokens": 4000, "stream": True, "priority": 5}
        for _ in range(2):
            reply = stack.enter_context(httpx.stream("POST", url, headers=HEADERS, json=body))
            assert reply.status_code == 200
        refused = httpx.post(url, headers=HEADERS, json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "2 requests open" in refused.json()["error"]["message"]
        short = {"prompt": "x", "max_tokens": 2}
        other = httpx.post(url, headers={"Authorization": f"Bearer {OTHER_KEY}"}, json=short)
        assert other.status_code == 200
        assert httpx.get(f"{server.v1}/models", headers=HEADERS).status_code == 200
        stack.close()
        deadline = time.monotonic() + 10
        while httpx.post(url, headers=HEADERS, json=short).status_code != 200:
            assert time.monotonic() < deadline


def test_without_keys_an_address_is_a_client(tmp_path: Path) -> None:
    with live(tmp_path / "log", limits={"max_requests_per_client": 1}, keys=[]) as server:
        body = {"prompt": "x", "max_tokens": 4000, "stream": True, "priority": 5}
        with httpx.stream("POST", f"{server.v1}/completions", json=body) as reply:
            assert reply.status_code == 200
            assert httpx.post(f"{server.v1}/completions", json=body).status_code == 429
