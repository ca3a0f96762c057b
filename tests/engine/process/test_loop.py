"""When the engine process waits, and when it does something ahead."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from microscale.engine.process.connection import OwnerGone
from microscale.engine.process.loop import QUIET_S, Loop
from microscale.engine.protocol.heartbeat import Heartbeat
from microscale.engine.protocol.messages import GetStats


class Script:
    """A connection that tells what each turn waited for, and hears what it was given. And a service without work."""

    has_work = False
    step_limit_s = 1.0

    def __init__(self, heard: list[list[object]], ahead: int) -> None:
        self.waits: list[float | None] = []
        self.ahead = ahead
        self.done: list[int] = []
        """The turns after which something was done ahead."""
        self._heard: Iterator[list[object]] = iter(heard)

    def messages(self, wait_s: float | None) -> list[object]:
        self.waits.append(wait_s)
        try:
            return next(self._heard)
        except StopIteration:
            raise OwnerGone from None

    def send(self, message: object) -> None: ...

    def stats(self) -> None: ...

    def before_compiling(self, report: object) -> None: ...

    def idle(self) -> bool:
        self.done.append(len(self.waits))
        return len(self.done) < self.ahead


def turns(heard: list[list[object]], ahead: int) -> Script:
    script: Any = Script(heard, ahead)
    with pytest.raises(OwnerGone):
        Loop(script, script, 1.0, Heartbeat.create()).run()
    return script  # type: ignore[no-any-return]


def test_nothing_is_done_ahead_before_it_is_quiet() -> None:
    asked: list[object] = [GetStats()]
    script = turns([asked, asked, [], [], asked, [], []], ahead=4)
    assert script.done == [3, 4, 6, 7]
    assert script.waits == [QUIET_S, QUIET_S, QUIET_S, 0, 0, QUIET_S, 0, None]


def test_it_waits_where_there_is_nothing_to_do_ahead() -> None:
    script = turns([[], [GetStats()], []], ahead=1)
    assert (script.waits, script.done) == ([QUIET_S, None, None, None], [1])


def test_a_servers_steps_may_run_in_stand_ins() -> None:
    """A benchmark's do not: see ``Engine.prepare``."""
    code = """
from microscale.engine.config import EngineConfig
from microscale.engine.process.service import load
service = load(EngineConfig("gpt-oss-tiny", load_format="dummy", device="cpu"), lambda *_, **kinds: None)
print(service._engine._runner._graphs.stand_in, service.stats().graphs)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "0"]
