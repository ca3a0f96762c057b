"""An engine process that is stopped or hangs: its owner notices, ends it in time, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from microscale.engine.client.client import EngineClient
from microscale.engine.client.launch import EngineProcess
from microscale.engine.config import EngineConfig
from microscale.engine.protocol import heartbeat
from microscale.engine.protocol.heartbeat import Heartbeat
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.errors import EngineDied

TESTS = Path(__file__).parents[2]
COUNTING = (sys.executable, "-m", "microscale.engine.process", "--factory", "support.counting_service:load")


@pytest.fixture(autouse=True)
def _children_find_support(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setattr(heartbeat, "STOPPED_S", 2.0)


async def counting(model: str = "") -> EngineClient:
    return await EngineClient.start(EngineConfig(model), EngineProcess(COUNTING))


def endless() -> Request:
    return Request("r", (1,), SamplingParams(max_tokens=10**6))


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_stopped_process_is_noticed(is_busy: bool) -> None:
    async def whole() -> None:
        client = await counting()
        stream = await client.submit(endless()) if is_busy else None
        os.kill(client.pid, signal.SIGSTOP)
        assert "was stopped for" in str(await client.wait_ended())
        if stream is not None:
            with pytest.raises(EngineDied, match="was stopped for"):
                [output async for output in stream]
        await client.close()
        assert is_gone(client.pid)

    asyncio.run(asyncio.wait_for(whole(), 30))


def test_an_owner_that_was_stopped_itself_kills_nothing() -> None:
    """As when a whole container is paused: what it finds first is an old heartbeat."""

    async def whole() -> None:
        client = await counting()
        os.kill(client.pid, signal.SIGSTOP)
        time.sleep(3.0)  # the loop of this process stands still too
        os.kill(client.pid, signal.SIGCONT)
        await asyncio.sleep(2.5)
        assert client.why_ended is None
        await client.close()

    asyncio.run(asyncio.wait_for(whole(), 30))


def test_a_stopped_process_is_drained_by_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "STOPPED_S", 1000.0)

    async def whole() -> None:
        client = await counting()
        os.kill(client.pid, signal.SIGSTOP)
        with pytest.raises(EngineDied, match="did not drain, and was killed"):
            await client.drain(0.5)
        assert is_gone(client.pid)

    asyncio.run(asyncio.wait_for(whole(), 30))


OWNER = """
import asyncio, sys
from microscale.engine.client.client import EngineClient
from microscale.engine.client.launch import EngineProcess
from microscale.engine.config import EngineConfig

async def main():
    client = await EngineClient.start(EngineConfig(""), EngineProcess(tuple(sys.argv[1:])))
    print(client.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_stopped_process_ends_with_its_owner() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, *COUNTING], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        owner.kill()
    deadline = time.monotonic() + 10
    try:
        while not has_ended(pid):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def has_ended(pid: int) -> bool:
    """Whether it is gone, or only waits for its new parent to read its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_step_has_its_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Heartbeat.create()
    assert page.fault() is None
    page.begin(1000.0)
    assert page.fault() is None
    page.begin(0.0)
    assert "takes longer than 0 s" in (page.fault() or "")
    page.end()
    assert page.fault() is None
    page.close_file()
