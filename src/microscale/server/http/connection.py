"""Adds to uvicorn's connection: limits on a request's head, a fast path for events, and a way to abort."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from microscale.server.options import RequestLimits

WIRE = "microscale.wire"
"""The key of a request's ``Wire`` in ``scope["state"]``."""


FIELD_BYTES = 4
"""Of a header field, besides its name and value: a colon, a space, and the end of the line."""
MAX_DISCARDED = 16 * 2**20
DISCARD_S = 2.0
"""How much, and for how long, is read and discarded after a request was refused for its head."""


class Wire:
    """Writes to the client's socket without ASGI, which costs several times as much as a token's event itself.

    It writes chunks of a body; the head and the last piece go through ASGI. No middleware sees the chunks.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.is_full = False
        """The client reads too slowly. Events then go through ASGI, which waits for it."""

    @property
    def writable(self) -> bool:
        return not self.is_full and not self._transport.is_closing()

    def write_chunk(self, data: bytes) -> None:
        """``data`` must not be empty: an empty chunk would end the body."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def abort(self) -> None:
        """Close the connection, discarding unsent bytes."""
        self._transport.abort()


OWNER = "microscale.owner"
"""The key of the request's owner (by API key) in ``scope["state"]``."""


def owner_of(scope: Scope) -> str:
    return str(scope.get("state", {}).get(OWNER, ""))


def bounded_protocol(limits: RequestLimits) -> type[HttpToolsProtocol]:
    """A protocol class with these limits: uvicorn makes the instances."""

    class BoundedProtocol(HttpToolsProtocol):
        _head_bytes = 0
        """Bytes of the head that arrived before its end."""
        _in_head = True
        _passed = False
        """Whether the last data ended a head or a body."""
        _refusal: tuple[int, str] | None = None
        """Why the head is refused."""
        _num_discarded: int | None = None
        """Bytes that arrived after a refusal; ``None`` before one."""
        _deadline: asyncio.TimerHandle | None = None
        _wire: Wire

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._wire = Wire(transport)
            self._deadline = self.loop.call_later(limits.read_timeout_s, transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_clock()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            self._wire.is_full = True
            super().pause_writing()

        def resume_writing(self) -> None:
            self._wire.is_full = False
            super().resume_writing()

        def data_received(self, data: bytes) -> None:
            if self._num_discarded is not None:
                self._num_discarded += len(data)
                if self._num_discarded > MAX_DISCARDED:
                    self.transport.abort()
                return
            if self._in_head and self._deadline is None:
                # The next request on a kept-alive connection.
                self._deadline = self.loop.call_later(limits.read_timeout_s, self.transport.abort)
            self._passed = False
            super().data_received(data)
            # Counted afterwards: the data that ends the head may also begin the body.
            if self._in_head and not self._passed and self._num_discarded is None:
                self._head_bytes += len(data)
                if self._head_bytes > limits.max_header_bytes and not self.transport.is_closing():
                    self.send_400_response(self._head_too_large()[1])

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._head_bytes, self._in_head = 0, True

        def on_headers_complete(self) -> None:
            self._in_head, self._passed = False, True
            self._stop_clock()
            self._refusal = self._fault()
            if self._refusal is not None:
                raise ValueError(self._refusal[1])  # uvicorn then calls send_400_response
            self.scope["state"][WIRE] = self._wire
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._head_bytes, self._in_head, self._passed = 0, True, True

        def _fault(self) -> tuple[int, str] | None:
            """The status and the reason if a complete head is refused."""
            size = len(self.url) + sum(len(name) + len(value) + FIELD_BYTES for name, value in self.headers)
            if size > limits.max_header_bytes:
                return self._head_too_large()
            if not any(name == b"host" for name, _ in self.headers) and self.parser.get_http_version() == "1.1":
                return 400, "A request of HTTP/1.1 must have the header Host."
            if any(value.strip().lower() != b"chunked" for name, value in self.headers if name == b"transfer-encoding"):
                return 501, "The only Transfer-Encoding that is supported is chunked."
            return None

        def _head_too_large(self) -> tuple[int, str]:
            self._refusal = 431, f"The head of a request may have at most {limits.max_header_bytes} bytes."
            return self._refusal

        def send_400_response(self, msg: str) -> None:
            """Refuse the request. What still arrives is discarded: if the connection were closed while the client is
            sending, the client would see a reset and never the reply."""
            status, text = self._refusal or (400, msg)
            head = "content-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
            line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
            self.transport.write(f"{line}{head}content-length: {len(text)}\r\n\r\n{text}".encode("ascii"))
            self._num_discarded = 0
            self._stop_clock()
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write_eof()
                self._deadline = self.loop.call_later(DISCARD_S, self.transport.close)
            else:
                self.transport.close()  # an earlier reply on this connection is cut off

        def _stop_clock(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return BoundedProtocol
