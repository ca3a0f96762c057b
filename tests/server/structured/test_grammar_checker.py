"""The process that tries grammars: slow ones, its death, clients that leave, and what is remembered."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from microscale.engine.grammar import Vocabulary
from microscale.errors import QueueFull
from microscale.server.error_texts import BadField
from microscale.server.structured import grammar_checker
from microscale.server.structured.grammar_checker import GrammarChecker, GrammarPart

BYTES = Vocabulary([*(bytes([byte]) for byte in range(256)), b"<|stop|>"], [256])
GOOD = GrammarPart('start: "a" <|stop|>', "good")
SLOW = GrammarPart('start: %json {"type": "integer", "multipleOf": 999983} <|stop|>', "slow")


def pid(checker: GrammarChecker) -> int:
    assert checker._process is not None
    return checker._process.pid


async def fault(checker: GrammarChecker, *parts: GrammarPart) -> tuple[str, str]:
    with pytest.raises(BadField) as caught:
        await checker.check(parts)
    return str(caught.value), caught.value.param or ""


async def live_and_die(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = GrammarChecker(BYTES, within_s=10)
    await checker.check([GOOD])
    first = pid(checker)
    # The part that is wrong is named, and what is known is not asked again.
    text, where = await fault(checker, GrammarPart("start: x", "one"), GrammarPart("start: y", "two"))
    assert ('"x"' in text, where) == (True, "one")
    os.kill(first, signal.SIGSTOP)
    async with asyncio.timeout(5):
        await checker.check([GOOD])
        await fault(checker, GrammarPart("start: x", "one"), GrammarPart("start: y", "two"))
    os.kill(first, signal.SIGCONT)
    # One that was killed while it had nothing to do is nobody's fault.
    os.kill(first, signal.SIGKILL)
    assert checker._process is not None
    await checker._process.wait()
    await checker.check([GrammarPart('start: "b" <|stop|>', "")])
    assert pid(checker) != first
    # A client that leaves in the midst of it does not leave its answer to the next.
    leaving = asyncio.create_task(checker.check([SLOW]))
    await asyncio.sleep(0.1)
    leaving.cancel()
    await asyncio.wait((leaving,))
    await checker.check([GrammarPart('start: "c" <|stop|>', "")])
    # What takes too long is ended, remembered for a while, and does not hold up the next.
    second = pid(checker)
    checker._within_s = 0.2
    for _ in range(2):
        text, where = await fault(checker, SLOW)
        assert ("0.2 s" in text, where) == (True, "slow")
    checker._within_s = 10
    await checker.check([GrammarPart('start: "d" <|stop|>', "")])
    assert pid(checker) != second
    # The line before the process is short.
    monkeypatch.setattr(grammar_checker, "MAX_WAITING", 1)
    waiting = asyncio.create_task(checker.check([GrammarPart('start: "e" <|stop|>', "")]))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await checker.check([GrammarPart('start: "f" <|stop|>', "")])
    await waiting
    monkeypatch.setattr(grammar_checker, "MAX_KNOWN", 2)
    await checker.check([GrammarPart('start: "g" <|stop|>', "")])
    assert len(checker._known) == 2
    await checker.close()


def test_the_life_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(live_and_die(monkeypatch))
