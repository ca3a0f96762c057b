"""aiperf: a profile over chat, completions and Responses; no request may fail."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from checks import ADDRESS, KEY, MODEL, TOKENIZER, check, main, run, tool


def profile(kind: str, *, counts: bool = True) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [tool("aiperf"), "profile", "--model", MODEL, "--url", ADDRESS, "--api-key", KEY]
        command += ["--endpoint-type", kind, "--streaming", "--tokenizer", TOKENIZER, "--concurrency", "2"]
        command += ["--request-count", "6", "--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16"]
        command += ["--extra-inputs", "ignore_eos:true", "--artifact-dir", folder, "--ui", "none"]
        command += ["--use-server-token-count"] * counts
        told = run(command, cwd=Path(folder), HOME=folder)
        reports = list(Path(folder).rglob("profile_export_aiperf.json"))
        assert reports, told[-2000:]
        report = json.loads(reports[0].read_text())
        assert report["request_count"]["avg"] == 6, report["request_count"]
        assert not report.get("error_summary"), report["error_summary"]
        length = report["output_sequence_length"]["avg"]
        assert length == 16 if counts else length > 0, length


@check("chat")
def chat() -> None:
    profile("chat")


@check("completions")
def completions() -> None:
    profile("completions")


@check("responses")
def responses() -> None:
    # An answer that ends at its limit ends with response.incomplete, whose usage aiperf does not read.
    profile("responses", counts=False)


main()
