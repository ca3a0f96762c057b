"""One exchange with a client: its body in, its answer out, and what happens when it goes away or does not read.

    Answer ── work(exchange) ──► JSON at once, or events as they come
       └───── receive() ───────► the client is gone: the work is cancelled, which aborts its requests in the engine

Errors raised on purpose become a status before the answer has begun and an event after. One log line tells of each.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from microscale.errors import MicroscaleError
from microscale.server.faults import SlowReader, code_of, error_headers, error_json, fault_of
from microscale.server.host import Host
from microscale.server.http.connection import WIRE, Wire, owner_of
from microscale.server.http.manners import request_id_of
from microscale.server.limits import Limits

log = logging.getLogger(__name__)
GONE = 499
"""What the log says of a client that left; no status is sent to it."""
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    # Proxies would otherwise gather tokens.
    (b"x-accel-buffering", b"no"),
]
CHUNKED = [(b"transfer-encoding", b"chunked")]
"""As ``Wire`` writes; without it the server below chooses."""


@dataclass
class Record:
    """What the log and the metrics tell of one request. Never its text."""

    route: str
    request_id: str = "-"
    """Ours, which the answer carries."""
    client_id: str = "-"
    """The header x-request-id, which the client may choose."""
    owner: str = ""
    """Whose key it came with; see ``app.Keys``."""
    started: float = field(default_factory=time.perf_counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float | None = None
    finishes: list[str] = field(default_factory=list)

    def line(self, status: int, total_s: float) -> str:
        first = "-" if self.first_token_s is None else f"{self.first_token_s * 1e3:.1f}"
        return (
            f"request id={self.request_id} x_request_id={self.client_id} route={self.route} status={status} "
            f"prompt_tokens={self.prompt_tokens} cached_tokens={self.cached_tokens} "
            f"completion_tokens={self.completion_tokens} finish={','.join(self.finishes) or '-'} "
            f"first_token_ms={first} total_ms={total_s * 1e3:.1f}"
        )


class Exchange:
    """The writing half. ``send`` waits while the socket is full; one that stays full ends the exchange.

    A clock beside the writes watches for that, instead of a timer around each: there is one for every token.
    """

    def __init__(self, scope: Scope, send: Send, limits: Limits, record: Record) -> None:
        self.record = record
        self.status = 0
        """Of the answer; 0 until it has begun."""
        self.wire: Wire | None = scope.get("state", {}).get(WIRE)
        """The short way, where the server has one."""
        self.headers: dict[str, str] = {}
        """Of the answer, beside those that its kind has. Lower case."""
        self._send = send
        self._patience_s = limits.write_timeout_s
        self._loop = asyncio.get_running_loop()
        self._waits_since: float | None = None
        """When the write began that has not ended."""
        self._clock = self._loop.call_later(self._patience_s / 2, self._check_reader)

    def close(self) -> None:
        self._clock.cancel()

    def _check_reader(self) -> None:
        if self._waits_since is not None and self._loop.time() - self._waits_since >= self._patience_s:
            log.warning("Request %s: the client reads nothing, and is hung up on.", self.record.request_id)
            self.abort()
            return
        self._clock = self._loop.call_later(self._patience_s / 2, self._check_reader)

    async def json(self, data: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.status = status
        fields = _encoded({**self.headers, **(headers or {})})
        fields += [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": fields})
        await self._write(data, more=False)

    async def event(self, data: bytes, name: bytes | None = None) -> None:
        """One event of a stream; the first begins the answer."""
        if not self.status:
            self.status = 200
            headers = STREAM_HEADERS + _encoded(self.headers) + ([] if self.wire is None else CHUNKED)
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        if self.wire is not None and self.wire.writable:
            self.wire.write_chunk(event_bytes(data, name))
        else:
            await self._write(event_bytes(data, name), more=True)

    async def end_events(self, last: bytes = b"data: [DONE]\n\n") -> None:
        await self._write(last, more=False)

    async def error(self, error: MicroscaleError) -> None:
        """Tell the client, as well as that can still be done."""
        if isinstance(error, SlowReader):
            self.abort()
        elif not self.status:
            await self.json(error_json(error), fault_of(error).status, error_headers(error))
        else:
            await self.event(error_json(error))
            await self._write(b"", more=False)

    def abort(self) -> None:
        """Drop the connection and what it has not read. The server then tells ``Answer`` that the client is gone."""
        if self.wire is not None:
            self.wire.abort()

    async def _write(self, body: bytes, *, more: bool) -> None:
        self._waits_since = self._loop.time()
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._waits_since = None


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]


def event_bytes(data: bytes, name: bytes | None = None) -> bytes:
    """An event of a stream, as ``text/event-stream`` has it."""
    head = b"" if name is None else b"event: " + name + b"\n"
    return head + b"data: " + data + b"\n\n"


class Answer(Response):
    """A response that is computed while it is sent."""

    def __init__(self, host: Host, route: str, work: Callable[[Exchange], Awaitable[None]]) -> None:
        super().__init__()
        self._host = host
        self._record = Record(route)
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._record.owner = owner_of(scope)
        self._record.client_id = request_id_of(scope)
        exchange = Exchange(scope, send, self._host.limits, self._record)
        self._host.num_open += 1
        work = asyncio.create_task(self._run(exchange))
        gone = asyncio.create_task(_wait_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._host.num_open -= 1
            gone.cancel()
            exchange.close()
            left = not work.done()
            if left:
                work.cancel()
                await asyncio.wait((work,))
            total_s = time.perf_counter() - self._record.started
            if self._record.completion_tokens:
                self._host.metrics.whole.observe(total_s)
            log.info("%s", self._record.line(GONE if left else exchange.status, total_s))
        if not left:
            work.result()  # whatever could not be told to the client is raised to the server

    async def _run(self, exchange: Exchange) -> None:
        try:
            await self._work(exchange)
        except MicroscaleError as error:
            await self._tell(exchange, error)
        except Exception as error:  # a mistake of ours is told too, and never hangs a client
            log.exception("A request failed.")
            await self._tell(exchange, MicroscaleError(f"The server made a mistake: {type(error).__name__}."))

    async def _tell(self, exchange: Exchange, error: MicroscaleError) -> None:
        self._host.metrics.failed(code_of(error))
        await exchange.error(error)


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
