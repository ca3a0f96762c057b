"""Adds to uvicorn's connection: limits on a request's head, a fast path for events, and a way to abort."""

from __future__ import annotations

import asyncio

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from microscale.server.options import RequestLimits

WIRE = "microscale.wire"
"""The key of a request's ``Wire`` in ``scope["state"]``."""


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
        _in_head = True
        _passed = False
        """Whether the last data ended a head or a body."""
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
            if self._in_head and self._deadline is None:
                # The next request on a kept-alive connection.
                self._deadline = self.loop.call_later(limits.read_timeout_s, self.transport.abort)
            self._passed = False
            super().data_received(data)
            # Counted afterwards: the data that ends the head may also begin the body.
            if self._in_head and not self._passed:
                self._head_bytes += len(data)
                if self._head_bytes > limits.max_header_bytes and not self.transport.is_closing():
                    self.send_400_response(f"The head of a request may have at most {limits.max_header_bytes} bytes.")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._head_bytes, self._in_head = 0, True

        def on_headers_complete(self) -> None:
            self._in_head, self._passed = False, True
            self._stop_clock()
            self.scope["state"][WIRE] = self._wire
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._head_bytes, self._in_head, self._passed = 0, True, True

        def _stop_clock(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return BoundedProtocol
