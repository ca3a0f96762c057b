"""Codex CLI: whole turns of ``codex exec`` over Responses, each with a call, its output and an answer."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from checks import KEY, SCRIPTED_ADDRESS, SCRIPTED_MODEL, check, main, run

BINARY = Path(os.environ["MICROSCALE_ENV"]) / "node_modules" / ".bin" / "codex"
CONFIG = """
model = "{model}"
model_provider = "microscale"
[model_providers.microscale]
name = "Microscale"
base_url = "{address}/v1"
env_key = "MICROSCALE_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


def turn(prompt: str, model: str, folder: Path, *arguments: str) -> str:
    """One turn in an empty folder with a file, without anything of the user's own."""
    home = folder / "home"
    work = folder / "work"
    home.mkdir()
    work.mkdir()
    (home / "config.toml").write_text(CONFIG.format(model=model, address=SCRIPTED_ADDRESS))
    (work / "first-file.txt").write_text("one\n")
    command = [str(BINARY), "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return run([*command, *arguments, prompt], cwd=work, CODEX_HOME=str(home), HOME=str(home), MICROSCALE_KEY=KEY)


@check("codex exec: a shell call, its output, an answer")
def shell() -> None:
    with tempfile.TemporaryDirectory() as folder:
        told = turn("List the files of this folder", SCRIPTED_MODEL, Path(folder))
        assert "There is one file: first-file.txt." in told, told
        assert "ERROR" not in told, told


@check("codex exec --json: the events of a turn")
def events() -> None:
    with tempfile.TemporaryDirectory() as folder:
        told = turn("List the files of this folder", SCRIPTED_MODEL, Path(folder), "--json")
        for kind in ("turn.started", "command_execution", "agent_message", "turn.completed"):
            assert kind in told, told
        assert "turn.failed" not in told, told


@check("codex exec: a call of a custom tool (apply_patch), its output, an answer")
def patch() -> None:
    with tempfile.TemporaryDirectory() as folder:
        told = turn("Add a file by a patch", "gpt-5.5", Path(folder))
        assert (Path(folder) / "work" / "hello.txt").read_text() == "Hello from the patch.\n", told
        assert "The patch is in." in told, told


@check("codex exec: a call of a tool in a namespace, its output, an answer")
def namespace() -> None:
    with tempfile.TemporaryDirectory() as folder:
        told = turn("Close the agent", SCRIPTED_MODEL, Path(folder))
        assert "The agent is closed." in told, told


main()
