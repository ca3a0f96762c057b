"""A light HTTP client for ``bench serve``: many streams in one thread, each event with its arrival time.

It shares the machine with the server, so while streams run it only cuts bytes into events, and decodes JSON at the end.
All sockets that are ready at one time get the same time stamp, so the time that reading takes is not counted.
"""

from __future__ import annotations

import gc
import json
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from microscale.errors import MicroscaleError

SILENCE_S = 600.0
"""Maximum silence of a server. Its first step may compile kernels."""
RECEIVE_BYTES = 2**18
DONE = b"[DONE]"
FLOOR_RUNS = 50


class BenchFailed(MicroscaleError):
    """The measurement failed: the server ended, refused a request, or computed something else than was requested."""


@dataclass(frozen=True)
class TimedRequest:
    """A request and the time at which it is sent."""

    body: bytes
    at_s: float = 0.0
    """Seconds after the start; for one that is not ``running``, after all running streams have begun."""
    running: bool = False
    """A stream that continues until all others have ended, and is then cut off."""


@dataclass
class StreamTimes:
    """The arrival times of one answer, by ``time.perf_counter``."""

    sent: float
    first: float
    """The first event with a token in it."""
    texts: list[float]
    """Events with text."""
    ended: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def first_s(self) -> float:
        return self.first - self.sent

    def gaps(self, since: float = 0.0, until: float = float("inf")) -> list[float]:
        """Seconds between events with text within a span of time."""
        inside = [at for at in self.texts if since <= at <= until]
        return [after - before for before, after in pairwise(inside)]


@dataclass
class _Stream:
    """Cuts the bytes of one reply into events."""

    address: tuple[str, int]
    request: TimedRequest
    sock: socket.socket | None = None
    sent: float = 0.0
    ended: float = 0.0
    head: bytes | None = None
    events: list[tuple[float, bytes]] = field(default_factory=list)
    _raw: bytearray = field(default_factory=bytearray)
    """Bytes that are not a whole chunk yet."""
    _text: bytearray = field(default_factory=bytearray)
    """Text that is not a whole event yet."""

    def feed(self, now: float, data: bytes) -> None:
        self._raw += data
        if self.head is None:
            head, end_of_head, rest = bytes(self._raw).partition(b"\r\n\r\n")
            if not end_of_head:
                return
            self.head, self._raw = head, bytearray(rest)
        if not self.is_events:
            return
        while (line := self._raw.find(b"\r\n")) >= 0:
            size = int(self._raw[:line], 16)
            end = line + 2 + size
            if len(self._raw) < end + 2:
                break
            self._text += self._raw[line + 2 : end]
            del self._raw[: end + 2]
        while (end := self._text.find(b"\n\n")) >= 0:
            event = bytes(self._text[:end])
            del self._text[: end + 2]
            if event.startswith(b"data: "):
                self.events.append((now, event[6:]))
                if event[6:] == DONE:
                    self.ended = now

    @property
    def is_events(self) -> bool:
        return self.head is not None and self.head.split(b" ", 2)[1] == b"200"

    def answer(self) -> StreamTimes:
        """The times of the events. A reply that is not a stream, or contains an error, raises."""
        if not self.is_events:
            reply = (self.head or b"").split(b"\r\n")[0] + b" " + bytes(self._raw)
            raise BenchFailed(f"The server refused a request: {reply[:400].decode('utf-8', 'replace')}")
        times = StreamTimes(self.sent, 0.0, [], self.ended)
        for at, payload in self.events:
            if payload != DONE:
                _read_event(times, at, payload)
        if not times.first:
            raise BenchFailed("The server ended a stream without a token.")
        return times


def _read_event(times: StreamTimes, at: float, payload: bytes) -> None:
    event = json.loads(payload)
    if "error" in event:
        raise BenchFailed(f"The server ended a stream: {payload[:400].decode('utf-8', 'replace')}")
    for choice in event["choices"]:
        times.first = times.first or at
        delta = choice.get("delta", {})
        if choice.get("text") or delta.get("content") or delta.get("reasoning"):
            times.texts.append(at)
    if usage := event.get("usage"):
        times.prompt_tokens = usage["prompt_tokens"]
        times.completion_tokens = usage["completion_tokens"]
        times.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def post(host: str, port: int, path: str, fields: dict[str, object]) -> bytes:
    """A request as bytes. The server closes the connection after its reply."""
    body = json.dumps(fields).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def exchange(
    host: str, port: int, requests: Sequence[TimedRequest], settled: int = 8, *, connected: bool = True
) -> list[StreamTimes]:
    """Send every request at its time and read all answers to their ends.

    ``settled``: the number of events that each running stream must have had before the others are sent. ``connected``:
    open all connections at the start; otherwise open each just before its request. Connecting is never timed.
    """
    streams = [_Stream((host, port), request) for request in requests]
    try:
        for stream in streams if connected else ():
            stream.sock = _connect(host, port)
        with selectors.DefaultSelector() as ready, _no_garbage_collection():
            _run(streams, ready, settled)
    finally:
        for stream in streams:
            if stream.sock is not None:
                stream.sock.close()
    return [stream.answer() for stream in streams]


def _connect(host: str, port: int) -> socket.socket:
    """Clients keep connections open, so a first token includes no handshake."""
    sock = socket.create_connection((host, port), timeout=SILENCE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _run(streams: Sequence[_Stream], ready: selectors.BaseSelector, settled: int) -> None:
    running = [stream for stream in streams if stream.request.running]
    others = sorted(
        (stream for stream in streams if not stream.request.running), key=lambda stream: stream.request.at_s
    )
    waiting = list(others)
    for stream in running:
        _send(stream, ready)
    begun: float | None = None
    open_streams = set(map(id, others or running))
    while open_streams:
        if begun is None and all(len(stream.events) >= settled or stream.ended for stream in running):
            begun = time.perf_counter()
        while begun is not None and waiting and time.perf_counter() - begun >= waiting[0].request.at_s:
            _send(waiting.pop(0), ready)
        next_s = SILENCE_S
        if begun is not None and waiting:
            next_s = max(0.0, begun + waiting[0].request.at_s - time.perf_counter())
        arrived = ready.select(next_s)
        now = time.perf_counter()
        if not arrived and next_s == SILENCE_S:
            raise BenchFailed(f"The server sent nothing for {SILENCE_S:.0f} s.")
        for key, _ in arrived:
            stream = key.data
            data = stream.sock.recv(RECEIVE_BYTES)
            stream.feed(now, data)
            if stream.ended or not data:
                ready.unregister(stream.sock)
                stream.sock.close()
                stream.ended = stream.ended or now
                open_streams.discard(id(stream))
    for stream in running:
        stream.ended = stream.ended or time.perf_counter()


def _send(stream: _Stream, ready: selectors.BaseSelector) -> None:
    sock = stream.sock = stream.sock or _connect(*stream.address)
    ready.register(sock, selectors.EVENT_READ, stream)
    stream.sent = time.perf_counter()
    sock.sendall(stream.request.body)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A garbage collection would pause every stream."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def client_floor_s() -> float:
    """The time that this client and the loopback take: from send to first event, with a thread that answers at once."""
    event = b'data: {"choices": [{"text": "x"}]}\n\n'
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (event, b"data: [DONE]\n\n"))
    reply = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks
    with socket.create_server(("127.0.0.1", 0)) as listening:
        host, port = listening.getsockname()
        request = TimedRequest(post(host, port, "/v1/completions", {"prompt": "x" * 512}))

        def answer() -> None:
            for _ in range(FLOOR_RUNS):
                with listening.accept()[0] as sock:
                    got = b""
                    while len(got) < len(request.body):
                        got += sock.recv(RECEIVE_BYTES)
                    sock.sendall(reply)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        floor = median(exchange(host, port, [request])[0].first_s for _ in range(FLOOR_RUNS))
        thread.join()
        return floor


def round_trip_s(host: str, port: int, path: str) -> float:
    """Seconds from a GET to the first byte of its reply."""
    with _connect(host, port) as sock:
        began = time.perf_counter()
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
        sock.recv(RECEIVE_BYTES)
        return time.perf_counter() - began
