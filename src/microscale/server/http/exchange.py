"""Writes one reply, JSON or events, and the request's log line.

``app.RunningReply`` is the other half: it runs the work, and cancels it when the client disconnects.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from starlette.types import Scope, Send

from microscale.errors import MicroscaleError
from microscale.server.error_texts import SlowReader
from microscale.server.http.error_replies import error_reply
from microscale.server.http.wire import WIRE, Wire

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    # Otherwise proxies would buffer tokens.
    (b"x-accel-buffering", b"no"),
]
CHUNKED = [(b"transfer-encoding", b"chunked")]
"""Because ``Wire`` writes chunks; otherwise uvicorn chooses."""


@dataclass
class Record:
    """What the log and the metrics report about one request. Never its text."""

    route: str
    request_id: str = "-"
    """Our id, which is in the reply."""
    client_id: str = "-"
    """The header x-request-id, which the client may set."""
    owner: str = ""
    """The sender, by API key; see ``auth.ApiKeys``."""
    started: float = field(default_factory=time.perf_counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    drafts: tuple[int, int] | None = None
    """Drafted and accepted tokens of its choices; ``None`` without speculative decoding."""
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
    """Writes one reply. ``send`` waits while the socket is full; if it stays full, the connection is closed."""

    ERROR_EVENT: ClassVar[bytes | None] = None
    """The name of the event that reports an error in a stream."""

    def __init__(self, scope: Scope, send: Send, record: Record) -> None:
        self.record = record
        self.status = 0
        """The reply's status; 0 until it has begun."""
        self.wire: Wire | None = scope.get("state", {}).get(WIRE)
        """For the fast path; ``None`` if the server underneath has none."""
        self.headers: dict[str, str] = {}
        """Additional headers of the reply, in lower case."""
        self._send = send

    async def json(self, data: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.status = status
        fields = _encoded({**self.headers, **(headers or {})})
        fields += [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": fields})
        await self._write(data, more=False)

    async def event(self, data: bytes, name: bytes | None = None) -> None:
        """Send one event of a stream; the first begins the reply."""
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
        """Send an error: as a status, or as an event if the reply has begun."""
        if isinstance(error, SlowReader):
            self.abort()
            return
        body, status, headers = self.error_reply(error)
        if not self.status:
            await self.json(body, status, headers)
        else:
            await self.event(body, self.ERROR_EVENT)
            await self.end_events(b"")

    def error_reply(self, error: MicroscaleError) -> tuple[bytes, int, dict[str, str]]:
        """Body, status and headers of an error."""
        return error_reply(error)

    def abort(self) -> None:
        """Close the connection, discarding unread data. ``RunningReply`` then sees a disconnected client."""
        if self.wire is not None:
            self.wire.abort()

    async def _write(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]


def event_bytes(data: bytes, name: bytes | None = None) -> bytes:
    """An event in the format of ``text/event-stream``."""
    head = b"" if name is None else b"event: " + name + b"\n"
    return head + b"data: " + data + b"\n\n"
