"""The wheels in a bare environment outside of the checkout: serve, ask, stop; chat, explain, doctor, quality.

Not among the tests that pytest finds by itself, since it installs torch: ``make test-wheel`` runs it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.readme import shown_by
from support.terminal import terminal
from tools.wheel import build

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).parents[2]
PATIENCE_S = 240.0
QUESTION = "What is 247 + 385?"
ANSWER = "632"
SERVING = re.compile(r"Serving\s.*?\sat\s+(http://\S+)", re.DOTALL)


@dataclass(frozen=True)
class Place:
    """A new folder, and the environment beside it."""

    bin: Path
    folder: Path
    env: Mapping[str, str]

    @property
    def microscale(self) -> str:
        return str(self.bin / "microscale")

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return done.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    base = tmp_path_factory.mktemp("bare")
    assert ROOT not in base.parents
    home = base / "home"
    folder = base / "folder"
    home.mkdir()
    folder.mkdir()
    ours = ("PYTHONPATH", "VIRTUAL_ENV", "XDG_CACHE_HOME")
    env = {name: value for name, value in os.environ.items() if name not in ours and not name.startswith("MICROSCALE_")}
    env["HOME"] = str(home)
    # pip's own cache may be the user's: it saves the download.
    pip_env = env | {"HOME": os.environ.get("HOME", str(home))}
    python = str(base / "env" / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", str(base / "env")], check=True)
    subprocess.run([str(ROOT / "tools" / "install_locked.sh"), python, "server"], check=True, env=pip_env)
    place = Place(base / "env" / "bin", folder, env)
    for name in ("microscale", "ptxproof", "microscale-lab"):
        if name == "ptxproof":
            alone = subprocess.run([place.microscale, "prove"], env=env, capture_output=True, text=True, check=False)
            assert "install its wheel" in alone.stderr
        wheel = build(base / "wheel", name)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True, env=pip_env)
    return place


def test_nothing_is_missing(place: Place) -> None:
    place.run(str(place.bin / "python"), "-m", "pip", "check")
    where = place.run(str(place.bin / "python"), "-c", "import microscale; print(microscale.__file__)")
    assert Path(where.strip()).is_relative_to(place.bin.parent)


def test_doctor(place: Place) -> None:
    report = json.loads(place.run(place.microscale, "doctor", "--json"))
    assert report["ok"]
    assert next(f["status"] for f in report["findings"] if f["name"] == "Server") == "ok"


def test_explain(place: Place) -> None:
    shown = place.run(place.microscale, "explain", "gpt-oss-120b", "--gpu", "gb10", "--precision", "balanced")
    assert re.search(shown_by("explain"), shown), shown[-4000:]


def test_quality(place: Place) -> None:
    shown = place.run(place.microscale, "quality", "--choice", "balanced", "--samples", "1")
    assert re.search(r"(?m)^balanced\s+\d", shown), shown


@contextmanager
def server(place: Place) -> Iterator[str]:
    """Started as a user does, and stopped as a user does."""
    log = place.folder / "log"
    with log.open("w") as out:
        command = [place.microscale, "serve", "--port", "0"]
        process = subprocess.Popen(command, cwd=place.folder, env=place.env, stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while (found := SERVING.search(log.read_text())) is None:
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.2)
        yield found[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()[-4000:]
    finally:
        process.kill()
        process.wait()


def test_serve_ask_stop(place: Place) -> None:
    with server(place) as address:
        body = json.dumps({"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}).encode()
        request = urllib.request.Request(f"{address}/v1/chat/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            assert ANSWER in json.load(answer)["choices"][0]["message"]["content"]
        with urllib.request.urlopen(f"{address}/", timeout=PATIENCE_S) as page:
            assert b"<html" in page.read()
    # Nothing was written where it was started but its log.
    assert [path.name for path in place.folder.iterdir()] == ["log"]


def test_chat(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(os.environ) - set(place.env):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", place.env["HOME"])
    monkeypatch.chdir(place.folder)
    with terminal([str(place.bin / "python"), place.microscale, "chat"]) as screen:
        screen.expect("Ctrl-D leaves", PATIENCE_S)
        screen.expect("> ")
        screen.type(QUESTION)
        screen.expect(rf"{ANSWER}\.\s+\d+ tokens", PATIENCE_S)
        screen.expect("> ")
        screen.press("D")
        assert screen.wait() == 0
