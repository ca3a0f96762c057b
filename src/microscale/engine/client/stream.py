"""The outputs of one request on their way from the engine process to their reader.

The engine never waits for a reader. What a slow one has not read lies here, at most ``max_tokens`` outputs, and
``take`` gives all of it together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from microscale.engine.output import Output
from microscale.errors import MicroscaleError

Tap = Callable[[list[int]], int]
"""Takes tokens from the front; returns how many."""


@dataclass(eq=False)
class OpenRequest:
    """The client's record of a request. Only its reader has the ``Stream``."""

    key: str
    """Its id on the socket; ``request_id`` is the caller's."""
    request_id: str
    answered: asyncio.Future[None]
    outputs: deque[Output] = field(default_factory=deque)
    ended: bool = False
    error: MicroscaleError | None = None
    waiter: asyncio.Future[None] | None = None
    """Of the one who reads, while there is nothing to read."""
    tap: Tap | None = None
    """See ``Stream.tap``."""
    drafted: int = 0
    accepted: int = 0
    """Drafted tokens of all that was delivered, and those that were accepted."""

    def deliver(self, outputs: list[Output]) -> None:
        """Offer outputs to the tap; the reader gets the first that is not taken and all later."""
        for output in outputs:
            self.drafted += output.drafted
            self.accepted += output.accepted
        # Only while the reader waits: then it has read all before these.
        if self.tap is not None and self.waiter is not None and not self.waiter.done():
            tokens: list[int] = []
            for output in outputs:
                if output.token is None or output.finish is not None:
                    break
                tokens.append(output.token)
            try:
                outputs = outputs[self.tap(tokens) if tokens else 0 :]
            except Exception as error:  # the reader's own error must not break the connection
                self.tap = None
                self.waiter.set_exception(error)
                outputs = outputs[len(tokens) :]
        if outputs:
            self.put(outputs)

    def put(self, outputs: list[Output]) -> None:
        self.outputs += outputs
        self.ended = outputs[-1].finish is not None
        self._wake()

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def fail(self, error: MicroscaleError) -> None:
        self.ended, self.error = True, error
        self._wake()
        if not self.answered.done():
            self.answered.set_exception(error)


class Stream(AsyncIterator[Output]):
    """The outputs of one request, until one says why it ended. Raises ``EngineDied`` if the engine dies before. Their
    ``request_id`` is the client's own key.

    A wait that is cancelled loses nothing. ``aclose``, leaving ``async with``, or letting the stream go, aborts.
    """

    def __init__(self, request: OpenRequest, abort: Callable[[OpenRequest], None]) -> None:
        self._request = request
        self._abort = abort
        self._loop = asyncio.get_running_loop()

    async def __anext__(self) -> Output:
        await self._wait()
        if not self._request.outputs:
            raise StopAsyncIteration
        return self._request.outputs.popleft()

    async def take(self) -> list[Output]:
        """All that has come since the last time, at least one; none when the request has ended."""
        await self._wait()
        outputs = list(self._request.outputs)
        self._request.outputs.clear()
        return outputs

    def tap(self, take: Tap) -> None:
        """Offer tokens to ``take`` first, as they arrive, while the reader waits for one.

        Those that it takes (it returns how many) do not go through the reader's task, and the reader never sees them.
        Outputs that end the request are never offered. Log-probabilities are lost to a reader that taps.
        """
        self._request.tap = take

    @property
    def drafts(self) -> tuple[int, int]:
        """Tokens that were drafted for the request so far, and those of them that were accepted."""
        return self._request.drafted, self._request.accepted

    async def _wait(self) -> None:
        request = self._request
        while not request.outputs and not request.ended:
            request.waiter = self._loop.create_future()
            await request.waiter
        if not request.outputs and request.error is not None:
            raise request.error

    def close(self) -> None:
        """Abort, if it still runs."""
        if not self._request.ended:
            self._abort(self._request)

    async def aclose(self) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._request.ended and not self._loop.is_closed():
            # Any thread may collect this; the abort is the loop's to send.
            self._loop.call_soon_threadsafe(self._abort, self._request)
