"""The client's socket, as the code that answers a request sees it. ``connection`` puts it into the request's state."""

from __future__ import annotations

import asyncio

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
