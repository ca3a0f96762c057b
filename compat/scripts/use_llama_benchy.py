"""llama-benchy: prefill and decode at one depth, with its own check that answers make sense."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

from checks import KEY, MODEL, TOKENIZER, V1, check, main, run, tool

BOOK = "http://book.invalid/book.txt"
"""Never asked: its text is already where llama-benchy keeps what it has fetched."""


@check("prefill, decode and context, streamed")
def benchmark() -> None:
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / ".cache" / "llama-benchy"
        cache.mkdir(parents=True)
        (cache / f"{hashlib.md5(BOOK.encode()).hexdigest()}.txt").write_text("It was a dark and stormy night. " * 400)
        result = Path(folder) / "result.json"
        command = [tool("llama-benchy"), "--base-url", V1, "--api-key", KEY, "--model", MODEL, "--tokenizer", TOKENIZER]
        command += ["--book-url", BOOK, "--pp", "64", "--tg", "32", "--depth", "0", "128", "--exact-tg", "--runs", "1"]
        command += ["--concurrency", "2", "--format", "json", "--save-result", str(result)]
        run(command, HOME=folder, HF_HUB_OFFLINE="1")
        runs = json.loads(result.read_text())["benchmarks"]
        assert len(runs) == 2, runs
        for one in runs:
            assert one["tg_throughput"]["mean"] > 0, one


main()
