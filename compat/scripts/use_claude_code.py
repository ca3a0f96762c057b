"""Claude Code: whole turns of ``claude -p`` over Anthropic's Messages API, with a call, its result and an answer."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from checks import KEY, SCRIPTED_ADDRESS, SCRIPTED_MODEL, check, main, run

BINARY = Path(os.environ["MICROSCALE_ENV"]) / "node_modules" / ".bin" / "claude"


def turn(folder: Path, *arguments: str, **env: str) -> str:
    home = folder / "home"
    work = folder / "work"
    home.mkdir()
    work.mkdir()
    (work / "first-file.txt").write_text("one\n")
    env |= {"HOME": str(home), "ANTHROPIC_BASE_URL": SCRIPTED_ADDRESS, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    command = [str(BINARY), "-p", "List the files of this folder", "--model", SCRIPTED_MODEL, "--allowedTools", "Bash"]
    return run([*command, *arguments], cwd=work, **env)


@check("claude -p: a shell call, its result, an answer")
def answer() -> None:
    with tempfile.TemporaryDirectory() as folder:
        told = turn(Path(folder), ANTHROPIC_API_KEY=KEY)
        assert "There is one file: first-file.txt." in told, told


@check("claude -p with a bearer token, its events as JSON")
def events() -> None:
    with tempfile.TemporaryDirectory() as folder:
        told = turn(Path(folder), "--output-format", "stream-json", "--verbose", ANTHROPIC_AUTH_TOKEN=KEY)
        lines = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
        blocks = [block for line in lines for block in (line.get("message") or {}).get("content", [])]
        kinds = {block["type"] for block in blocks if isinstance(block, dict)}
        assert {"thinking", "tool_use", "tool_result", "text"} <= kinds, kinds
        assert lines[-1]["type"] == "result", lines[-1]
        assert not lines[-1]["is_error"], lines[-1]
        assert lines[-1]["usage"]["output_tokens"] > 0, lines[-1]


main()
