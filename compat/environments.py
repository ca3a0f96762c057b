"""One environment per client, made once and made anew when its pinned versions change."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from compat.table import Client, Kind

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".venv-clients"
INSTALL_S = 1800.0
STAMP = "installed.json"


class NotInstalledError(Exception):
    """The client could not be installed: nothing is known of it."""


def folder_of(client: Client) -> Path:
    return FOLDER / client.name


def is_installed(client: Client) -> bool:
    stamp = folder_of(client) / STAMP
    return stamp.is_file() and json.loads(stamp.read_text()) == list(client.packages)


def install(client: Client) -> None:
    if is_installed(client):
        return
    folder = folder_of(client)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if client.kind is Kind.PYTHON:
        _run([sys.executable, "-m", "venv", str(folder)])
        _run([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *client.packages])
    else:
        if shutil.which("npm") is None:
            raise NotInstalledError("there is no npm on this machine")
        (folder / "package.json").write_text('{"private": true, "type": "module"}\n')
        _run(["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", *client.packages], cwd=folder)
    (folder / STAMP).write_text(json.dumps(client.packages))


def command(client: Client, scripts: Path) -> list[str]:
    """What runs the client's script. Node looks for packages beside the script, so scripts for it are copied there."""
    if client.script.endswith(".mjs"):
        for script in scripts.glob("*.mjs"):
            shutil.copy(script, folder_of(client))
        return ["node", str(folder_of(client) / client.script)]
    own = folder_of(client) / "bin" / "python"
    return [str(own if client.kind is Kind.PYTHON else sys.executable), str(scripts / client.script)]


def _run(command: Sequence[str], cwd: Path | None = None) -> None:
    # An environment of the caller's must not reach into the client's.
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    try:
        subprocess.run(command, cwd=cwd, env=env, check=True, capture_output=True, text=True, timeout=INSTALL_S)
    except subprocess.CalledProcessError as error:
        raise NotInstalledError(_reason(error.stderr or error.stdout)) from None
    except subprocess.TimeoutExpired:
        raise NotInstalledError(f"no end after {INSTALL_S:.0f} s") from None


def _reason(told: str) -> str:
    """The line that says most, fit for the page: pip's last, npm's second, without addresses and paths."""
    lines = [line.strip() for line in told.splitlines() if "error" in line.lower()] or ["no reason was given"]
    line = lines[min(1, len(lines) - 1)] if lines[0].startswith("npm") else lines[-1]
    return re.sub(r"\w+://\S+|host='[^']*'|(?<!\S)/\S+", "…", line)[:200]
