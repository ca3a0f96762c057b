"""Adds limits to uvicorn's connection: on heads, on requests that are sent ahead, and on answers that are not read.

Requests are answered one after another: while one is unanswered, or an answer does not fit into the socket, what else
arrives is held unparsed, and after ``MAX_HELD`` bytes of it the connection is not read.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections import deque
from http import HTTPStatus
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import urlsplit

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from microscale.server.http.wire import WIRE, Wire
from microscale.server.options import RequestLimits

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

log = logging.getLogger(__name__)
PARSED_BYTES = 2048
"""How much is parsed at once: the parser starts every request that is in it."""
MAX_HELD = 64 * 1024
"""Bytes that are read ahead while a request is answered. Only a connection that is read notices its end."""
WRITE_BUFFER_BYTES = 1024
"""Unsent bytes after which writers wait. The kernel's buffer comes before them."""
MAX_TIMEOUT_MS = 2**31 - 1
FIELD_BYTES = 4
"""Bytes of a header field besides its name and value: a colon, a space, and the end of the line."""
MAX_DISCARDED = 16 * 2**20
DISCARD_S = 2.0
"""How much, and for how long, is read and discarded after a request was refused for its head."""
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
PROBE_S = 0.25
"""How often a client that has ended its side gets an interim reply, which clients ignore. One that has left resets the
connection, and the next write then fails."""


class _Flow(FlowControl):
    """Reading stays paused while enough is held."""

    has_enough = False

    def resume_reading(self) -> None:
        if not self.has_enough:
            super().resume_reading()


class BoundedProtocol(HttpToolsProtocol):
    """A connection. uvicorn makes the instances of a class that ``bounded_protocol`` gives."""

    limits: ClassVar[RequestLimits]
    _num_overhead = 0
    """Bytes since the last head ended or the last part of a body: of a head, chunk sizes or trailers."""
    _in_head = True
    _deadline: asyncio.TimerHandle | None = None
    """Ends a connection whose head does not arrive, or that was refused."""
    _refusal: tuple[int, str] | None = None
    """The status and the reason with which the connection is refused."""
    _num_discarded: int | None = None
    """Bytes that arrived after a refusal; ``None`` before one."""
    _has_ended = False
    """The client has ended its side, and still gets its answers."""
    flow: _Flow

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        # The kernel then ends the connection if the client has no room for data, or is out of reach, for so long.
        timeout_ms = min(math.ceil(self.limits.write_timeout_s * 1000), MAX_TIMEOUT_MS)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
        self.flow = _Flow(transport)
        self._held = bytearray()
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._wire = Wire(transport)
        self._start_clock(self.limits.read_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(exc, TimeoutError):
            log.warning("A client has not read for %g s: its connection is closed.", self.limits.write_timeout_s)
        self._stop_clock()
        self._held.clear()
        super().connection_lost(exc)
        # uvicorn ends only the last one, which may not have begun.
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        self._wire.lost.set()

    def pause_writing(self) -> None:
        self._wire.is_full = True
        super().pause_writing()

    def resume_writing(self) -> None:
        self._wire.is_full = False
        super().resume_writing()
        self._go_on()

    # ---- one request after another ----

    @property
    def _is_answering(self) -> bool:
        """A complete request is not answered yet, or an answer does not fit into the socket."""
        num = len(self._unanswered)
        return self.flow.write_paused or num > 1 or (num == 1 and not self.cycle.more_body)

    def data_received(self, data: bytes) -> None:
        if self._num_discarded is not None:
            self._num_discarded += len(data)
            if self._num_discarded > MAX_DISCARDED:
                self.transport.abort()
        elif self._held:
            self._hold(data)
        else:
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        for first in range(0, len(data), PARSED_BYTES):
            if self._is_answering:
                self._hold(data[first:])
            elif self._num_discarded is None and not self.transport.is_closing():
                self._parse_part(data[first : first + PARSED_BYTES])
                continue
            return

    def _hold(self, data: bytes) -> None:
        self._stop_clock()
        self._held += data
        self.flow.has_enough = len(self._held) > MAX_HELD
        if self.flow.has_enough:
            self.flow.pause_reading()

    def _go_on(self) -> None:
        """Parse what was held, if the requests before it are answered."""
        if self._is_answering or self.transport.is_closing():
            return
        if self._refusal is not None:
            self._refuse(*self._refusal)
        elif self._held:
            data = bytes(self._held)
            self._held.clear()
            self.flow.has_enough = False
            self._parse(data)
            self.flow.resume_reading()
        if self._has_ended and not self._unanswered:
            self.transport.close()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()
        self._go_on()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """A client that ends its side still gets its answers."""
        self._has_ended = self._is_answering
        if self._has_ended:
            self.loop.call_later(PROBE_S, self._probe)
        return self._has_ended or None  # None: the connection is closed

    def _probe(self) -> None:
        """Write to a client that has ended its side, which shows whether it is gone."""
        if not self._unanswered or self.transport.is_closing():
            return
        cycle = self._unanswered[0]
        if cycle.response_started:
            pass  # what follows of the answer shows it
        elif cycle.scope["http_version"] == "1.0":
            self.transport.abort()  # it has no interim replies
        else:
            self.transport.write(INTERIM)
        self.loop.call_later(PROBE_S, self._probe)

    # ---- heads ----

    def _parse_part(self, data: bytes) -> None:
        if self._in_head and self._deadline is None:
            self._start_clock(self.limits.read_timeout_s)  # the next request on a kept-alive connection
        self._num_overhead += len(data)
        super().data_received(data)
        if self._num_overhead > self.limits.max_header_bytes and self._num_discarded is None:
            self._refusal = self._head_too_large()
            self.send_400_response("")

    def on_headers_complete(self) -> None:
        self._num_overhead, self._in_head = 0, False
        self._stop_clock()
        self._refusal = self._fault()
        if self._refusal is not None:
            raise ValueError  # uvicorn then calls send_400_response
        self.scope["state"][WIRE] = self._wire
        super().on_headers_complete()
        self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._num_overhead = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._num_overhead, self._in_head = 0, True

    def _fault(self) -> tuple[int, str] | None:
        """The status and the reason if a complete head is refused."""
        size = len(self.url) + sum(len(name) + len(value) + FIELD_BYTES for name, value in self.headers)
        if size > self.limits.max_header_bytes:
            return self._head_too_large()
        hosts = [value.decode("latin-1").lower() for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and self.parser.get_http_version() != "1.0"):
            return 400, "A request must have the header Host, once."
        if any(value.strip().lower() != b"chunked" for name, value in self.headers if name == b"transfer-encoding"):
            return 501, "The only Transfer-Encoding that is supported is chunked."
        if not self.url.startswith(b"/"):  # as if this were a proxy
            uri = urlsplit(self.url.decode("latin-1"))
            if uri.scheme not in ("http", "https") or hosts != [uri.netloc.lower()]:
                return 400, "The request's URI and its header Host must name the same host."
        return None

    def _head_too_large(self) -> tuple[int, str]:
        return 431, f"The head of a request may have at most {self.limits.max_header_bytes} bytes."

    def _unsupported_upgrade_warning(self) -> None:
        """It is answered as if it had not asked."""

    def send_400_response(self, msg: str) -> None:
        """Refuse what arrived, after the answers to complete requests before it. What still arrives is discarded: if
        the connection were closed while the client is sending, the client would see a reset and never the reply."""
        self._refusal = self._refusal or (400, msg)
        self._num_discarded = 0
        if not self._unanswered or (len(self._unanswered) == 1 and self.cycle.more_body):
            self._refuse(*self._refusal)

    def _refuse(self, status: int, text: str) -> None:
        self._refusal = None
        for cycle in self._unanswered:  # one whose body was not complete
            if cycle.response_started:
                self.transport.close()
                return
            cycle.disconnected = True
            cycle.message_event.set()
        self._unanswered.clear()
        head = "content-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
        line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
        self.transport.write(f"{line}{head}content-length: {len(text)}\r\n\r\n{text}".encode("ascii"))
        self.transport.write_eof()
        self._start_clock(DISCARD_S)

    def _start_clock(self, seconds: float) -> None:
        self._stop_clock()
        self._deadline = self.loop.call_later(seconds, self.transport.abort)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def bounded_protocol(limits: RequestLimits) -> type[HttpToolsProtocol]:
    """A protocol class with these limits."""
    return type("LimitedProtocol", (BoundedProtocol,), {"limits": limits})
