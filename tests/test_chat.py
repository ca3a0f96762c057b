"""``microscale chat`` in a real terminal, against a real server."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from rich.console import Console

from microscale.cli import asking
from microscale.cli.asking import clean
from microscale.cli.chat import AnswerView, split_finished
from microscale.cli.chat_client import ChatServer, ServerError
from microscale.errors import BadSetting
from support.live_server import KEY, Live, live
from support.terminal import Terminal, terminal
from support.web_turns import EXTRA, SEEDS

CHAT = (sys.executable, "-m", "microscale", "chat")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(tmp_path_factory.mktemp("chat") / "log", turns=list(EXTRA.values())) as running:
        yield running


def chat(server: Live, seed: int, *more: str) -> tuple[str, ...]:
    return (*CHAT, "--url", server.v1, "--api-key", KEY, "--seed", str(seed), *more)


def ask(screen: Terminal, line: str, *expected: str) -> None:
    screen.type(line)
    for pattern in expected:
        screen.expect(pattern)


def leave(screen: Terminal) -> None:
    """By Ctrl-D, which is lost while nobody reads."""
    screen.expect("> ")
    screen.press("d")
    assert screen.wait() == 0


def test_a_conversation(server: Live, tmp_path: Path) -> None:
    with terminal(chat(server, SEEDS["markdown"], "--system", "Be brief.")) as screen:
        screen.expect(r"scripted, 4096 tokens\. /help lists commands")
        ask(screen, "How do formats work?", "The user asks about block scaling", "The arithmetic", "def scale_of")
        screen.expect(r"974 tokens · [\d.]+ tok/s · first after \d+ ms")
        ask(screen, "/retry", "The user asks about block scaling", "974 tokens")
        ask(screen, "/effort extreme", "error: The effort is medium; it can be low, medium, high")
        ask(screen, "/effort high", "effort: high")
        ask(screen, "/temperature 3", "error: The temperature is the model's own; it can be 0 to 2")
        ask(screen, "/temperature 0.5", "temperature: 0.5")
        ask(screen, "/system", "system prompt cleared")
        ask(screen, "/help", r"/system \[TEXT\]", "/save FILE", r"Ctrl-C stops an answer\. End a line with \\ to")
        ask(screen, "/nonsense", "error: /nonsense is not a command")
        for name in ("talk.json", "talk.md"):
            ask(screen, f"/save {tmp_path / name}", "saved to")
        ask(screen, f"/save {tmp_path / 'talk.md'}", r"cannot\s+be\s+written:\s+File\s+exists")
        leave(screen)
    saved = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [message["role"] for message in saved] == ["user", "assistant"]
    assert "### The arithmetic" in saved[1]["content"]
    assert (tmp_path / "talk.md").read_text().startswith("## user\n\nHow do formats work?\n\n## assistant\n\nA *block")


def test_ctrl_c_stops_the_answer_and_not_the_program(server: Live) -> None:
    with terminal(chat(server, SEEDS["endless"])) as screen:
        screen.expect("Ctrl-D leaves")
        screen.expect("> ")
        screen.press_until("c", "Ctrl-D or /quit leaves")
        ask(screen, "Go on.", "and on and on")
        screen.press("c")
        screen.expect(r"stopped · \d+ tokens")
        ask(screen, "/new", "a new conversation")
        ask(screen, "one line \\", "… ")
        ask(screen, "and another", "and on and on")
        screen.press("c")
        screen.expect(r"stopped · \d+ tokens")
        screen.type("/quit")
        assert screen.wait() == 0
    assert server.log.read_text().count("status=499") >= 2


PASTED = "curl http://x \\\n    -H 'A: b'\n\n/usr/bin/no-command\nlast"


def test_a_paste_is_one_message(server: Live, tmp_path: Path) -> None:
    """Its lines stay as they are, whatever they begin and end with; lines typed one by one are a message each."""
    with terminal(chat(server, SEEDS["after a call"])) as screen:
        screen.expect("> ")
        screen.paste(PASTED)
        ask(screen, "", "21 degrees")
        screen.expect("> ")
        screen.paste("/usr/bin/first\nsecond")
        ask(screen, " and more", "21 degrees")
        ask(screen, f"/save {tmp_path / 'talk.json'}", "saved to")
        leave(screen)
    saved = json.loads((tmp_path / "talk.json").read_text())["messages"]
    asked = [message["content"] for message in saved if message["role"] == "user"]
    assert asked == [PASTED, "/usr/bin/first\nsecond and more"]


def test_what_is_typed_during_an_answer_stays_lines(server: Live, tmp_path: Path) -> None:
    with terminal(chat(server, SEEDS["markdown"])) as screen:
        screen.expect("> ")
        ask(screen, "first", "block scaling")
        screen.type("second")
        screen.type("third")
        for _ in range(3):
            screen.expect("974 tokens")
        ask(screen, f"/save {tmp_path / 'talk.json'}", "saved to")
        leave(screen)
    saved = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [message["content"] for message in saved if message["role"] == "user"] == ["first", "second", "third"]


def test_every_form_of_the_address_is_taken(server: Live) -> None:
    for end in ("", "/", "/v1", "/v1/", "/v1//", "/#running"):
        found = ChatServer(server.address + end, KEY)
        assert found.url == server.v1
        assert found.model()[0] == "scripted"
    assert ChatServer("https://proxy/model").url == "https://proxy/model/v1"
    assert ChatServer("https://proxy/v1beta/openai/").url == "https://proxy/v1beta/openai"
    # As `serve --host 0.0.0.0` prints it; a request under that name would be refused on this machine.
    anywhere = ChatServer(server.address.replace("127.0.0.1", "0.0.0.0"), KEY)
    assert anywhere.model()[0] == "scripted"


def test_errors_break_between_words(server: Live) -> None:
    """In a chat, and of a command that ends with one. The terminal itself would break them anywhere."""

    def check(text: str, told: str) -> None:
        lines = text.strip().splitlines()
        assert len(lines) > 1
        assert all(len(line) <= 40 for line in lines)
        assert " ".join(" ".join(lines).split()) == told

    with terminal(chat(server, 0), width=40) as screen:
        screen.expect("> ")
        ask(screen, "/effort enormous", r"high\.")
        shown = "error:" + screen.text.rpartition("error:")[2].partition("\n>")[0]
        check(shown, "error: The effort is medium; it can be low, medium, high.")
        leave(screen)
    with terminal((*CHAT, "--url", server.v1), width=40) as screen:
        assert screen.wait() == 1
        told = f"error: {server.v1} needs a key; use --api-key-file."
        check("error:" + screen.text.rpartition("error:")[2], told)


def test_what_cannot_be_reached_is_said(server: Live) -> None:
    for options, told in (
        (("--url", "http://127.0.0.1:9/v1"), "does not answer"),
        (("--url", server.v1), "needs a key; use --api-key-file"),
        (("--url", "nonsense"), "is not an address"),
        (("--url", server.v1, "gpt-oss-tiny"), "not both"),
    ):
        with terminal((*CHAT, *options)) as screen:
            screen.expect(told)
            assert screen.wait() == 1


def test_the_server_that_runs_here_is_taken_and_else_the_embedded_model(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "started_server", nullcontext)
    monkeypatch.setattr(asking, "USUAL_URL", server.v1)
    # An address, and of a server that would be started its arguments.
    find: Callable[..., AbstractContextManager[object]] = asking.find_server
    for url, model, options, found in (
        (None, None, [], server.v1),
        (None, "gpt-oss-tiny", [], ["gpt-oss-tiny"]),
        (None, None, ["--device", "cpu"], ["demo", "--device", "cpu"]),
        ("http://127.0.0.1:9/v1", None, [], "http://127.0.0.1:9/v1"),
    ):
        with find(url, model, options) as address:
            assert address == found
    monkeypatch.setattr(asking, "USUAL_URL", "http://127.0.0.1:9/v1")
    with find(None, None, []) as address:
        assert address == ["demo"]
    with pytest.raises(BadSetting, match="--device for a model to serve meanwhile, not both"):
        find(server.v1, None, ["--device", "cpu"])


def test_a_server_of_something_else_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "models").write_text("<html>")
    files = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), files) as other:
        Thread(target=other.serve_forever, daemon=True).start()
        with pytest.raises(ServerError, match="does not speak OpenAI's API"):
            ChatServer(f"http://127.0.0.1:{other.server_port}").model()
        other.shutdown()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_server_of_its_own() -> None:
    """Started for the embedded model, spoken to, and gone afterwards."""
    with terminal((*CHAT, "--device", "cpu", "--temperature", "0")) as screen:
        screen.expect("microscale-demo, 4096 tokens")
        screen.expect("This is a toy of 30 million parameters")
        children = children_of(screen.process.pid)
        assert children
        ask(screen, "What is 12 + 30?", "42", r"\d+ tokens ·\s+[\d.]+ tok/s")
        leave(screen)
        assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    with terminal((*CHAT, "no-such-model", "--load-format", "dummy")) as screen:
        screen.expect("error: 'no-such-model' is neither an existing folder")
        assert screen.wait() == 1


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_text_cannot_steer_the_terminal() -> None:
    assert clean("a\x1b]0;title\x07b\x1b[2Jc\r\x9bd\n\te") == "a]0;titleb[2Jcd\n\te"


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("one", ""),
        ("one\n\ntwo", "one\n\n"),
        ("one\n\n```\na\n\nb", "one\n\n"),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("```\na\n\nb", ""),
    ],
)
def test_only_whole_blocks_are_settled(text: str, finished: str) -> None:
    assert text[: split_finished(text)] == finished


def test_without_a_terminal_the_answer_is_plain() -> None:
    with open(os.devnull, "w") as nowhere:
        console = Console(file=nowhere, record=True, width=20)
        view = AnswerView(console)
        for piece in ("a [b] ", "**c** " * 10):
            view.add("thought", piece)
        view.close()
        assert console.export_text() == "a [b] " + "**c** " * 10 + "\n"
