"""What clients and operators of a server see when its engine is killed or stopped, and when it is started again."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest

from support.live_server import KEY, Live, live

HEADERS = {"Authorization": f"Bearer {KEY}"}
ROUNDS = int(os.environ.get("SOAK_ROUNDS", "8"))
MIB = 2**20


def engine_of(server: Live) -> int:
    """The server's only child."""
    [pid] = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return int(pid)


def wait_for(true: Callable[[], bool], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def has_ended(pid: int) -> bool:
    """Whether it is gone, or only waits for its new parent to read its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def health(server: Live) -> tuple[int, str]:
    reply = httpx.get(f"{server.address}/health")
    return reply.status_code, reply.json().get("reason", "")


def complete(server: Live, **options: Any) -> httpx.Response:
    body = {"prompt": "word ", "max_tokens": 20, **options}
    return httpx.post(f"{server.v1}/completions", headers=HEADERS, json=body)


class Load:
    """Clients that send one request after another, until ``end``."""

    def __init__(self, server: Live, num_clients: int) -> None:
        self._server = server
        self._ended = False
        self.errors: list[str] = []
        self.num_whole = 0
        self._threads = [threading.Thread(target=self._run) for _ in range(num_clients)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        body = {"prompt": "word ", "max_tokens": 100, "stream": True}
        with httpx.Client(base_url=self._server.v1, headers=HEADERS) as client:
            while not self._ended:
                with client.stream("POST", "/completions", json=body) as reply:
                    lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
                if lines[-1] == "[DONE]":
                    self.num_whole += 1
                else:
                    self.errors.append(json.loads(lines[-1])["error"]["code"])

    def end(self) -> None:
        self._ended = True
        for thread in self._threads:
            thread.join()


def test_an_engine_that_is_killed_under_load_is_started_again(tmp_path: Path) -> None:
    with live(tmp_path / "log", restart_engine=1, keys=[KEY]) as server:
        load, first = Load(server, 8), engine_of(server)
        body = {"prompt": "word ", "max_tokens": 4000, "stream": True}
        try:
            wait_for(lambda: load.num_whole > 8)
            with httpx.stream("POST", f"{server.v1}/completions", headers=HEADERS, json=body) as reply:
                lines = reply.iter_lines()
                next(lines)
                os.kill(first, signal.SIGKILL)
                last = [line for line in lines if line][-1]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_died"
            wait_for(lambda: health(server)[0] == 503)
            assert "SIGKILL" in health(server)[1]
            assert complete(server).status_code == 200  # it has waited for the second engine
            num_whole = load.num_whole
            wait_for(lambda: load.num_whole > num_whole + 8)
        finally:
            load.end()
        # Open streams got their error, and no request that began later.
        assert len(load.errors) <= 8
        assert set(load.errors) <= {"engine_died"}
        assert health(server)[0] == 200
        assert engine_of(server) != first
        metrics = httpx.get(f"{server.address}/metrics", headers=HEADERS).text
        assert 'microscale:engine_restarts_total{model_name="scripted"} 1.0' in metrics
        os.kill(engine_of(server), signal.SIGKILL)
        assert server.process.wait(20) == 1
        assert "Traceback" not in server.log.read_text()


def test_a_server_is_stopped_while_its_engine_starts_again(tmp_path: Path) -> None:
    with live(tmp_path / "log", restart_engine=1, keys=[]) as server:
        os.kill(engine_of(server), signal.SIGKILL)
        wait_for(lambda: health(server)[0] == 503)
        server.terminate()
        assert server.process.wait(20) == 0


def test_a_stopped_engine_does_not_keep_a_server_from_stopping(tmp_path: Path) -> None:
    with live(tmp_path / "log", drain_s=1.0, keys=[]) as server:
        engine = engine_of(server)
        with httpx.stream("POST", f"{server.v1}/completions", json={"prompt": "x", "max_tokens": 4000, "stream": True}):
            os.kill(engine, signal.SIGSTOP)
            server.terminate()
            assert server.process.wait(15) == 1
        assert has_ended(engine)


def test_a_stopped_engine_ends_with_a_server_that_is_killed(tmp_path: Path) -> None:
    with live(tmp_path / "log", keys=[]) as server:
        engine = engine_of(server)
        os.kill(engine, signal.SIGSTOP)
        server.process.kill()
        wait_for(lambda: has_ended(engine))


@pytest.mark.nightly
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_stopped_engine_is_reported_and_ended(tmp_path: Path, restarts: int) -> None:
    """An idle one too. It takes ten seconds."""
    with live(tmp_path / "log", keys=[KEY], restart_engine=restarts) as server:
        engine = engine_of(server)
        os.kill(engine, signal.SIGSTOP)
        wait_for(lambda: health(server)[0] == 503)
        if restarts:
            assert complete(server).status_code == 200
        else:
            assert "was stopped" in health(server)[1]
            assert server.process.wait(20) == 1
        assert has_ended(engine)


def unread(server: Live, method: str, path: str, body: bytes = b"", times: int = 1) -> socket.socket:
    """A client that sends a request, or many at once, and reads nothing."""
    where = urlsplit(server.address)
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.connect((where.hostname, where.port))
    made.setblocking(False)
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    made.send((f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body) * times)
    return made


def resident(server: Live) -> int:
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.nightly
@pytest.mark.timeout(120 * (1 + ROUNDS))
def test_soak_with_stopped_engines_and_clients_that_do_not_read(tmp_path: Path) -> None:
    """In each round, half of the clients never read, and the engine is stopped or killed. ``SOAK_ROUNDS`` sets how many
    rounds there are, of 20 seconds each."""
    endless = json.dumps({"prompt": "x", "max_tokens": 4000, "stream": True}).encode()
    limits = {"write_timeout_s": 2.0}
    with live(tmp_path / "log", restart_engine=ROUNDS, limits=limits, keys=[KEY]) as server:
        load, sizes = Load(server, 8), []
        try:
            for number in range(ROUNDS):
                num_whole, engine = load.num_whole, engine_of(server)
                wait_for(lambda at=num_whole: load.num_whole > at + 8)  # type: ignore[misc]
                clients = [unread(server, "POST", "/v1/completions", endless) for _ in range(40)]
                clients += [unread(server, "GET", "/metrics", times=2000) for _ in range(6)]
                num_whole, num_closed = load.num_whole, server.log.read_text().count("has not read")
                wait_for(lambda at=num_whole: load.num_whole > at + 8)  # type: ignore[misc]
                wait_for(lambda at=num_closed: server.log.read_text().count("has not read") >= at + 6)  # type: ignore[misc]
                os.kill(engine, signal.SIGKILL if number % 2 else signal.SIGSTOP)
                wait_for(lambda: health(server)[0] == 503)
                wait_for(lambda: health(server)[0] == 200)
                assert has_ended(engine)
                for client in clients:
                    client.close()
                sizes.append(resident(server))
        finally:
            load.end()
        assert set(load.errors) == {"engine_died"}
        assert len(load.errors) <= 8 * ROUNDS
        wait_for(lambda: httpx.get(f"{server.address}/load", headers=HEADERS).json()["server_load"] == 0)
        assert sizes[-1] < sizes[0] + 40 * MIB, sizes
        engine = engine_of(server)
        server.terminate()
        assert server.process.wait(20) == 0
        assert has_ended(engine)
        log = server.log.read_text()
        assert "Traceback" not in log
        num_unread = log.count("has not read")
    print(f"{load.num_whole} streams complete, {len(load.errors)} ended with their engine, {num_unread} not read")
    print("MiB after each round:", *(size // MIB for size in sizes))
