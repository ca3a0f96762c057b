"""The client of ``bench serve``: what it reads from bytes in any pieces, and when it says that they came."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from microscale.bench import serve_client
from microscale.bench.serve_client import BenchFailed, StreamTimes, TimedRequest, client_floor_s, exchange, post

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(content: str) -> bytes:
    return event(choices=[{"index": 0, "text": content}])


def chunk(*parts: bytes) -> bytes:
    body = b"".join(parts)
    return b"%x\r\n%s\r\n" % (len(body), body)


DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
USED = chunk(event(choices=[], usage=USAGE))


def fed(*pieces: tuple[float, bytes]) -> serve_client._Stream:
    """A stream that was sent at 1.0 and received these pieces at their times."""
    stream = serve_client._Stream(("127.0.0.1", 0), TimedRequest(b""), sent=1.0)
    for at, data in pieces:
        stream.feed(at, data)
    return stream


def test_events_have_the_time_of_the_piece_that_completes_them() -> None:
    whole = HEAD + chunk(text("a")) + chunk(text("b")) + chunk(text(""), text("c")) + USED + DONE
    for cut in range(1, len(whole)):
        stream = fed((2.0, whole[:cut]), (3.0, whole[cut:]))
        answer = stream.answer()
        # The last byte of an event's chunk is the line end after it.
        ends = [whole.index(chunk(text(name))) + len(chunk(text(name))) for name in "ab"]
        ends.append(whole.index(USED))
        assert answer.texts == [2.0 if cut >= end else 3.0 for end in ends], cut
        assert answer.first == answer.texts[0]
        assert answer.first_s == answer.first - 1.0
        assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (7, 3, 2)


def test_a_first_token_without_text_is_a_first_token() -> None:
    answer = fed((2.0, HEAD + chunk(text(""))), (3.0, chunk(text("a"))), (4.0, chunk(text("b")) + DONE)).answer()
    assert (answer.first, answer.texts, answer.ended) == (2.0, [3.0, 4.0], 4.0)


def test_deltas_of_a_chat_are_text_too() -> None:
    told = [
        event(choices=[{"delta": delta}]) for delta in ({"role": "assistant"}, {"content": "a"}, {"reasoning": "b"})
    ]
    answer = fed(*((2.0 + at, (HEAD if at == 0 else b"") + chunk(each)) for at, each in enumerate(told))).answer()
    assert (answer.first, answer.texts) == (2.0, [3.0, 4.0])


def test_gaps_are_those_within_a_span() -> None:
    answer = StreamTimes(sent=0.0, first=1.0, texts=[1.0, 1.5, 3.0, 3.25], ended=4.0)
    assert answer.gaps() == [0.5, 1.5, 0.25]
    assert answer.gaps(1.2, 3.1) == [1.5]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b'HTTP/1.1 429 Too Many Requests\r\n\r\n{"error": "full"}', "429.*full"),
        (HEAD + chunk(text("a")) + chunk(event(error={"message": "it broke"})), "it broke"),
        (HEAD + DONE, "without a token"),
        (b"", "refused"),
    ],
)
def test_what_is_no_stream_of_tokens_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(BenchFailed, match=why):
        fed((2.0, data)).answer()


@contextmanager
def scripted(replies: list[list[tuple[float, bytes]]]) -> Iterator[tuple[str, int, list[bytes]]]:
    """A server that answers the n-th connection with pieces, each after a wait; and what it was asked."""
    asked: list[bytes] = []
    release = threading.Event()

    def answer(sock: socket.socket, pieces: list[tuple[float, bytes]]) -> None:
        with sock:
            asked.append(sock.recv(2**16))
            for wait_s, data in pieces:
                release.wait(wait_s)
                try:
                    sock.sendall(data)
                except OSError:  # hung up
                    return

    def accept() -> None:
        threads = []
        for pieces in replies:
            threads.append(threading.Thread(target=answer, args=(listening.accept()[0], pieces)))
            threads[-1].start()
        for thread in threads:
            thread.join()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield (*listening.getsockname(), asked)
        finally:
            release.set()
            thread.join()


def test_running_streams_begin_first_and_are_hung_up_last() -> None:
    ticks = [(0.0, HEAD), *[(0.05, chunk(text("x")))] * 400]
    short = [(0.0, HEAD + chunk(text("y"))), (0.1, USED + DONE)]
    with scripted([ticks, short, short]) as (host, port, _):
        body = post(host, port, "/", {"a": 1})
        asks = [TimedRequest(body, running=True), TimedRequest(body), TimedRequest(body, at_s=0.2)]
        running, first, second = exchange(host, port, asks, settled=3)
    assert sum(at <= first.sent for at in running.texts) >= 3
    assert second.sent - first.sent >= 0.2
    assert len(running.texts) < 400
    assert running.ended >= second.ended
    # A token every 50 ms: a busy machine delays them, and none is stamped before it was sent.
    assert all(at - running.sent >= 0.05 * number for number, at in enumerate(running.texts, 1))


def test_a_request_is_sent_as_http() -> None:
    with scripted([[(0.0, HEAD + chunk(text("y")) + DONE)]]) as (host, port, asked):
        exchange(host, port, [TimedRequest(post(host, port, "/v1/completions", {"prompt": "é"}))])
    head, _, body = asked[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert json.loads(body) == {"prompt": "é"}


def test_a_server_that_hangs_up_is_refused() -> None:
    with scripted([[(0.0, HEAD)]]) as (host, port, _), pytest.raises(BenchFailed, match="without a token"):
        exchange(host, port, [TimedRequest(post(host, port, "/", {}))])


def test_the_clients_own_floor_is_small() -> None:
    """Some ten microseconds on a quiet machine; what it times are milliseconds."""
    assert 0 < client_floor_s() < 0.05
