"""A child process and the socket to it, as its owner holds them. Knows frames, not what they say."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections import deque
from collections.abc import Sequence
from typing import Self

from microscale.engine.frames import FrameReader
from microscale.errors import EngineDied

CHUNK = 2**18
EXIT_S = 1.0
"""How long a process may take to end after a hang-up before it is killed: twice what ``process`` allows itself."""


class Link:
    """``open`` starts the process; ``close`` leaves none behind."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._frames = FrameReader()
        self._unread: deque[bytes] = deque()

    @classmethod
    async def open(cls, command: Sequence[str]) -> Self:
        """Run ``command --fd N`` with one end of a socket pair as file N: nobody else can connect."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    "--fd",
                    str(theirs.fileno()),
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=2,  # what a library prints there is no answer of ours
                    start_new_session=True,  # Ctrl-C is for the owner, who then drains
                )
            return cls(process, *await asyncio.open_unix_connection(sock=ours))
        except OSError as error:
            ours.close()
            raise EngineDied(f"The engine process cannot be started: {error}.") from None
        except BaseException:
            ours.close()  # upon which a process that was started ends
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def flush(self) -> None:
        """Wait while the process does not read. A connection that is broken is for ``next_frame`` to tell."""
        with contextlib.suppress(OSError):
            await self._writer.drain()

    async def next_frame(self) -> bytes:
        """The next message. A cancelled wait loses none."""
        while not self._unread:
            try:
                data = await self._reader.read(CHUNK)
            except OSError:
                data = b""
            if not data:
                raise EngineDied(await self._epitaph())
            self._unread.extend(self._frames.feed(data))
        return self._unread.popleft()

    async def _epitaph(self) -> str:
        """How the process ended that has closed its side."""
        if not await self._exited():
            return "The engine process hung up."
        status = self._process.returncode or 0
        if status < 0:
            return f"The engine process was killed by {signal.Signals(-status).name}."
        return f"The engine process ended with status {status}; its log says why."

    async def close(self) -> None:
        """Hang up, upon which the process ends; kill it if it does not."""
        self._writer.close()
        if not await self._exited():
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """End the process and all that it has started: it leads a session of its own."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _exited(self) -> bool:
        try:
            async with asyncio.timeout(EXIT_S):
                await self._process.wait()
        except TimeoutError:
            return False
        return True
