"""The owner's side of the engine process: start it, submit requests, read their outputs.

One ``EngineClient`` belongs to one asyncio loop. Whatever happens to the process (it exits, is killed, hangs, speaks
nonsense), every open request raises ``EngineDied`` at once and so does every later call, and the process is made to
end. ``wait_ended`` reports it to the owner, which exits or starts another.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from microscale.engine.client.launch import EngineProcess
from microscale.engine.client.link import EngineLink
from microscale.engine.client.stream import OpenRequest, Stream
from microscale.engine.config import EngineConfig
from microscale.engine.output import Output, Stats
from microscale.engine.protocol.frames import HEADER
from microscale.engine.protocol.heartbeat import BEAT_S
from microscale.engine.protocol.messages import (
    VERSION,
    Abort,
    Accepted,
    Drain,
    Drained,
    Failed,
    FromEngine,
    GetStats,
    Hello,
    LoadEngine,
    Loading,
    Ready,
    Refused,
    StatsReply,
    Submit,
    ToEngine,
    Tokens,
    check_hello,
    decode_for_engine,
    decode_for_owner,
    encode,
)
from microscale.engine.request import Finish, Request
from microscale.errors import BadMessage, BadRequest, BadSetting, EngineDied, MicroscaleError

log = logging.getLogger(__name__)
DRAINED_S = 1.0
"""How long a process may take, after the deadline of a drain, to abort what is left."""


class EngineClient:
    """``async with await EngineClient.start(config) as engine: …``"""

    def __init__(self, link: EngineLink) -> None:
        self.ready: Ready
        """Of the loaded model; ``start`` sets it."""
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._by_key: dict[str, OpenRequest] = {}
        self._by_id: dict[str, OpenRequest] = {}
        self._stats: deque[asyncio.Future[Stats]] = deque()
        self._next_number = 0
        self._watching: asyncio.Task[None] | None = None
        self._drained: asyncio.Future[int] = self._loop.create_future()
        self._ended: asyncio.Future[EngineDied] = self._loop.create_future()
        """Why the engine takes no more requests."""

    # ---- beginning and end -------------------------------------------------------------------------------------------

    @classmethod
    async def start(cls, config: EngineConfig, launch: EngineProcess | None = None) -> Self:
        """Start a process and wait until its model is loaded. What its load raises is raised here, in its own class."""
        launch = EngineProcess() if launch is None else launch
        load = checked(LoadEngine(config), BadSetting)
        client = cls(await EngineLink.open(launch.command))
        try:
            async with asyncio.timeout(launch.load_timeout_s):
                client._link.write(encode(Hello(VERSION)) + load)
                client.ready = await wait_ready(client._link, launch)
        except TimeoutError:
            error: BaseException = EngineDied(f"The engine has not loaded its model in {launch.load_timeout_s:g} s.")
        except BadMessage as caught:
            error = EngineDied(f"The engine process sent an invalid message: {caught}")
        except BaseException as caught:
            error = caught
        else:
            client._link.deliver_to(client._take)
            client._watching = asyncio.create_task(client._watch())
            return client
        await client._stop(EngineDied("The engine did not start."))
        raise error

    @property
    def pid(self) -> int:
        return self._link.pid

    @property
    def why_ended(self) -> EngineDied | None:
        """Why the engine takes no more requests; ``None`` while it does."""
        return self._end() if self._ended.done() else None

    async def drain(self, deadline_s: float) -> int:
        """Let open requests finish within ``deadline_s`` and the process end; how many had to be aborted. A process
        that does not answer is killed."""
        self._ask(Drain(deadline_s))
        done, _ = await asyncio.wait(
            (self._drained, self._ended), timeout=deadline_s + DRAINED_S, return_when=asyncio.FIRST_COMPLETED
        )
        if self._drained not in done:
            await self._stop(EngineDied("The engine process did not drain, and was killed."))
            raise self._end()
        await self.close()
        return self._drained.result()

    async def close(self) -> None:
        """End the process now; open requests raise ``EngineDied``. May be called again."""
        await self._stop(EngineDied("The engine was closed."))

    async def wait_ended(self) -> EngineDied:
        """Wait until the engine has ended, however, and say why: then its owner exits, or starts another."""
        return await asyncio.shield(self._ended)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _stop(self, end: EngineDied) -> None:
        """Fail what is open, then see the process end."""
        self._fail_all(end)
        if self._watching is not None and self._watching is not asyncio.current_task():
            self._watching.cancel()
            await asyncio.wait((self._watching,))
        await self._link.close()

    def _fail_all(self, end: EngineDied) -> None:
        """Nothing is waited for any more; the first reason stays the reason."""
        if self._ended.done():
            return
        self._ended.set_result(end)
        for request in self._by_key.values():
            request.fail(self._end())
        for answer in self._stats:
            if not answer.done():
                answer.set_exception(self._end())
        self._by_key.clear()
        self._by_id.clear()
        self._stats.clear()

    def _end(self) -> EngineDied:
        """A new error each time: one that is raised twice would gather the tracebacks of both."""
        return EngineDied(str(self._ended.result()))

    # ---- requests ---------------------------------------------------------------------------------------------------

    async def submit(self, request: Request) -> Stream:
        """The request's outputs, once the engine has taken it; else raises why it was refused."""
        if request.request_id in self._by_id:
            raise BadRequest(f"Request {request.request_id!r} is already here; request ids are given once.")
        self._next_number += 1
        # A key of our own, never used twice: a request id can be used again at once after an abort.
        key = str(self._next_number)
        message = Submit(key, tuple(request.prompt), request.params, request.priority, request.cache_salt)
        data = checked(message, BadRequest)
        self._check_alive()
        opened = OpenRequest(key, request.request_id, self._loop.create_future())
        stream = Stream(opened, self._forget)
        self._link.write(data)
        self._by_key[opened.key] = self._by_id[opened.request_id] = opened
        try:
            await self._link.flush()
            await opened.answered
        except BaseException:
            stream.close()
            raise
        return stream

    async def abort(self, request_id: str) -> bool:
        """End a request; its stream says ``Finish.ABORT`` at once. Whether it was open."""
        self._check_alive()
        request = self._by_id.get(request_id)
        if request is not None:
            self._forget(request)
        return request is not None

    def _forget(self, request: OpenRequest) -> None:
        """Abort without waiting. Harmless when the request or the engine has ended already."""
        if self._by_key.get(request.key) is request:
            self._drop(request)
            self._ask(Abort(request.key))
            if not request.answered.done():
                request.answered.set_result(None)  # its answer will come too late
            request.put([Output(request.request_id, None, finish=Finish.ABORT)])

    async def stats(self) -> Stats:
        self._ask(GetStats())
        answer: asyncio.Future[Stats] = self._loop.create_future()
        self._stats.append(answer)
        return await answer

    def _ask(self, message: ToEngine) -> None:
        self._check_alive()
        self._link.write(encode(message))

    def _check_alive(self) -> None:
        if self._ended.done():
            raise self._end()

    def _drop(self, request: OpenRequest) -> None:
        del self._by_key[request.key], self._by_id[request.request_id]

    # ---- what comes back ---------------------------------------------------------------------------------------------

    def _take(self, payloads: Sequence[bytes]) -> None:
        """Handle messages of the engine. What this raises breaks the connection, which ends ``_watch``.

        If this process is behind, there are several; a request's tokens are delivered together.
        """
        outputs: dict[str, list[Output]] = {}
        try:
            for payload in payloads:
                message = decode_for_owner(payload)
                if isinstance(message, Tokens):  # before all others: thousands a second
                    for output in message.outputs:
                        outputs.setdefault(output.request_id, []).append(output)
                else:
                    self._deliver(outputs)
                    self._handle(message)
        finally:
            self._deliver(outputs)

    def _deliver(self, outputs: dict[str, list[Output]]) -> None:
        """Deliver what came for each request, and clear it."""
        for key, arrived in outputs.items():
            request = self._by_key.get(key)
            if request is None:
                continue  # aborted while this was on its way
            if arrived[-1].finish is not None:
                self._drop(request)
            request.deliver(arrived)
        outputs.clear()

    async def _watch(self) -> None:
        """Wait until the engine ends, speaks nonsense, is stopped or hangs, and see to it that it has ended."""
        has_fault = False
        try:
            while True:
                try:
                    async with asyncio.timeout(BEAT_S):
                        await self._link.wait_broken()
                except TimeoutError:
                    # Twice: if this process was stopped too, the other one gets a second to go on.
                    has_fault = self._check_heartbeat(kill=has_fault)
        except BadMessage as error:
            self._link.kill()
            end = EngineDied(f"The engine process sent an invalid message and was killed: {error}")
        except EngineDied as error:
            end = error
        except Exception as error:  # a bug of ours must not leave any request waiting either
            log.exception("Reading from the engine process failed.")
            end = EngineDied(f"A message of the engine process could not be handled: {type(error).__name__}: {error}")
        await self._stop(end)

    def _check_heartbeat(self, *, kill: bool) -> bool:
        fault = self._link.fault()
        if fault is not None and kill:
            self._link.kill()
            raise EngineDied(f"{fault}; it was killed.")
        return fault is not None

    def _handle(self, message: FromEngine) -> None:
        match message:
            case Accepted(key):
                if (request := self._by_key.get(key)) and not request.answered.done():
                    request.answered.set_result(None)
            case Refused(key, error):
                if request := self._by_key.get(key):
                    self._drop(request)
                    request.fail(error)
            case StatsReply(stats):
                if not self._stats:
                    raise BadMessage("It sent statistics that were not requested.")
                answer = self._stats.popleft()
                if not answer.done():
                    answer.set_result(stats)
            case Drained(num_aborted):
                self._drained.set_result(num_aborted)
                self._fail_all(EngineDied("The engine has drained and ended."))
            case Failed(error):
                raise EngineDied(f"The engine process failed: {error}")
            case Ready() | Loading():
                raise BadMessage(f"It sent {type(message).__name__} a second time.")


def checked(message: Submit | LoadEngine, error: type[MicroscaleError]) -> bytes:
    """A message that the engine process will be able to read: it is read here first. 10 us for 1000 tokens."""
    try:
        data = encode(message)
        decode_for_engine(data[HEADER:])
    except (BadMessage, TypeError, OverflowError) as caught:
        raise error(f"The engine cannot accept this: {caught}") from None
    return data


async def wait_ready(link: EngineLink, launch: EngineProcess) -> Ready:
    """Wait until the model is loaded; raises what its load raised, in its own class."""
    check_hello(await link.next_frame())
    while True:
        match decode_for_owner(await link.next_frame()):
            case Loading(done, total, kernels):
                (launch.on_kernels if kernels else launch.on_progress)(done, total)
            case Ready() as ready:
                return ready
            case Failed(error):
                raise error
            case other:
                raise BadMessage(f"The engine process sent {type(other).__name__} before it was ready.")
