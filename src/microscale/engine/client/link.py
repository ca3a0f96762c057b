"""A child process and the socket to it, as its owner holds them. It handles frames, not their contents.

While the model loads, frames are waited for one by one (``next_frame``). From then on they go to a function as they
arrive (``deliver_to``), with no task and no timer of their own between: there is one for every token.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections import deque
from collections.abc import Callable, Sequence
from typing import Self

from microscale.engine.client.launch import Child, take
from microscale.engine.protocol.frames import FrameReader
from microscale.errors import EngineDied

log = logging.getLogger(__name__)
EXIT_S = 1.0
"""How long a process may take to end after a hang-up before it is killed: twice what ``process`` allows itself."""
KILLED_S = 5.0
"""How long to wait for a killed process. A GPU's driver may keep it for ever."""


class _Frames(asyncio.Protocol):
    """The socket's end. Whatever breaks it, a nonsense frame or a mistake of who handles one, is reported once."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.unread: deque[bytes] = deque()
        self.deliver: Callable[[Sequence[bytes]], None] = self._keep
        self.broken: asyncio.Future[None] = loop.create_future()
        """Raises what was wrong, or ends when the other side is gone."""
        self.arrived = asyncio.Event()
        self.writable = asyncio.Event()
        self.writable.set()
        self.reader = FrameReader()

    def _keep(self, payloads: Sequence[bytes]) -> None:
        self.unread.extend(payloads)
        self.arrived.set()

    def data_received(self, data: bytes) -> None:
        if self.broken.done():
            return
        try:
            if payloads := self.reader.feed(data):
                self.deliver(payloads)
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        if not self.broken.done():
            self.broken.set_exception(error)
            self.broken.exception()  # it may be that nothing waits for it any more
        self.arrived.set()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.broken.done():
            self.broken.set_result(None)
        self.arrived.set()
        self.writable.set()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()


class EngineLink:
    """``open`` starts the process; ``close`` leaves none behind."""

    def __init__(self, child: Child, transport: asyncio.WriteTransport, frames: _Frames) -> None:
        self._child = child
        self._transport = transport
        self._frames = frames

    @classmethod
    async def open(cls, command: Sequence[str]) -> Self:
        """Start ``command``, or take the process that was started ahead."""
        try:
            child = take(command)
        except OSError as error:
            raise EngineDied(f"The engine process cannot be started: {error}.") from None
        try:
            loop = asyncio.get_running_loop()
            return cls(child, *await loop.create_unix_connection(_Frames, sock=child.sock))
        except BaseException:
            child.sock.close()  # upon which the process ends
            raise

    @property
    def pid(self) -> int:
        return self._child.pid

    def fault(self) -> str | None:
        """What the heartbeat says is wrong with the process now, as the beginning of a sentence."""
        return self._child.heartbeat.fault()

    def write(self, data: bytes) -> None:
        """Send, unless the connection has ended, which is reported elsewhere."""
        if not self._transport.is_closing():
            self._transport.write(data)

    async def flush(self) -> None:
        """Wait while the process does not read. A broken connection is reported elsewhere."""
        await self._frames.writable.wait()

    async def next_frame(self) -> bytes:
        """The next message. A cancelled wait loses none."""
        frames = self._frames
        while not frames.unread:
            if frames.broken.done():
                await self.wait_broken()
            frames.arrived.clear()
            await frames.arrived.wait()
        return frames.unread.popleft()

    def deliver_to(self, handle: Callable[[Sequence[bytes]], None]) -> None:
        """Pass messages to ``handle`` in batches from now on; what it raises breaks the connection."""
        frames = self._frames
        frames.deliver = handle
        try:
            handle(frames.unread)
        except Exception as error:
            frames.fail(error)
        frames.unread.clear()

    async def wait_broken(self) -> None:
        """Wait until nothing more will come, and raise why. The wait may be cancelled."""
        await asyncio.shield(self._frames.broken)
        raise EngineDied(await self._describe_end())

    async def _describe_end(self) -> str:
        """How the process ended that has closed its side."""
        if not await self._exited():
            return "The engine process closed its connection."
        status = self._child.status() or 0
        if status < 0:
            return f"The engine process was killed by {signal.Signals(-status).name}."
        return f"The engine process ended with status {status}; its log says why."

    async def close(self) -> None:
        """Close the connection, upon which the process ends; kill it if it does not."""
        self._transport.close()
        if await self._exited():
            return
        self.kill()
        if not await self._exited(KILLED_S):
            log.error("The engine process %d does not end although it was killed; its driver may hang.", self.pid)

    def kill(self) -> None:
        """End the process and all that it has started."""
        self._child.kill()

    async def _exited(self, within_s: float = EXIT_S) -> bool:
        try:
            async with asyncio.timeout(within_s):
                await self._child.wait()
        except TimeoutError:
            return False
        return True
