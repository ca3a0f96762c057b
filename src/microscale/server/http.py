"""HTTP itself, where uvicorn leaves it open: bounds on a request's head, and a way to hang up on a reader at once."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from microscale.server.limits import Limits

ABORT = "microscale.abort"
"""In a request's ``scope["state"]``: a function that drops the connection, unsent bytes included."""


def bounded_protocol(limits: Limits) -> type[HttpToolsProtocol]:
    """uvicorn makes its protocols itself, so what they must know is bound into the class."""

    class BoundedProtocol(HttpToolsProtocol):
        _head_bytes = 0
        _in_head = True
        _passed = False
        """Whether the last piece ended a head or a body."""
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._deadline = self.loop.call_later(limits.read_timeout_s, transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_clock()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._in_head and self._deadline is None:
                # The next request on a connection that was kept.
                self._deadline = self.loop.call_later(limits.read_timeout_s, self.transport.abort)
            self._passed = False
            super().data_received(data)
            # Counted afterwards: a body may begin in the piece that ends the head.
            if self._in_head and not self._passed:
                self._head_bytes += len(data)
                if self._head_bytes > limits.max_header_bytes and not self.transport.is_closing():
                    self.send_400_response(f"The head of a request may have {limits.max_header_bytes} bytes.")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._head_bytes, self._in_head = 0, True

        def on_headers_complete(self) -> None:
            self._in_head, self._passed = False, True
            self._stop_clock()
            self.scope["state"][ABORT] = self.transport.abort
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._head_bytes, self._in_head, self._passed = 0, True, True

        def _stop_clock(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return BoundedProtocol
