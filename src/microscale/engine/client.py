"""The owner's side of the engine process: start it, submit requests, read their outputs.

One ``EngineClient`` belongs to one asyncio loop. Whatever happens to the process (it exits, is killed, hangs, speaks
nonsense), every open request raises ``EngineDied`` at once and so does every later call; the process is made to end.

The engine never waits for a reader. What a slow one has not read lies in its ``Stream``, at most ``max_tokens`` outputs,
and ``take`` gives all of it together.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Self

import msgspec

from microscale.engine.engine import Output, Stats
from microscale.engine.frames import FrameReader
from microscale.engine.messages import (
    VERSION,
    Abort,
    Accepted,
    Drain,
    Drained,
    EngineConfig,
    Failed,
    FromEngine,
    GetStats,
    Hello,
    Loading,
    Piece,
    Ready,
    Refused,
    Sampling,
    StatsReply,
    Submit,
    ToEngine,
    Tokens,
    check_hello,
    decode_for_engine,
    decode_for_owner,
    encode,
    error_of,
)
from microscale.engine.request import Finish, Request
from microscale.errors import BadMessage, BadRequest, EngineDied, MicroscaleError

CHUNK = 2**18
EXIT_S = 2.0
"""How long a process that has nothing left to do may take to end before it is killed."""


@dataclass(frozen=True)
class Launch:
    """How the process is started, and how long it may be silent."""

    command: tuple[str, ...] = (sys.executable, "-P", "-m", "microscale.engine.process")
    """``-P``: a file of the current directory never stands in for a module."""
    load_timeout_s: float = 1800.0
    silence_s: float = 300.0
    """An engine with work that tells of no step for so long is taken for hung. A first step may compile kernels."""
    on_progress: Callable[[int, int], None] = lambda done, total: None
    """Hears how many layers of all are loaded."""


@dataclass(eq=False)
class _Open:
    """What the client holds of a request. Its ``Stream`` is the reader's alone: one that is let go aborts."""

    number: int
    request_id: str
    answered: asyncio.Future[None]
    outputs: deque[Output] = field(default_factory=deque)
    ended: bool = False
    error: MicroscaleError | None = None
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, output: Output) -> None:
        self.outputs.append(output)
        self.ended = output.finish is not None
        self.arrived.set()

    def fail(self, error: MicroscaleError) -> None:
        self.ended, self.error = True, error
        self.arrived.set()
        if not self.answered.done():
            self.answered.set_exception(error)


class Stream(AsyncIterator[Output]):
    """The outputs of one request, until one says why it ended. Raises ``EngineDied`` if the engine dies before.

    A wait that is cancelled loses nothing. ``aclose``, leaving ``async with``, or letting the stream go, aborts.
    """

    def __init__(self, client: EngineClient, request: _Open) -> None:
        self._client = client
        self._request = request

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

    async def _wait(self) -> None:
        request = self._request
        while not request.outputs and not request.ended:
            request.arrived.clear()
            await request.arrived.wait()
        if not request.outputs and request.error is not None:
            raise request.error

    def close(self) -> None:
        """Abort, if it still runs."""
        if not self._request.ended:
            self._client.forget(self._request)

    async def aclose(self) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class EngineClient:
    """``async with await EngineClient.start(config) as engine: …``"""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.ready: Ready
        """Of the loaded model; set by ``start``."""
        self._process = process
        self._reader = reader
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._frames = FrameReader()
        self._by_number: dict[int, _Open] = {}
        self._by_id: dict[str, _Open] = {}
        self._stats: deque[asyncio.Future[Stats]] = deque()
        self._next_number = 0
        self._end: MicroscaleError | None = None
        """Why nothing more can be asked of the engine."""
        self._ended: asyncio.Future[MicroscaleError] = self._loop.create_future()
        self._drained: asyncio.Future[int] = self._loop.create_future()
        self._reading: asyncio.Task[None] | None = None
        self._silence_s = 0.0

    # ---- beginning and end -------------------------------------------------------------------------------------------

    @classmethod
    async def start(cls, config: EngineConfig, launch: Launch | None = None) -> Self:
        """Start a process and wait until its model is loaded. What goes wrong there is raised here, in its own class."""
        launch = Launch() if launch is None else launch
        hello, load = encode(Hello(VERSION)), _checked(config)
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *launch.command,
                "--fd",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # what a library prints is no answer of ours
                start_new_session=True,  # Ctrl-C is for the owner, who then drains
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        client = cls(process, reader, writer)
        try:
            async with asyncio.timeout(launch.load_timeout_s):
                writer.write(hello + load)
                client.ready = await client._wait_ready(launch)
        except TimeoutError:
            await client._stop(
                EngineDied(f"The engine process has not loaded the model in {launch.load_timeout_s:g} s.")
            )
            raise client._dead() from None
        except BaseException as error:
            await client._stop(error if isinstance(error, MicroscaleError) else EngineDied("The start was given up."))
            raise
        client._silence_s = launch.silence_s
        client._reading = asyncio.create_task(client._read_all())
        return client

    async def _wait_ready(self, launch: Launch) -> Ready:
        check_hello(await self._frame())
        while True:
            match decode_for_owner(await self._frame()):
                case Loading(done, total):
                    launch.on_progress(done, total)
                case Ready() as ready:
                    return ready
                case Failed(kind, text):
                    raise error_of(kind, text)
                case other:
                    raise BadMessage(f"The engine process said {type(other).__name__} before it was ready.")

    async def _frame(self) -> bytes:
        """One message of the start: what comes before the engine is asked anything comes one by one."""
        try:
            size = await self._reader.readexactly(4)
            (payload,) = self._frames.feed(size + await self._reader.readexactly(int.from_bytes(size, "big")))
        except (asyncio.IncompleteReadError, OSError):
            raise EngineDied(await self._epitaph()) from None
        return payload

    async def drain(self, deadline_s: float) -> int:
        """Let open requests finish within ``deadline_s`` and the process end; how many had to be aborted."""
        self._check_alive()
        self._write(Drain(deadline_s))
        try:
            async with asyncio.timeout(deadline_s + self._silence_s):
                num_aborted = await asyncio.shield(self._drained)
        except TimeoutError:
            await self._stop(EngineDied("The engine process did not drain, and was killed."))
            raise self._dead() from None
        await self.close()
        return num_aborted

    async def close(self) -> None:
        """End the process now; open requests raise ``EngineDied``. May be called again."""
        await self._stop(EngineDied("The engine was closed."))

    async def wait_ended(self) -> MicroscaleError:
        """Wait until the engine has ended, however, and say why: then its owner exits, or starts another."""
        return await asyncio.shield(self._ended)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---- what can be asked -------------------------------------------------------------------------------------------

    async def submit(self, request: Request) -> Stream:
        """The request's outputs, once the engine has taken it; else raises why it was refused."""
        self._check_alive()
        if request.request_id in self._by_id:
            raise BadRequest(f"Request {request.request_id!r} is already here; request ids are given once.")
        self._next_number += 1
        data = _checked(
            Submit(
                self._next_number,
                request.request_id,
                tuple(request.prompt),
                Sampling(**_fields(request)),
                request.priority,
                request.cache_salt,
            )
        )
        opened = _Open(self._next_number, request.request_id, self._loop.create_future())
        self._by_number[opened.number] = self._by_id[opened.request_id] = opened
        stream = Stream(self, opened)
        self._writer.write(data)
        # A cancelled wait lets the stream go, which aborts.
        await self._flush()
        await opened.answered
        return stream

    async def abort(self, request_id: str) -> bool:
        """End a request; its stream says ``Finish.ABORT`` at once. Whether it was open."""
        self._check_alive()
        request = self._by_id.get(request_id)
        if request is None:
            return False
        self.forget(request)
        return True

    def forget(self, request: _Open) -> None:
        """Abort without waiting. Harmless when the request or the engine has ended already."""
        if self._by_number.get(request.number) is not request:
            return
        self._close(request)
        self._write(Abort(request.number))
        request.put(Output(request.request_id, None, finish=Finish.ABORT))

    async def stats(self) -> Stats:
        self._check_alive()
        answer: asyncio.Future[Stats] = self._loop.create_future()
        self._stats.append(answer)
        self._write(GetStats())
        return await answer

    def _write(self, message: ToEngine) -> None:
        if self._end is None:
            self._writer.write(encode(message))

    async def _flush(self) -> None:
        # A connection that breaks here ends all requests in ``_read_all``, this one among them.
        with contextlib.suppress(OSError):
            await self._writer.drain()

    def _check_alive(self) -> None:
        if self._end is not None:
            raise self._dead()

    def _dead(self) -> EngineDied:
        """A new error each time: one that is raised twice gathers the tracebacks of both."""
        return EngineDied(str(self._end))

    def _close(self, request: _Open) -> None:
        del self._by_number[request.number], self._by_id[request.request_id]

    # ---- what comes back ---------------------------------------------------------------------------------------------

    async def _read_all(self) -> None:
        """Read until the engine ends, and see to it that it has."""
        try:
            while True:
                async with asyncio.timeout(self._silence_s):
                    data = await self._reader.read(CHUNK)
                if not data:
                    end = EngineDied(await self._epitaph())
                    break
                for payload in self._frames.feed(data):
                    self._handle(decode_for_owner(payload))
        except TimeoutError:
            ...
