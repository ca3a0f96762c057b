"""A replica: one engine, and the application of ``microscale serve`` without a socket.

Imports nothing of Ray: Ray makes the object, calls ``answer`` and ``check_health``, and ``__del__`` at the end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress

from starlette.types import Message

from microscale.integrations.ray_serve_options import RayOptions
from microscale.integrations.ray_serve_request import ReplyHead, RoutedRequest
from microscale.server.app import make_app
from microscale.server.run import open_host

log = logging.getLogger(__name__)
UNGATHERED = 3
"""Pieces that are sent immediately: the head, the event that begins a stream, its first token."""
OURS, RAYS = "microscale", "ray.serve"
"""Loggers. Ray writes only its own to a replica's log file."""


class Replica:
    """Answers requests that the front has read. Unhealthy as soon as its engine has ended."""

    async def __init__(self, options: RayOptions) -> None:  # type: ignore[misc]
        log_with_ray()
        self._messages_per_s = options.messages_per_s
        self._stack = AsyncExitStack()
        self._host = await self._stack.enter_async_context(open_host(options.serve_options()))
        self._app = make_app(self._host)
        self._watching = asyncio.create_task(self._watch())

    async def answer(self, routed: RoutedRequest) -> AsyncIterator[ReplyHead | bytes]:
        """Head and body, in pieces as they come. Closing the iterator aborts the request."""
        client = _Client(routed.body)
        work = asyncio.create_task(self._app(routed.scope, client.receive, client.send))
        work.add_done_callback(lambda _: client.end())
        try:
            num_sent = 0
            while (piece := await client.next_piece()) is not None:
                yield piece
                num_sent += 1
                if num_sent >= UNGATHERED:
                    await client.gather(self._host.num_open / self._messages_per_s)
            await work
        finally:
            if not work.done():
                work.cancel()
                await asyncio.wait((work,))

    async def check_health(self) -> None:
        """Ray calls this every second or so, and replaces a replica after three errors in a row."""
        self._host.check_open()

    async def _watch(self) -> None:
        """Open requests get their error from the engine's client, new ones from the application."""
        self._host.closing = await self._host.engine.wait_ended()
        log.error("The engine has ended, and Ray will replace this replica: %s", self._host.closing)

    async def __del__(self) -> None:
        """Ray awaits this when all requests have ended, or their time is up."""
        if hasattr(self, "_watching"):
            self._watching.cancel()
            await self._stack.aclose()


def log_with_ray() -> None:
    """Write our log, with a line per request, to where Ray logs for this process."""
    ours = logging.getLogger(OURS)
    ours.setLevel(logging.INFO)
    ours.propagate = False
    ours.handlers = list(logging.getLogger(RAYS).handlers)


class _Client:
    """The application's client: the request's body, and the pieces of the answer."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._pieces: list[ReplyHead | bytes] = []
        self._ended = asyncio.Event()
        self._news = asyncio.Event()

    async def receive(self) -> Message:
        if self._body is None:
            await asyncio.Future()  # a client that disconnects cancels the work instead
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._pieces.append(ReplyHead(message["status"], list(message["headers"])))
        elif message.get("body"):
            self._pieces.append(message["body"])
        self._news.set()

    def end(self) -> None:
        self._ended.set()
        self._news.set()

    async def gather(self, seconds: float) -> None:
        """Let tokens accumulate, unless the answer has ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()

    async def next_piece(self) -> ReplyHead | bytes | None:
        """The head, or all bytes that wait: a message between processes costs more than a token's event."""
        while not self._pieces:
            if self._ended.is_set():
                return None
            self._news.clear()
            await self._news.wait()
        first = self._pieces.pop(0)
        if isinstance(first, ReplyHead):
            return first
        rest = [piece for piece in self._pieces if isinstance(piece, bytes)]
        self._pieces.clear()
        return b"".join((first, *rest))
