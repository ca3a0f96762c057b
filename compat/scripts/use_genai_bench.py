"""genai-bench: text to text over chat, two at a time; no request may fail."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from checks import ADDRESS, KEY, MODEL, TOKENIZER, check, main, run, tool


@check("text-to-text over chat")
def benchmark() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [tool("genai-bench"), "benchmark", "--api-backend", "openai", "--api-base", ADDRESS, "--api-key", KEY]
        command += ["--api-model-name", MODEL, "--model", MODEL, "--model-tokenizer", TOKENIZER]
        command += ["--task", "text-to-text", "--num-concurrency", "2", "--traffic-scenario", "D(64,16)"]
        command += ["--max-time-per-run", "1", "--max-requests-per-run", "6", "--experiment-base-dir", folder]
        command += ["--additional-request-params", json.dumps({"ignore_eos": True}), "--log-dir", folder]
        told = run(command, cwd=Path(folder), HOME=folder, HF_HUB_OFFLINE="1")
        reports = list(Path(folder).rglob("D64_16_*.json"))
        assert reports, told[-2000:]
        metrics = json.loads(reports[0].read_text())["aggregated_metrics"]
        assert metrics["num_error_requests"] == 0, metrics
        assert metrics["num_completed_requests"] >= 6, metrics


main()
