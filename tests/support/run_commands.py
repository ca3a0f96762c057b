"""Runs the commands of a page as a reader types them, one after the other, on this machine's CPU.

``serve`` becomes a server on a free port that stays for the rest of the page; what asks port 8000 is sent to it. It is
stopped at the end of the page, as a user stops it, and must end well. ``chat`` is asked one question in a terminal.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from support.doc_commands import Block, blocks, words
from support.terminal import terminal

MICROSCALE = (sys.executable, "-m", "microscale")
ADDRESS = "http://127.0.0.1:8000"
SERVING = re.compile(r"Serving\s.*?\sat\s+(http://\S+)", re.DOTALL)
PATIENCE_S = 280.0
QUESTION, ANSWER = "What is 247 + 385?", "632"


class Reader:
    """Types what a page shows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address: str | None = None
        self.num_run = 0
        self._stack = ExitStack()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(self, block: Block) -> None:
        """Every command of a block; a failure says which."""
        if block.language == "python":
            self._finish([sys.executable, "-c", self._here(block.body)], block.name)
            return
        for command in block.commands:
            parts = words(command)
            if parts[:2] == ["make", "serve"]:
                parts = ["microscale", "serve"]
            name = f"{block.name}: {command}"
            if parts[0] == "curl":
                self._finish(shlex.split(self._here(shlex.join([*parts, "-sS", "--fail", "--max-time", "120"]))), name)
            elif parts[1] == "serve":
                self._serve(parts[2:], name)
            elif parts[1] == "chat":
                self._chat(parts[2:])
            else:
                self._finish([*MICROSCALE, *parts[1:]], name)

    def _here(self, text: str) -> str:
        assert self.address is not None or ADDRESS not in text, "the page asks a server that it did not start"
        return text.replace(ADDRESS, self.address or "")

    def _finish(self, command: list[str], name: str) -> str:
        self.num_run += 1
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=self.folder, env=environment()
        )
        assert done.returncode == 0, f"{name}\n{(done.stdout + done.stderr)[-3000:]}"
        return done.stdout

    def _serve(self, arguments: list[str], name: str) -> None:
        assert self.address is None, f"{name}: the page has a server already"
        self.num_run += 1
        log = self.folder / "server.log"
        with log.open("w") as out:
            process = subprocess.Popen(
                [*MICROSCALE, "serve", *arguments, "--port", "0"], stdout=out, stderr=out, env=environment()
            )
        self._stack.callback(stop, process, log)
        deadline = time.monotonic() + PATIENCE_S
        while (found := SERVING.search(log.read_text())) is None:
            assert process.poll() is None, f"{name}\n{log.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"{name}: it never served\n{log.read_text()[-3000:]}"
            time.sleep(0.1)
        self.address = found[1]

    def _chat(self, arguments: list[str]) -> None:
        """By the page's server where it has one, else by one that the chat starts; greedily, so that it knows."""
        self.num_run += 1
        server = ["--url", self.address] if self.address else [] if arguments else ["demo"]
        with terminal((*MICROSCALE, "chat", *arguments, *server, "--temperature", "0")) as screen:
            screen.expect("/help lists commands", PATIENCE_S)
            screen.expect("> ")
            screen.type(QUESTION)
            screen.expect(ANSWER, PATIENCE_S)
            screen.type("/quit")
            assert screen.wait() == 0


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def stop(process: subprocess.Popen[bytes], log: Path) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        assert process.wait(PATIENCE_S) == 0, log.read_text()[-3000:]
    finally:
        process.kill()
        process.wait()


def runnable(page: str) -> list[Block]:
    """What of a page runs here. Programs in Python ask a server, so they run where the page starts one."""
    found = [block for block in blocks(page) if not block.needs and (block.is_shell or block.language == "python")]
    serves = any(
        re.search(r"(?:microscale|make) serve", c) for block in found if block.is_shell for c in block.commands
    )
    return [block for block in found if block.is_shell or serves]


def read_page(page: str, folder: Path) -> int:
    """Run all that runs here, in the page's order; the number of commands."""
    with Reader(folder) as reader:
        for block in runnable(page):
            reader.run(block)
        return reader.num_run
