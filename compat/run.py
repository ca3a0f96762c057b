"""Runs real clients against the real server, each in an environment of its own.

    make test-clients                              all of them
    make test-clients ARGS='--only codex'          one; repeatable
    make test-clients ARGS='--json results.json'   the results as JSON too

Two servers run meanwhile: ``microscale serve`` with the embedded model, and the same server over the rules engine of
``support.scripted_service``. The status is 1 if a check failed, 2 if only an installation did.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from compat import report
from compat.environments import ROOT, NotInstalledError, command, folder_of, install, is_installed
from compat.report import Check, Result, Status
from compat.rules import MORE_NAMES, RULES
from compat.table import CLIENTS, Client
from microscale.models import embedded
from support import live_server
from support.serve_command import serving

SCRIPTS = Path(__file__).parent / "scripts"
PAGE = ROOT / "docs" / "clients.md"
KEY = live_server.KEY
OTHER_MODEL = "other-name"


@contextmanager
def servers(folder: Path) -> Iterator[dict[str, str]]:
    """Both servers, and what scripts are told of them by their environment."""
    # So that a browser's page from elsewhere may ask, as Open WebUI's does.
    options = ["--api-key", KEY, "--allowed-origin", "*"]
    for name in (embedded.SERVED_NAME, OTHER_MODEL):
        options += ["--served-model-name", name]
    scripted = live_server.live(
        folder / "scripted.log",
        max_model_len=131072,
        rules=RULES,
        more_names=MORE_NAMES,
        allowed_origins=["*"],
    )
    with serving(options, folder / "demo.log") as address, scripted as live:
        yield {
            "MICROSCALE_ADDRESS": address,
            "MICROSCALE_KEY": KEY,
            "MICROSCALE_MODEL": embedded.SERVED_NAME,
            "MICROSCALE_OTHER_MODEL": OTHER_MODEL,
            "MICROSCALE_TOKENIZER": str(embedded.FOLDER),
            "MICROSCALE_SCRIPTED_ADDRESS": live.address,
            "MICROSCALE_SCRIPTED_MODEL": live_server.MODEL,
            "MICROSCALE_PYTHON": sys.executable,
        }


def run(client: Client, told: dict[str, str]) -> Result:
    started = time.monotonic()
    try:
        if not is_installed(client):
            print("  installing …", flush=True)
        install(client)
    except NotInstalledError as error:
        return Result(client, Status.NOT_INSTALLED, reason=str(error), seconds=time.monotonic() - started)
    started = time.monotonic()
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= told | {"MICROSCALE_ENV": str(folder_of(client)), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command(client, SCRIPTS),
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    timer = threading.Timer(client.timeout_s, _kill, [process])
    timer.start()
    try:
        checks, rest = _read(process)
    finally:
        timer.cancel()
        _kill(process)
    seconds = time.monotonic() - started
    if seconds >= client.timeout_s:
        return Result(client, Status.FAILS, checks, seconds, f"took more than {client.timeout_s:.0f} s")
    if process.returncode == 0 and checks and all(check.ok for check in checks):
        return Result(client, Status.WORKS, checks, seconds)
    if not any(not check.ok for check in checks):
        print("".join(rest[-30:]), flush=True)
        return Result(client, Status.FAILS, checks, seconds, f"its script ended with status {process.returncode}")
    return Result(client, Status.FAILS, checks, seconds)


def _read(process: subprocess.Popen[str]) -> tuple[tuple[Check, ...], list[str]]:
    """The checks as they are reported, and every other line."""
    checks, rest = [], []
    assert process.stdout is not None
    for line in process.stdout:
        if not line.startswith('{"check"'):
            rest.append(line)
            continue
        told = json.loads(line)
        check = Check(told["check"], told["ok"], told.get("detail", ""))
        checks.append(check)
        print(f"  {'ok   ' if check.ok else 'FAILS'} {check.name}", flush=True)
        if not check.ok:
            print("        " + check.detail.strip().replace("\n", "\n        "), flush=True)
    process.wait()
    return tuple(checks), rest


def _kill(process: subprocess.Popen[str]) -> None:
    """The script and what it started: it leads a session of its own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description="Run real clients against the real server.")
    parser.add_argument("--only", action="append", choices=[client.name for client in CLIENTS], metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write the results there too.")
    parser.add_argument("--no-docs", action="store_true", help="Leave docs/clients.md as it is.")
    told = parser.parse_args()
    chosen = [client for client in CLIENTS if not told.only or client.name in told.only]
    results = []
    with tempfile.TemporaryDirectory() as folder, servers(Path(folder)) as env:
        for number, client in enumerate(chosen, 1):
            print(f"[{number}/{len(chosen)}] {client.name} {client.version}", flush=True)
            results.append(run(client, env))
            if not told.no_docs:
                report.rewrite(PAGE, results, CLIENTS)
    print("\n" + "\n".join(report.lines(results)))
    if told.json:
        told.json.write_text(json.dumps([result.as_json() for result in results], indent=1) + "\n")
    statuses = {result.status for result in results}
    return 1 if Status.FAILS in statuses else 2 if Status.NOT_INSTALLED in statuses else 0


if __name__ == "__main__":
    sys.exit(main())
