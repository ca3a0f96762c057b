"""A model on two machines: one address, the tokens of one machine, and a cable that is pulled in mid-stream."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from microscale.engine.sampling_params import SamplingParams
from support.demo_prompts import demo_model
from support.ending import end
from support.ranks import Run, run_engine
from support.two_machines import Machine, two_machines, why_not

MICROSCALE = (sys.executable, "-P", "-m", "microscale")
PORT = "8123"
URL = f"http://127.0.0.1:{PORT}/v1/completions"
PROMPT = [5, 6, 7, 8, 9, 10, 11, 300, 400, 500]
PATIENT_S = 240.0
# It falls silent, or the system gives up what was sent to it: whichever is first.
LOST = re.compile(r"Rank 1 \(10\.213\.7\.2\) (has said nothing for|is gone).*; the engine ends with it\.")
REASON = why_not() if shutil.which("curl") else "needs curl"


def body(max_tokens: int, *, stream: bool = False) -> str:
    asked = {"model": "microscale-demo", "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0}
    return json.dumps(asked | {"stream": stream, "ignore_eos": True, "return_token_ids": True})


def curl(machine: Machine, *arguments: str) -> list[str]:
    return machine.command("curl", "-sSN", "-H", "Content-Type: application/json", *arguments, URL)


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_two_machines_serve_one_model(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of some length")
    log = tmp_path / "log"
    wanted, _ = run_engine(demo_model(), Run([PROMPT], [SamplingParams(8, ignore_eos=True)]))
    with two_machines() as (first, second), log.open("w") as said:
        shared = ("--nnodes", "2", "--tensor-parallel-size", "2", "--master-addr", first.address, "--device", "cpu")
        command = (*MICROSCALE, "serve", "demo", *shared, "--rank-secret-file", str(secret))
        server = subprocess.Popen(first.command(*command, "--port", PORT), stderr=said)
        other = subprocess.Popen(second.command(*command, "--node-rank", "1"), stderr=subprocess.PIPE, text=True)
        try:
            # curl waits for the server to come.
            ready = ("--retry", "400", "--retry-delay", "1", "--retry-all-errors", "--retry-max-time", "240")
            told = subprocess.run(
                curl(first, *ready, "-d", body(8)), capture_output=True, text=True, timeout=PATIENT_S, check=True
            )
            assert json.loads(told.stdout)["choices"][0]["token_ids"] == wanted[0].tokens
            stream = subprocess.Popen(
                curl(first, "-d", body(3000, stream=True)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            assert stream.stdout is not None
            assert stream.stdout.readline().startswith("data: ")
            second.pull_cable()
            rest = stream.stdout.read()
            assert LOST.search(rest)
            stream.wait(PATIENT_S)
            assert server.wait(PATIENT_S) == 1
            _, words = other.communicate(timeout=PATIENT_S)
            assert "Rank 0 has ended or cannot be reached any more" in words
        finally:
            for process in (server, other):
                end(process)
    assert LOST.search(log.read_text())
