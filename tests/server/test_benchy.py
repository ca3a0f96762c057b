"""llama-benchy, as its users run it, against the tiny model: its decode speed is the server's own.

It has an environment of its own, which ``make test`` makes: it needs a package that hides Python's ``asyncio``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from microscale.text.byte_tokenizer import byte_tokenizer
from support.serve_command import PATIENCE_S, serving

PYTHON = Path(__file__).parents[2] / ".venv-benchy" / "bin" / "python"
TOKENS = 256
BOOK = "http://book.invalid/book.txt"
"""Never asked: its text is already where llama-benchy keeps what it has fetched."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    arguments = ["gpt-oss-tiny", "--load-format", "dummy", "--served-model-name", "demo"]
    with serving(arguments, tmp_path / "log") as address:
        yield address


def own_speed(log: Path) -> float:
    """Tokens a second after the first, as the server's log tells of the last request; the one before warmed it up."""
    line = log.read_text().rpartition("route=/v1/chat/completions status=200")[2]
    found = re.search(rf"completion_tokens={TOKENS} .*first_token_ms=([\d.]+) total_ms=([\d.]+)", line)
    assert found, line
    first, total = map(float, found.groups())
    return (TOKENS - 1) * 1e3 / (total - first)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="there is no .venv-benchy; `make test` makes it")
def test_reported_speed_is_the_servers_own(server: str, tmp_path: Path) -> None:
    cache = tmp_path / ".cache" / "llama-benchy"
    cache.mkdir(parents=True)
    (cache / f"{hashlib.md5(BOOK.encode()).hexdigest()}.txt").write_text("It was a dark and stormy night. " * 200)
    tokenizer = tmp_path / "tokenizer.json"
    byte_tokenizer()._inner.save(str(tokenizer))
    result = tmp_path / "result.json"
    command = [str(PYTHON), "-m", "llama_benchy", "--base-url", f"{server}/v1", "--model", "demo"]
    command += ["--tokenizer", str(tokenizer), "--book-url", BOOK, "--pp", "64", "--tg", str(TOKENS), "--exact-tg"]
    # Random weights know no capital of France.
    command += ["--runs", "1", "--no-cache", "--skip-coherence", "--format", "json", "--save-result", str(result)]
    done = subprocess.run(
        command,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads(result.read_text())["benchmarks"][0]
    assert run["tg_throughput"]["mean"] == pytest.approx(own_speed(tmp_path / "log"), rel=0.03)
    print(f"llama-benchy {run['tg_throughput']['mean']:.1f} tok/s, the server {own_speed(tmp_path / 'log'):.1f}")
    # Prefill is timed by the first chunk: it must not come before the first token.
    assert 0 < run["pp_throughput"]["mean"] < 100_000
