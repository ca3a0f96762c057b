"""Ctrl-C ends every command at once, with status 130 and without a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from microscale.models import embedded
from support.fake_hub import FakeHub, serve_hub

PATIENCE_S = 120.0


def interrupted(arguments: list[str], reached: Callable[[str], bool], log: Path, **env: str) -> tuple[int, str]:
    """Start a command, interrupt it when its output says so, and return its status and output."""
    command = [sys.executable, "-m", "microscale", *arguments]
    settings = {"OMP_NUM_THREADS": "1", **env}
    with log.open("w") as file:
        # A group of its own: Ctrl-C in a terminal reaches all of a group.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=os.environ | settings, process_group=0
        )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not reached(log.read_text()):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        return process.wait(PATIENCE_S), log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("serve demo --port 0", "about to load"),
        ("bench demo --tests tg2000", "explain says"),
        ("generate demo --prompt-ids 1 --max-tokens 4000 --ignore-eos", "Read 0.0"),
    ],
)
def test_work_is_interrupted(arguments: str, line: str, tmp_path: Path) -> None:
    status, text = interrupted(arguments.split(), lambda text: line in text, tmp_path / "log")
    assert status == 130
    assert "Traceback" not in text
    assert "error" not in text


def test_a_download_is_interrupted(tmp_path: Path) -> None:
    """The library's threads would finish their files first."""
    files = {path.name: path.read_bytes() for path in embedded.FOLDER.iterdir() if path.is_file()}
    hub = FakeHub({"demo": files}, hold=Event())
    assert hub.hold is not None
    with serve_hub(hub):

        def waits(text: str) -> bool:
            return any(name.endswith(".safetensors") for name in hub.fetched)

        env = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        arguments = ["generate", "owner/demo", "--prompt-ids", "1"]
        status, text = interrupted(arguments, waits, tmp_path / "log", **env)
        hub.hold.set()
    assert status == 130
    assert "Traceback" not in text
