"""Adds to uvicorn's connection: limits on heads, on waiting requests and on unread answers, a fast path for events, and
a way to abort.

A connection that has an unanswered request or an unread answer parses nothing more: further requests wait unparsed, and
after ``MAX_HELD`` bytes of them it is not read.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from http import HTTPStatus
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import urlsplit

from starlette.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from microscale.server.options import RequestLimits

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

log = logging.getLogger(__name__)
WIRE = "microscale.wire"
"""The key of a request's ``Wire`` in ``scope["state"]``."""
PARSED_BYTES = 2048
"""How much is parsed at once: the parser starts every request that is in it."""
MAX_HELD = 64 * 1024
"""Bytes of further requests that are read while one is answered. Only a connection that is read notices its end."""
WRITE_BUFFER_BYTES = 1024
"""Unsent bytes after which a client counts as not reading. The kernel's buffer comes before them."""
READING = ("GET", "HEAD")
"""Methods whose answer costs nothing."""
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
        self.lost = asyncio.Event()
        """The connection has ended, and the server underneath knows it."""

    @property
    def is_closing(self) -> bool:
        """Nothing more can be written."""
        return self._transport.is_closing()

    @property
    def writable(self) -> bool:
        return not self.is_full and not self.is_closing

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


class _Flow(FlowControl):
    """Reading stays paused while enough waits to be parsed."""

    has_enough = False

    def resume_reading(self) -> None:
        if not self.has_enough:
            super().resume_reading()


class BoundedProtocol(HttpToolsProtocol):
    """A connection. uvicorn makes the instances of a class that ``bounded_protocol`` gives."""

    limits: ClassVar[RequestLimits]
    _head_bytes = 0
    """Bytes of the head that arrived before its end."""
    _in_head = True
    _passed = False
    """Whether the last data ended a head or a body."""
    _refusal: tuple[int, str] | None = None
    """Why the head is refused."""
    _num_discarded: int | None = None
    """Bytes that arrived after a refusal; ``None`` before one."""
    _late_refusal: str | None = None
    """Why a request is refused behind others that are not answered yet."""
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    """Ends a connection whose client does not read."""
    _has_ended = False
    """The client has ended its side, and still gets its answers."""
    _wire: Wire
    flow: _Flow

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        self.flow = _Flow(transport)
        self._held = bytearray()
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._wire = Wire(transport)
        self._deadline = self.loop.call_later(self.limits.read_timeout_s, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        self._stop_waiting()
        self._held.clear()
        super().connection_lost(exc)
        # uvicorn ends only the last one, which may not have begun.
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        self._wire.lost.set()

    # ---- a client that does not read ----

    def pause_writing(self) -> None:
        self._wire.is_full = True
        super().pause_writing()
        self._unread = self.loop.call_later(self.limits.write_timeout_s, self._hang_up)

    def resume_writing(self) -> None:
        self._wire.is_full = False
        self._stop_waiting()
        super().resume_writing()
        self._go_on()

    def _hang_up(self) -> None:
        log.warning("A client has not read for %g s: its connection is closed.", self.limits.write_timeout_s)
        self.transport.abort()

    def _stop_waiting(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        if self._unread is None:  # the last bytes of an answer may be unread too
            self._unread = self.loop.call_later(self.limits.write_timeout_s, self.transport.abort)

    # ---- a client that sends ahead ----

    @property
    def _is_answering(self) -> bool:
        """A complete request is not answered yet, or an answer is not read."""
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
        if self._late_refusal is not None:
            self.send_400_response(self._late_refusal)
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
        """A client that ends its side still gets answers that cost nothing. It may also be gone, which looks the
        same: a request that computes is aborted."""
        computes = any(cycle.scope["method"] not in READING for cycle in self._unanswered)
        self._has_ended = self._is_answering and not computes and not self._held
        return self._has_ended or None

    # ---- heads ----

    def _parse_part(self, data: bytes) -> None:
        if self._in_head and self._deadline is None:
            # The next request on a kept-alive connection.
            self._deadline = self.loop.call_later(self.limits.read_timeout_s, self.transport.abort)
        self._passed = False
        super().data_received(data)
        # Counted afterwards: the data that ends the head may also begin the body.
        if self._in_head and not self._passed and self._num_discarded is None:
            self._head_bytes += len(data)
            if self._head_bytes > self.limits.max_header_bytes and not self.transport.is_closing():
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
        self._unanswered.append(self.cycle)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._head_bytes, self._in_head, self._passed = 0, True, True

    def _fault(self) -> tuple[int, str] | None:
        """The status and the reason if a complete head is refused."""
        size = len(self.url) + sum(len(name) + len(value) + FIELD_BYTES for name, value in self.headers)
        if size > self.limits.max_header_bytes:
            return self._head_too_large()
        if not any(name == b"host" for name, _ in self.headers) and self.parser.get_http_version() == "1.1":
            return 400, "A request of HTTP/1.1 must have the header Host."
        if any(value.strip().lower() != b"chunked" for name, value in self.headers if name == b"transfer-encoding"):
            return 501, "The only Transfer-Encoding that is supported is chunked."
        if not self.url.startswith(b"/") and self._names_other_host():
            return 400, "The request's URI and its header Host must name the same host."
        return None

    def _names_other_host(self) -> bool:
        """Whether an absolute URI is for another host, as if this were a proxy."""
        uri = urlsplit(self.url.decode("latin-1"))
        hosts = [value.decode("latin-1").lower() for name, value in self.headers if name == b"host"]
        return uri.scheme not in ("http", "https") or hosts != [uri.netloc.lower()]

    def _unsupported_upgrade_warning(self) -> None:
        """It is answered as if it had not asked."""

    def _head_too_large(self) -> tuple[int, str]:
        self._refusal = 431, f"The head of a request may have at most {self.limits.max_header_bytes} bytes."
        return self._refusal

    def send_400_response(self, msg: str) -> None:
        """Refuse the request. What still arrives is discarded: if the connection were closed while the client is
        sending, the client would see a reset and never the reply."""
        if self._unanswered and (len(self._unanswered) > 1 or not self.cycle.more_body):
            self._late_refusal, self._num_discarded = msg, 0
            return
        status, text = self._refusal or (400, msg)
        head = "content-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
        line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
        self.transport.write(f"{line}{head}content-length: {len(text)}\r\n\r\n{text}".encode("ascii"))
        self._num_discarded = 0
        self._stop_clock()
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write_eof()
        else:
            self.transport.close()  # a reply has begun already, and is cut off
        self._deadline = self.loop.call_later(DISCARD_S, self.transport.abort)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def bounded_protocol(limits: RequestLimits) -> type[HttpToolsProtocol]:
    """A protocol class with these limits."""
    return type("LimitedProtocol", (BoundedProtocol,), {"limits": limits})
