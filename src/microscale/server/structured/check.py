"""Compiles each grammar once before the engine sees it: in a process that can be killed, within a time limit.

The process starts with the first grammar. If one takes too long or too much memory, the process is killed, and the next
grammar starts another. Results are cached, good and bad, up to ``MAX_KNOWN``. That a grammar took too much is cached
for a minute only, since the machine may have been busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from microscale.engine.grammar import Vocabulary
from microscale.engine.protocol.frames import HEADER, frame
from microscale.engine.protocol.messages import error_of
from microscale.errors import BadRequest, MicroscaleError, QueueFull
from microscale.server.http.error_replies import BadField
from microscale.server.structured.worker import Fault, Words

COMMAND = (sys.executable, "-P", "-m", "microscale.server.structured.worker")
MAX_KNOWN = 256
MAX_KNOWN_CHARS = 8 * 2**20
MAX_WAITING = 32
"""Requests that wait for the process; more are told to come again."""
FORGIVEN_S = 60.0
START_S = 60.0
"""How long the process may take to read the vocabulary."""


@dataclass(frozen=True)
class Part:
    """A grammar, and the field of the request that wants it."""

    grammar: str
    where: str


@dataclass(frozen=True)
class _Finding:
    fault: Fault | None
    until: float
    """When it is asked again."""


class GrammarChecker:
    """Asks one process, one request at a time."""

    def __init__(self, vocabulary: Vocabulary, within_s: float) -> None:
        self._vocabulary = vocabulary
        self._within_s = within_s
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._known: OrderedDict[str, _Finding] = OrderedDict()

    async def check(self, parts: Sequence[Part]) -> None:
        """Raise what is wrong with the first of ``parts`` that is; the last is the one that the engine will get."""
        whole = parts[-1].grammar
        if not self._knows(whole):
            if self._num_waiting >= MAX_WAITING:
                raise QueueFull(f"{MAX_WAITING} requests wait for their grammars already; try again later.")
            self._num_waiting += 1
            try:
                async with self._turn:
                    if not self._knows(whole):
                        self._remember(whole, await self._ask([part.grammar for part in parts]))
            finally:
                self._num_waiting -= 1
        self._known.move_to_end(whole)
        fault = self._known[whole].fault
        if fault is not None:
            error = error_of(fault.kind, fault.text)
            if not isinstance(error, BadRequest):
                raise error
            where = parts[min(fault.index, len(parts) - 1)].where
            raise BadField(f"{where}: {fault.text}", where)

    async def close(self) -> None:
        process = self._process
        self._kill()
        if process is not None:
            await process.wait()

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process = None

    def _knows(self, whole: str) -> bool:
        found = self._known.get(whole)
        return found is not None and time.monotonic() < found.until

    def _remember(self, whole: str, found: _Finding) -> None:
        self._known[whole] = found
        while len(self._known) > MAX_KNOWN or sum(map(len, self._known)) > MAX_KNOWN_CHARS:
            # Never the newest: it is asked for next.
            self._known.popitem(last=False)

    async def _ask(self, grammars: Sequence[str]) -> _Finding:
        try:
            process = self._process
            if process is None or process.returncode is not None:
                process = await self._start()
            async with asyncio.timeout(self._within_s):
                return _Finding(await _exchange(process, msgspec.msgpack.encode(grammars)), math.inf)
        except TimeoutError:
            return self._too_much(f"It takes more than {self._within_s:g} s to compile; make it simpler.")
        except (asyncio.IncompleteReadError, ConnectionError):
            return self._too_much("It takes too much memory to compile; make it simpler.")
        except BaseException:
            # The client left while its grammar was tried: the answer must not be taken for the next one's.
            self._kill()
            raise

    def _too_much(self, text: str) -> _Finding:
        self._kill()
        # Of the whole: which part it was, nobody can say.
        return _Finding(Fault(sys.maxsize, BadRequest.__name__, text), time.monotonic() + FORGIVEN_S)

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Ctrl-C is the server's to hear; the process ends when its input does.
            start_new_session=True,
        )
        self._process = process
        known = self._vocabulary
        words = Words(tuple(known.tokens), tuple(known.control), known.split)
        try:
            async with asyncio.timeout(START_S):
                fault = await _exchange(process, msgspec.msgpack.encode(words))
        except TimeoutError:
            raise MicroscaleError(f"The process that tries grammars did not start in {START_S:g} s.") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise MicroscaleError("The process that tries grammars did not start.") from None
        if fault is not None:
            raise error_of(fault.kind, fault.text)
        return process


async def _exchange(process: asyncio.subprocess.Process, payload: bytes) -> Fault | None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(frame(payload))
    await process.stdin.drain()
    size = int.from_bytes(await process.stdout.readexactly(HEADER), "big")
    return msgspec.msgpack.decode(await process.stdout.readexactly(size), type=Fault | None)
