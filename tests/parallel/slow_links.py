"""Two machines with a slow and lossy link between them: the tokens of one machine, or the promised error in time.

``make test-links``: each test starts a server on two machines, and waits for a link of 20 ms in every sum.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from microscale.engine.sampling_params import SamplingParams
from support.demo_prompts import demo_model
from support.ending import end
from support.ranks import Run, run_engine
from support.slow_link import NO_NFT, Link, lose_by_nftables, slow_link, why_not
from support.two_machines import Machine

MICROSCALE = (sys.executable, "-P", "-m", "microscale")
PORT = "8124"
PROMPT = [5, 6, 7, 8, 9, 10, 11, 300, 400, 500]
TOKENS = 8
DELAY_MS = 20.0
LOSE_EVERY = 100
PATIENT_S = 400.0
TOLD_WITHIN_S = 60.0
"""Of a link that is cut: 15 s are promised; this machine may be busy."""
LOST = re.compile(r"Rank 1 \(10\.213\.7\.2\) (has said nothing for|is gone).*; the engine ends with it\.")
REASON = why_not() if shutil.which("curl") else "needs curl"
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def curl(machine: Machine, max_tokens: int, *arguments: str, stream: bool = False) -> list[str]:
    asked = {"model": "microscale-demo", "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0}
    body = json.dumps(asked | {"stream": stream, "ignore_eos": True, "return_token_ids": True})
    url = f"http://127.0.0.1:{PORT}/v1/completions"
    return machine.command("curl", "-sSN", "-H", "Content-Type: application/json", *arguments, "-d", body, url)


@contextmanager
def served(
    tmp_path: Path, first: Machine, second: Machine
) -> Iterator[tuple[subprocess.Popen[bytes], subprocess.Popen[bytes], Path]]:
    """The embedded model on both machines. Gives their processes, and what the server says."""
    secret, log = tmp_path / "secret", tmp_path / "log"
    secret.write_text("a secret of some length")
    shared = ("--nnodes", "2", "--tensor-parallel-size", "2", "--master-addr", first.address, "--device", "cpu")
    command = (*MICROSCALE, "serve", "demo", *shared, "--rank-secret-file", str(secret))
    with log.open("wb") as said:
        server = subprocess.Popen(first.command(*command, "--port", PORT), stderr=said)
        other = subprocess.Popen(second.command(*command, "--node-rank", "1"), stderr=said)
        try:
            yield server, other, log
        finally:
            for process in (server, other):
                end(process)


def answer(machine: Machine) -> list[int]:
    """The tokens of a request; it waits for the server to come."""
    ready = ("--retry", "400", "--retry-delay", "1", "--retry-all-errors", "--retry-max-time", str(int(PATIENT_S) - 40))
    told = subprocess.run(
        curl(machine, TOKENS, *ready), capture_output=True, text=True, timeout=PATIENT_S, check=True
    ).stdout
    found: list[int] = json.loads(told)["choices"][0]["token_ids"]
    return found


def check_link(link: Link, *, lossy: bool) -> None:
    """It was as slow and as lossy as it was meant to be."""
    for way in link.report():
        assert way["arrived"] > 100
        assert way["least_delay_ms"] >= DELAY_MS
        assert (way["lost"] > 0) == lossy


@pytest.mark.parametrize("lose_every", [0, LOSE_EVERY], ids=["20 ms", "20 ms and 1 % lost"])
def test_a_slow_link_changes_no_token(lose_every: int, tmp_path: Path) -> None:
    wanted, _ = run_engine(demo_model(), Run([PROMPT], [SamplingParams(TOKENS, ignore_eos=True)]))
    with slow_link(tmp_path, DELAY_MS, lose_every) as (first, second, link), served(tmp_path, first, second):
        assert answer(first) == wanted[0].tokens
        check_link(link, lossy=lose_every > 0)


@pytest.mark.skipif(NO_NFT is not None, reason=str(NO_NFT))
def test_loss_by_nftables_changes_no_token(tmp_path: Path) -> None:
    wanted, _ = run_engine(demo_model(), Run([PROMPT], [SamplingParams(TOKENS, ignore_eos=True)]))
    with slow_link(tmp_path, DELAY_MS) as (first, second, link), served(tmp_path, first, second):
        for machine in (first, second):
            lose_by_nftables(machine, LOSE_EVERY)
        assert answer(first) == wanted[0].tokens
        check_link(link, lossy=False)


def test_a_link_that_falls_silent_ends_the_engine_in_time(tmp_path: Path) -> None:
    """Unlike a cable that is pulled: no device goes down, packets just do not arrive."""
    with (
        slow_link(tmp_path, DELAY_MS, LOSE_EVERY) as (first, second, link),
        served(tmp_path, first, second) as (server, other, log),
    ):
        answer(first)
        stream = subprocess.Popen(
            curl(first, 3000, stream=True), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert stream.stdout is not None
        assert stream.stdout.readline().startswith("data: ")
        link.cut()
        cut = time.monotonic()
        rest = stream.stdout.read()
        assert LOST.search(rest)
        assert time.monotonic() - cut < TOLD_WITHIN_S
        stream.wait(PATIENT_S)
        assert server.wait(PATIENT_S) == 1
        other.wait(PATIENT_S)
        assert "Rank 0 has ended or cannot be reached any more" in log.read_text()
        assert LOST.search(log.read_text())
