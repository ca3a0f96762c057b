"""``microscale serve`` as a user types it, with the real engine on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import openai
import pytest

PATIENCE_S = 120


@pytest.mark.nightly
def test_serve_the_tiny_model(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "microscale", "serve", "gpt-oss-tiny", "--load-format", "dummy"]
    command += ["--device", "cpu", "--port", "0", "--max-model-len", "512", "--served-model-name", "demo"]
    with log.open("w") as errors:
        # Next to other tests, torch's threads would only compete for the cores.
        process = subprocess.Popen(command, stdout=errors, stderr=errors, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        client = openai.OpenAI(base_url=f"{address(log)}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
        assert "curl http" in log.read_text()
        assert "weights are random" in log.read_text()
        assert "experts" in log.read_text()  # the plan

        def ask() -> str:
            reply = client.completions.create(model="demo", prompt="Hello", max_tokens=8, temperature=0)
            assert reply.usage is not None
            assert reply.usage.completion_tokens == 8
            return reply.choices[0].text

        assert ask() == ask()
        with client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "Hi"}], max_tokens=200, stream=True
        ) as stream:
            assert next(iter(stream)).choices[0].delta.role == "assistant"
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()


def address(log: Path) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = re.search(r"Serving .* at (http://\S+)", log.read_text())
        if found:
            return found.group(1)
        time.sleep(0.1)
    raise AssertionError(log.read_text())
