"""Compiles each grammar before the engine sees it: in a process that can be killed, within a time limit.

The process starts with the first grammar. If a grammar takes too long or too much memory, the process is killed, and
the next grammar starts another. Results are cached, good and bad, up to ``MAX_KNOWN``. A timeout is cached for only a
minute, since the machine may have been busy.
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
from microscale.errors import BadRequest
from microscale.server import error_texts
from microscale.server.structured.grammar_worker import GrammarError, WorkerVocabulary

COMMAND = (sys.executable, "-P", "-m", "microscale.server.structured.grammar_worker")
MAX_KNOWN = 256
MAX_KNOWN_CHARS = 8 * 2**20
MAX_WAITING = 32
"""Requests that may wait for the process. Further requests get HTTP 429."""
TIMEOUT_CACHED_S = 60.0
START_S = 60.0
"""How long the process may take to start and read the vocabulary."""


@dataclass(frozen=True)
class GrammarPart:
    """A grammar, and the field of the request that it comes from."""

    grammar: str
    where: str


@dataclass(frozen=True)
class _CheckResult:
    error: GrammarError | None
    until: float
    """When it expires."""


class GrammarChecker:
    """Compiles grammars in one worker process, one request at a time."""

    def __init__(self, vocabulary: Vocabulary, within_s: float) -> None:
        self._vocabulary = vocabulary
        self._within_s = within_s
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._known: OrderedDict[str, _CheckResult] = OrderedDict()

    async def check(self, parts: Sequence[GrammarPart]) -> None:
        """Raise the error of the first bad grammar in ``parts``. The last one is what the engine will get."""
        whole = parts[-1].grammar
        if not self._is_known(whole):
            if self._num_waiting >= MAX_WAITING:
                raise error_texts.grammar_queue_full(MAX_WAITING)
            self._num_waiting += 1
            try:
                async with self._turn:
                    if not self._is_known(whole):
                        self._remember(whole, await self._compile([part.grammar for part in parts]))
            finally:
                self._num_waiting -= 1
        self._known.move_to_end(whole)
        result = self._known[whole].error
        if result is not None:
            error = error_of(result.kind, result.text)
            if not isinstance(error, BadRequest):
                raise error
            raise error_texts.grammar_rejected(parts[min(result.index, len(parts) - 1)].where, result.text)

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

    def _is_known(self, whole: str) -> bool:
        result = self._known.get(whole)
        return result is not None and time.monotonic() < result.until

    def _remember(self, whole: str, result: _CheckResult) -> None:
        self._known[whole] = result
        while len(self._known) > MAX_KNOWN or sum(map(len, self._known)) > MAX_KNOWN_CHARS:
            # Never the newest, which is read next.
            self._known.popitem(last=False)

    async def _compile(self, grammars: Sequence[str]) -> _CheckResult:
        try:
            process = self._process
            if process is None or process.returncode is not None:
                process = await self._start()
            async with asyncio.timeout(self._within_s):
                return _CheckResult(await _exchange(process, msgspec.msgpack.encode(grammars)), math.inf)
        except TimeoutError:
            return self._too_much(f"Compiling the grammar takes more than {self._within_s:g} s; simplify it.")
        except (asyncio.IncompleteReadError, ConnectionError):
            return self._too_much("Compiling the grammar takes too much memory; simplify it.")
        except BaseException:
            # The client disconnected: the worker's reply must not be taken for the next request's.
            self._kill()
            raise

    def _too_much(self, text: str) -> _CheckResult:
        self._kill()
        # The index of the whole grammar: which part was too much is unknown.
        return _CheckResult(GrammarError(sys.maxsize, BadRequest.__name__, text), time.monotonic() + TIMEOUT_CACHED_S)

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Only the server handles Ctrl-C; the process ends when its input does.
            start_new_session=True,
        )
        self._process = process
        vocabulary = self._vocabulary
        message = WorkerVocabulary(tuple(vocabulary.tokens), tuple(vocabulary.control), vocabulary.split)
        try:
            async with asyncio.timeout(START_S):
                error = await _exchange(process, msgspec.msgpack.encode(message))
        except TimeoutError:
            raise error_texts.grammar_worker_failed(f" within {START_S:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise error_texts.grammar_worker_failed() from None
        if error is not None:
            raise error_of(error.kind, error.text)
        return process


async def _exchange(process: asyncio.subprocess.Process, payload: bytes) -> GrammarError | None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(frame(payload))
    await process.stdin.drain()
    size = int.from_bytes(await process.stdout.readexactly(HEADER), "big")
    return msgspec.msgpack.decode(await process.stdout.readexactly(size), type=GrammarError | None)
