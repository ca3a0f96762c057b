"""Plain tokens past ASGI: the same events as the usual way gives, none lost where the client stops reading."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest

from support.live_server import KEY, SEEDS, TURNS, Live, live

HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
NEVER = "\x00"
"""A stop string that no text has: with one to look for, every token goes the usual way."""
LONG = "<|channel|>final<|message|>" + " ".join(map(str, range(4000)))
NUM_TOKENS = (20_000, 100_000, 400_000)
"""Events of one token have 0.2 kB, and 4 MB of them are more than the sockets hold. A busy server puts several tokens
into one event, and then it takes more of them."""
HUNG_UP = "has not read for"


@pytest.fixture(scope="module")
def long_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    log = tmp_path_factory.mktemp("long") / "log"
    limits = {"write_timeout_s": 4.0, "max_unread_tokens": 2**20}
    with live(log, step_s=0.0001, max_model_len=2**20, turns=[LONG], limits=limits) as running:
        yield running
        assert "Traceback" not in log.read_text()


def events(lines: Iterator[str]) -> list[dict[str, Any]]:
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data.pop() == "[DONE]"
    return [json.loads(each) for each in data]


def streamed(server: Live, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with httpx.stream("POST", server.v1 + path, headers=HEADERS, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["transfer-encoding"] == "chunked"
        return events(answer.iter_lines())


def fields_and_texts(found: list[dict[str, Any]]) -> tuple[set[str], dict[str, str]]:
    """Every field that an event has, with its value, and the joined texts: the same however tokens are gathered."""
    fields, texts = set(), dict[str, str]()

    def add(where: str, value: Any) -> None:
        name = where.rpartition(".")[2]
        if isinstance(value, dict):
            for inner in value:
                add(f"{where}.{inner}", value[inner])
        elif isinstance(value, list):
            for each in value:
                add(where, each)
        elif name in TEXTS:
            texts[where] = texts.get(where, "") + value
        else:
            fields.add(where if name in VARYING else f"{where}={value}")

    for event in found:
        add("", event)
    return fields, texts


TEXTS = ("text", "content", "reasoning", "reasoning_content", "arguments")
VARYING = ("id", "created", "reasoning_tokens")
"""Tokens of thoughts are counted by events, and one may hold the end of thoughts and the beginning of an answer."""
CHAT = ("/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})
COMPLETION = ("/completions", {"prompt": "Hi", "max_tokens": 200})


@pytest.mark.parametrize("way", [CHAT, COMPLETION], ids=["chat", "completion"])
@pytest.mark.parametrize("script", ["answer", "call", "no header"])
@pytest.mark.parametrize("more", [{}, {"stream_options": {"include_usage": True}}], ids=["", "usage"])
def test_the_events_are_those_of_the_usual_way(
    server: Live, way: tuple[str, dict[str, Any]], script: str, more: dict[str, Any]
) -> None:
    path, body = way
    body = body | more | {"seed": SEEDS[script]}
    short, usual = (fields_and_texts(streamed(server, path, body | {"stop": stop})) for stop in ([], [NEVER]))
    assert short == usual


def connect(server: Live, num_tokens: int, **options: Any) -> socket.socket:
    """A client that has little room for what it has not read, and asks for more than fits."""
    where = urlsplit(server.address)
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.connect((where.hostname, where.port))
    made.settimeout(20)
    asked = {"seed": len(TURNS), "stream": True, "max_tokens": num_tokens, "ignore_eos": True, **options}
    body = json.dumps(CHAT[1] | asked)
    head = "POST /v1/chat/completions HTTP/1.0\r\nContent-Length: " + str(len(body))
    head += "".join(f"\r\n{name}: {value}" for name, value in HEADERS.items())
    made.sendall(f"{head}\r\n\r\n{body}".encode())
    return made


def num_sent(server: Live) -> float:
    """Tokens that were handed to clients; it stands still when none reads."""
    lines = httpx.get(f"{server.address}/metrics", headers=HEADERS).text.splitlines()
    return float(next(line for line in lines if "generation_tokens_total{" in line).rpartition(" ")[2])


def paused(server: Live, num_tokens: int) -> list[str]:
    """The texts of a client that pauses, beside one that never reads and is hung up on."""
    known = server.log.read_text().count(HUNG_UP)
    # Log-probabilities take room for every token, also where a busy server joins many in one event.
    with connect(server, num_tokens) as pausing, connect(server, num_tokens, logprobs=True, top_logprobs=5):
        before, now = -1.0, 0.0
        while now != before or not now:
            time.sleep(0.7)  # counters are told every half second
            before, now = now, num_sent(server)
        answer = b""
        while piece := pausing.recv(2**20):
            answer += piece
        deadline = time.monotonic() + 10
        while server.log.read_text().count(HUNG_UP) == known:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    # An event is in one chunk: what else there is are the chunks' sizes.
    found = events(line for line in answer.decode().splitlines() if line.startswith("data: "))
    return [event["choices"][0]["delta"].get("content", "") for event in found]


@pytest.mark.nightly
def test_clients_that_do_not_read(long_server: Live) -> None:
    """One that pauses loses nothing, one that never reads is hung up on."""
    script = LONG.partition("<|message|>")[2]
    for num_tokens in NUM_TOKENS:
        texts = paused(long_server, num_tokens)
        assert len("".join(texts)) > len(script)
        assert "".join(texts).startswith(script)
        if max(map(len, texts)) > 1000:
            return
    pytest.fail("there was room for all of it")
