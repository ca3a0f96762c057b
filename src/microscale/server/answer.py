"""A response that is computed while it is sent, and cancelled when its client leaves.

    Answer ── work(exchange) ──► JSON at once, or events as they come
       └───── receive() ───────► the client is gone: the work is cancelled, which aborts its requests in the engine

Errors raised on purpose become a status before the answer has begun and an event after. Each request gets one log line.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from microscale.errors import MicroscaleError
from microscale.server.host import Host
from microscale.server.http.connection import owner_of
from microscale.server.http.exchange import Exchange, Record
from microscale.server.http.faults import code_of
from microscale.server.http.request_id import request_id_of

log = logging.getLogger(__name__)
GONE = 499
"""What the log says of a client that left; no status is sent to it."""


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
