"""guidellm: a short benchmark over chat, completions and Responses; every request must be answered."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from checks import ADDRESS, KEY, MODEL, TOKENIZER, check, main, run, tool


def benchmark(route: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        backend = {"kind": "openai_http", "target": ADDRESS, "model": MODEL, "api_key": KEY, "request_format": route}
        command = [tool("guidellm"), "run", "--backend", json.dumps(backend)]
        command += ["--tokenizer", json.dumps({"kind": "hf_auto", "model": TOKENIZER})]
        command += ["--profile", json.dumps({"kind": "concurrent", "streams": [2]})]
        command += ["--constraint", json.dumps({"kind": "max_requests", "count": 6})]
        command += ["--data", json.dumps({"kind": "synthetic_text", "prompt_tokens": 64, "output_tokens": 16})]
        command += ["--output", json.dumps({"kind": "json", "path": str(report)}), "--disable-console"]
        told = run(command)
        assert report.exists(), told[-2000:]
        (done,) = json.loads(report.read_text())["benchmarks"]
        totals = done["metrics"]["request_totals"]
        assert totals["errored"] == 0, f"{totals} {told[-1500:]}"
        assert totals["successful"] == 6, totals
        assert done["metrics"]["output_token_count"]["successful"]["mean"] == 16


@check("chat completions")
def chat() -> None:
    benchmark("/v1/chat/completions")


@check("text completions")
def text() -> None:
    benchmark("/v1/completions")


@check("responses")
def responses() -> None:
    benchmark("/v1/responses")


main()
