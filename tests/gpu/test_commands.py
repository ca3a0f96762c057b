"""Every command of README on a real GPU, as a user types it: ``support/readme`` says how each is run."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.readme import TABLE, How, Kind, commands
from support.terminal import terminal

pytestmark = pytest.mark.own("commands run in processes of their own, on the GPU as it is")
MICROSCALE = (sys.executable, "-m", "microscale")
SERVER_NEEDS = ("msgspec", "pydantic", "fastapi", "uvicorn", "httptools", "openai_harmony", "llguidance", "jinja2")
NEEDS = {"serve": SERVER_NEEDS, "chat": SERVER_NEEDS, "quality": ("openai_harmony",)}
PATIENCE_S = 500.0
SERVING = re.compile(r"Serving\s.*?\sat\s+(http://\S+)", re.DOTALL)
CURL = next(command for command, how in TABLE.items() if how.kind is Kind.CLIENT)


def skip_without(command: str) -> None:
    """Skip what cannot run for want of packages, by name."""
    missing = [name for name in NEEDS.get(command, ()) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"`microscale {command}` needs {', '.join(missing)}, which this machine does not have")


def of_kind(*kinds: Kind) -> list[pytest.ParameterSet]:
    return [pytest.param(TABLE[command], id=command[:60]) for command in commands() if TABLE[command].kind in kinds]


def run(arguments: str) -> str:
    done = subprocess.run(
        [*MICROSCALE, *shlex.split(arguments)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", of_kind(Kind.PLAIN))
def test_commands_run_to_their_end(how: How) -> None:
    skip_without(how.arguments.partition(" ")[0])
    shown = run(how.arguments)
    assert re.search(how.shows, shown), shown[-4000:]


@contextmanager
def serving(arguments: str, log: Path) -> Iterator[str]:
    """The address of a server on a free port. Stops it as a user does, and sees that it stopped well."""
    with log.open("w") as out:
        process = subprocess.Popen(
            [*MICROSCALE, *shlex.split(arguments), "--port", "0"], stdout=out, stderr=subprocess.STDOUT
        )
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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", of_kind(Kind.SERVER))
def test_servers_answer_and_stop(how: How, tmp_path: Path) -> None:
    """By README's own curl, which knows another port."""
    skip_without("serve")
    if shutil.which("curl") is None:
        pytest.skip("this machine has no curl")
    with serving(how.arguments, tmp_path / "log") as address:
        asked = shlex.split(CURL.replace("http://127.0.0.1:8000", address))
        done = subprocess.run([*asked, "-sS", "--max-time", "120"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert re.search(TABLE[CURL].shows, done.stdout), done.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", of_kind(Kind.TERMINAL))
def test_chats_in_a_terminal(how: How) -> None:
    """With a server of its own, unless one runs where README's does."""
    skip_without("chat")
    with terminal((*MICROSCALE, *shlex.split(how.arguments))) as screen:
        screen.expect("/help lists commands", PATIENCE_S)
        screen.expect("> ")
        screen.type("What is 247 + 385?")
        screen.expect(how.shows)
        screen.expect(r"\d+ tokens · [\d.]+ tok/s")
        screen.type("/quit")
        assert screen.wait() == 0


@pytest.mark.timeout(600)
def test_quality_on_a_gpu() -> None:
    """float32 runs by implementations that no graph can hold, and the rest by those that one can: all choices answer,
    and the formats of the checkpoint say nearly what float32 says."""
    skip_without("quality")
    rows = json.loads(run("quality --samples 2 --choice exact --choice balanced --json"))
    by_name = {row["choice"]: row for row in rows}
    assert list(by_name) == ["float32", "exact", "balanced"]
    assert not [row["reason"] for row in rows if row["reason"]]
    # On a CPU float32 answers nine of ten of the tasks (docs/quality.md).
    assert by_name["float32"]["accuracy"] > 0.6
    assert by_name["exact"]["accuracy"] > 0.6
    assert by_name["exact"]["distance"]["top1"] > 0.95


@pytest.mark.timeout(600)
def test_a_bench_as_another_card_says_so() -> None:
    rows = json.loads(run("bench kernels dense --tokens 1 --as gb10 --json"))
    assert rows
    assert all(re.fullmatch(r"gb10's kernels on an NVIDIA .*; not gb10's speed", row["as"]) for row in rows)


def test_the_environment_is_the_tree_under_test() -> None:
    """What ``python -m microscale`` runs is what these tests are beside."""
    where = subprocess.run(
        [sys.executable, "-c", "import microscale; print(microscale.__file__)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(where.stdout.strip()).parents[2] == Path(__file__).parents[2], os.environ.get("PYTHONPATH")
