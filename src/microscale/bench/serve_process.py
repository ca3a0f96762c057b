"""Runs ``microscale serve`` in its own process for ``bench serve``."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from microscale.bench.serve_client import SILENCE_S, BenchFailed

HOST = "127.0.0.1"
POLL_S = 0.01
START_S = 3600.0
"""Maximum time to start, with a download and an empty kernel cache."""
STOP_S = 10.0
LAST_LINES = 30
OURS = ("--host", "--port", "--api-key", "--api-key-file")
"""Options of ``serve`` that the benchmark sets itself, or could not work with."""


@dataclass(frozen=True)
class BenchServer:
    """A server that is ready."""

    port: int
    ready_s: float
    """Seconds from the start of the process to the first successful ``/health``."""
    plan: dict[str, Any]
    """The reply of ``/plan``: model, GPU, context …"""
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def start_s(self) -> dict[str, float]:
        """The parts of ``ready_s``: those that the engine reports, and the rest, which is the server's own process."""
        parts: dict[str, float] = self.plan.get("start_s") or {}
        return {"server": self.ready_s - sum(parts.values()), **parts} if parts else {}

    def get(self, path: str) -> bytes:
        return _request(self.port, "GET", path)

    def post(self, path: str, fields: dict[str, object]) -> Any:
        return json.loads(_request(self.port, "POST", path, json.dumps(fields)))

    def failed(self, why: str) -> BenchFailed:
        """An error with the end of the server's log."""
        return _failure(why, self.log)


def command(arguments: Sequence[str], port: int) -> list[str]:
    return [sys.executable, "-m", "microscale", "serve", *arguments, "--host", HOST, "--port", str(port)]


@contextmanager
def serving(arguments: Sequence[str], log: Path) -> Iterator[BenchServer]:
    """Start a server with these options of ``serve``, wait until it is ready, and stop it at the end in any case."""
    port = _free_port()
    with log.open("ab") as output, _ended_by_sigterm():
        began = time.perf_counter()
        process = subprocess.Popen(
            command(arguments, port),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C reaches only us, and we stop the server
        )
        try:
            _wait_ready(process, port, log)
            ready_s = time.perf_counter() - began
            yield BenchServer(port, ready_s, json.loads(_request(port, "GET", "/plan")), process, log)
        finally:
            _stop(process)


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as sock:
        return int(sock.getsockname()[1])


def _wait_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise _failure(f"The server ended with status {process.returncode} before it was ready", log)
        with contextlib.suppress(OSError, http.client.HTTPException, BenchFailed):
            _request(port, "GET", "/health")
            return
        time.sleep(POLL_S)
    raise _failure(f"The server was not ready after {START_S:.0f} s", log)


def _failure(why: str, log: Path) -> BenchFailed:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
    return BenchFailed("\n".join([f"{why}. Its log, {log}, ends with:", *lines]))


def _request(port: int, method: str, path: str, body: str | None = None) -> bytes:
    """The body of a reply. Any status except 200 is an error."""
    connection = http.client.HTTPConnection(HOST, port, timeout=SILENCE_S)
    try:
        connection.request(method, path, body, {} if body is None else {"Content-Type": "application/json"})
        reply = connection.getresponse()
        data = reply.read()
        if reply.status != 200:
            raise BenchFailed(f"{method} {path}: status {reply.status}, {data[:400].decode('utf-8', 'replace')}")
        return data
    finally:
        connection.close()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to drain, again to end at once, then SIGKILL."""
    for end in (process.terminate, process.terminate, process.kill):
        end()
        try:
            process.wait(STOP_S)
            return
        except subprocess.TimeoutExpired:
            continue
    process.wait()


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends us like Ctrl-C, through every ``finally``; otherwise the server would stay behind."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
