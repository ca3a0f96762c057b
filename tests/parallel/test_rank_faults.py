"""A rank that dies, is stopped, is too slow or disagrees ends the engine, with one sentence that says which and why.

Real processes, from the owner's client to the rank. What else ``Watch`` hears is in ``test_watch``, in which ranks
compute nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from microscale.engine.client.client import EngineClient
from microscale.engine.config import EngineConfig
from microscale.engine.ranks.watch import Patience
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.errors import EngineDied, MicroscaleError
from support.ranks import Run, odd_command, ranks, run_engine

DEMO = EngineConfig("demo", device="cpu", tensor_parallel_size=2)
FOREVER = SamplingParams(4000, ignore_eos=True)
"""Longer than any test: what ends it is the fault."""
PATIENT_S = 250.0
"""A machine that is busy with other things is no fault. What is promised is seconds."""


def rank_of(engine: int) -> int:
    """The process of rank 1: a child of the engine's that runs ``microscale.engine.ranks``."""
    for task in Path(f"/proc/{engine}/task").iterdir():
        for child in (task / "children").read_text().split():
            if "microscale.engine.ranks" in Path(f"/proc/{child}/cmdline").read_text():
                return int(child)
    raise AssertionError(f"process {engine} has no rank")


async def fault_of_served(strike: Callable[[int], None], streams: int) -> tuple[list[str], str, int, int]:
    """Serve so many requests, do something to rank 1 in their midst, and wait for the end: what each of the requests
    and the owner were told."""
    config = EngineConfig("demo", device="cpu", tensor_parallel_size=2, max_model_len=4096, max_num_seqs=4)
    async with asyncio.timeout(PATIENT_S), await EngineClient.start(config) as client:
        rank, engine = rank_of(client.pid), client.pid
        first, second = json.loads(client.ready.plan)["ranks"]  # what each holds, for whoever asks the server
        assert first["experts"] == second["experts"] > 0
        begun = [asyncio.Event() for _ in range(streams)]

        async def read(place: int) -> str:
            stream = await client.submit(Request(f"r{place}", (5, 6, 7 + place), FOREVER))
            try:
                async for _ in stream:
                    begun[place].set()
            except EngineDied as error:
                return str(error)
            return "it went on"

        reading = [asyncio.create_task(read(place)) for place in range(streams)]
        for each in begun:
            await each.wait()
        strike(rank)
        told = await asyncio.gather(*reading)
        ended = str(await client.wait_ended())
        return told, ended, rank, engine


def is_gone(pid: int) -> bool:
    """Nobody runs under this number, or what did waits to be reaped."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_killed_rank_ends_every_request() -> None:
    told, ended, rank, engine = asyncio.run(fault_of_served(lambda pid: os.kill(pid, signal.SIGKILL), streams=2))
    assert ended.endswith(f"Rank 1 (process {rank}) was killed by signal 9 (SIGKILL); the engine ends with it.")
    assert told == [ended, ended]
    assert is_gone(rank)
    assert is_gone(engine)


def test_a_stopped_rank_ends_an_idle_engine() -> None:
    _, ended, rank, engine = asyncio.run(fault_of_served(lambda pid: os.kill(pid, signal.SIGSTOP), streams=0))
    assert f"Rank 1 (process {rank}) has been stopped for" in ended
    assert is_gone(rank)
    assert is_gone(engine)


@pytest.mark.parametrize(
    ("oddity", "said"),
    [
        ("hang", "is too slow: sum"),
        ("other_checkpoint", "has another checkpoint than rank 0"),
    ],
)
def test_a_rank_that_does_not_do_what_the_others_do(oddity: str, said: str) -> None:
    run = Run([[5, 6, 7, 8], [100, 200, 300]], [FOREVER] * 2, pages=600)
    with (
        pytest.raises(MicroscaleError) as caught,
        ranks(DEMO, odd_command(oddity), Patience(waited_s=2.0)) as (model, team),
    ):
        run_engine(model, run, team)
    assert "Rank 1 (process" in str(caught.value)
    assert said in str(caught.value)
