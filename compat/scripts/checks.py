"""What the scripts in Python share: where the server is, and checks that report a JSON line each. It needs the standard
library alone: every script runs in its client's own environment."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ADDRESS = os.environ["MICROSCALE_ADDRESS"]
V1 = f"{ADDRESS}/v1"
KEY = os.environ["MICROSCALE_KEY"]
MODEL = os.environ["MICROSCALE_MODEL"]
# The same server over an engine that answers by rules.
SCRIPTED_ADDRESS = os.environ.get("MICROSCALE_SCRIPTED_ADDRESS", "")
SCRIPTED_V1 = f"{SCRIPTED_ADDRESS}/v1"
SCRIPTED_MODEL = os.environ.get("MICROSCALE_SCRIPTED_MODEL", "")
# Another name of the same model.
OTHER_MODEL = os.environ.get("MICROSCALE_OTHER_MODEL", "")
# The folder of the embedded model: clients that count tokens themselves take its tokenizer.
TOKENIZER = os.environ.get("MICROSCALE_TOKENIZER", "")
SUM = "What is 12 + 30?"
WEATHER = "What is the weather in Paris?"

_checks: list[tuple[str, Callable[[], Any]]] = []


def check(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(run: Callable[[], Any]) -> Callable[[], Any]:
        _checks.append((name, run))
        return run

    return add


def report(name: str, *, ok: bool, detail: str = "") -> None:
    print(json.dumps({"check": name, "ok": ok, "detail": detail[-2000:]}), flush=True)


def main() -> None:
    """Runs every check whose name has MICROSCALE_CHECK in it; exits with 1 if one failed. What a check returns is a
    figure of it, and is told with its name."""
    only = os.environ.get("MICROSCALE_CHECK", "")
    failed = False
    # One event loop for all: clients keep connections from one check to the next.
    with asyncio.Runner() as loop:
        for name, run in _checks:
            if only not in name:
                continue
            try:
                found = loop.run(run()) if inspect.iscoroutinefunction(run) else run()
            except BaseException:
                failed = True
                report(name, ok=False, detail=traceback.format_exc())
            else:
                report(f"{name}: {found}" if found else name, ok=True)
    sys.exit(failed)


def refused(kind: type[BaseException], call: Callable[[], Any]) -> Any:
    """The error that a call must end with."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} came")


def tool(name: str) -> str:
    """A command of this environment."""
    return str(Path(sys.executable).parent / name)


def run(command: Sequence[str], *, cwd: Path | None = None, **env: str) -> str:
    """Output of both streams. A status other than 0 is a failure that shows its end."""
    done = subprocess.run(
        command, env=os.environ | env, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    assert done.returncode == 0, f"status {done.returncode}: {done.stdout[-3000:]}"
    return done.stdout
