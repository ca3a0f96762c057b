"""``microscale serve`` as a user types it, with the real engine on the CPU."""

from __future__ import annotations

import asyncio
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
    command += ["--max-queue", "100"]
    with log.open("w") as errors:
        # Beside other tests torch's threads would only fight for the cores.
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
        asyncio.run(ask_many(client))
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()


async def ask_many(like: openai.OpenAI) -> None:
    """200 streams at once: each is served, with the tokens that it gets alone, or refused with 429."""
    client = openai.AsyncOpenAI(base_url=like.base_url, api_key="none", max_retries=0, timeout=PATIENCE_S)

    async def ask(number: int) -> str | None:
        try:
            stream = await client.completions.create(
                model="demo", prompt=f"client {number:03d}", max_tokens=12, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])
        except openai.RateLimitError:
            return None

    alone = [await ask(number) for number in range(8)]
    together = await asyncio.gather(*map(ask, range(200)))
    assert None not in alone
    assert sum(text is not None for text in together) >= 100
    assert all(text in (None, wanted) for text, wanted in zip(together, alone, strict=False))


def address(log: Path) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = re.search(r"Serving .* at (http://\S+)", log.read_text())
        if found:
            return found.group(1)
        time.sleep(0.1)
    raise AssertionError(log.read_text())
