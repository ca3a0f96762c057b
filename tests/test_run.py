"""``microscale run``: one question in, plain text out, against a real server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.live_server import KEY, Live, live
from support.web_turns import EXTRA, SEEDS

RUN = (sys.executable, "-m", "microscale", "run")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(tmp_path_factory.mktemp("run") / "log", turns=list(EXTRA.values())) as running:
        yield running


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RUN, *arguments], input=stdin, capture_output=True, text=True, timeout=120, check=False)


def test_the_answer_is_plain_text_without_reasoning(server: Live) -> None:
    to_server = ("--url", server.v1, "--api-key", KEY, "--seed", str(SEEDS["markdown"]))
    asked, piped = run("How do formats work?", *to_server), run("-", *to_server, stdin="How do formats work?\n")
    for done in (asked, piped):
        assert done.returncode == 0, done.stderr
        assert "def scale_of" in done.stdout
        assert "The user asks about block scaling" not in done.stdout
        assert "\x1b" not in done.stdout
        assert done.stdout.endswith("\n")
    assert asked.stdout == piped.stdout


def test_an_answer_that_is_cut_off_says_so_on_standard_error(server: Live) -> None:
    done = run("How?", "--url", server.v1, "--api-key", KEY, "--seed", str(SEEDS["markdown"]), "--max-tokens", "300")
    assert done.returncode == 0
    assert "cut off at the maximum number of tokens" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("What", "is", "2 + 2?"), "Put the question in quotes"),
        (("-",), "The question is empty"),
        (("Hi", "--effort", "extreme"), "--effort 'extreme' is unknown; known are low, medium, high"),
        (("Hi", "--url", "http://127.0.0.1:9"), "does not answer"),
    ],
)
def test_mistakes_are_one_sentence(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 1
    assert not done.stdout
    assert done.stderr.startswith("error: ")
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_why_the_server_does_not_start_is_one_sentence(tmp_path: Path) -> None:
    done = run(str(tmp_path), "Hi")
    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path} is empty; a model is a folder with config.json and *.safetensors in it.\n"


def test_chat_does_not_take_a_question_for_a_model() -> None:
    command = [sys.executable, "-m", "microscale", "chat", "What is 2 + 2?"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "is a question and not a MODEL; microscale run QUESTION answers it" in " ".join(done.stderr.split())


@pytest.mark.nightly
def test_the_embedded_model_answers(tmp_path: Path) -> None:
    done = run("demo", "What is 247 + 385?", "--temperature", "0", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "632" in done.stdout
