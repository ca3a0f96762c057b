"""aider: one change to a file from its command line, on the scripted engine."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from checks import KEY, SCRIPTED_ADDRESS, SCRIPTED_MODEL, check, main, run, tool


def change(*arguments: str) -> str:
    """What greeting.txt holds after aider was asked to change it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "greeting.txt").write_text("hello\n")
        subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
        command = [
            tool("aider"),
            "--model",
            f"openai/{SCRIPTED_MODEL}",
            "--yes-always",
            "--no-git",
            "--edit-format",
            "whole",
        ]
        command += ["--no-show-model-warnings", "--no-check-update", "--no-analytics", "--map-tokens", "0"]
        command += ["--message", "Change the greeting to good morning", *arguments, "greeting.txt"]
        told = run(command, cwd=folder, HOME=name, OPENAI_API_BASE=f"{SCRIPTED_ADDRESS}/v1", OPENAI_API_KEY=KEY)
        assert (folder / "greeting.txt").read_text() == "good morning\n", told
        return told


@check("a change to a file, streamed")
def streamed() -> None:
    change()


@check("a change to a file, not streamed")
def whole() -> None:
    change("--no-stream")


main()
