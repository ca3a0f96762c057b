"""A Ray of one machine with an application of ours on it, and a client that reads its streams."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

import ray
from ray import serve

OBJECT_STORE = 100 * 2**20
DEADLINE_S = 240.0
"""For what must happen at some time, on a machine that may be busy with much else."""


@contextmanager
def running(folder: Path) -> Iterator[None]:
    """Ray's processes, without dashboard and usage report, and with a small object store."""
    # On a busy machine Ray would take its own proxy for dead, and end its streams.
    os.environ["RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S"] = str(DEADLINE_S)
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE,
        configure_logging=False,
        log_to_driver=False,
        _temp_dir=str(folder),
    )
    try:
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def config(args: Mapping[str, Any], port: int) -> dict[str, Any]:
    """What a user writes, as in docs/parallel.md."""
    app = {"name": "microscale", "route_prefix": "/", "import_path": "microscale.integrations.ray_serve:build"}
    http_options = {"host": "127.0.0.1", "port": port}
    return {"proxy_location": "HeadOnly", "http_options": http_options, "applications": [{**app, "args": dict(args)}]}


def serve_run(folder: Path, written: Mapping[str, Any]) -> None:
    """``serve run``, as a user does it, to the Ray that runs."""
    path = folder / "app.yaml"
    path.write_text(yaml.safe_dump(dict(written)))
    command = [str(Path(sys.executable).with_name("serve")), "run", "--non-blocking", str(path)]
    address = ray.get_runtime_context().gcs_address
    subprocess.run(command, env={**os.environ, "RAY_ADDRESS": address}, check=True, timeout=DEADLINE_S)


def wait_for(what: str, ready: Callable[[], bool]) -> float:
    """Seconds until ``ready``."""
    began = time.monotonic()
    while not ready():
        assert time.monotonic() - began < DEADLINE_S, f"{what}: not within {DEADLINE_S:g} s"
        time.sleep(0.1)
    return time.monotonic() - began


@dataclass
class Reply:
    """One answer, as far as it came."""

    status: int = 0
    replica: str = ""
    num_events: int = 0
    """With a piece of the answer in them."""
    errors: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    done: bool = False
    broken: str = ""
    """Why the connection ended, where it did so by itself."""
    first_s: float = 0.0
    text: str = ""

    @property
    def running(self) -> bool:
        return self.num_events > 0 and not (self.done or self.errors or self.broken)


class Client:
    """Calls 127.0.0.1, one connection for each request."""

    def __init__(self, port: int, key: str | None = None) -> None:
        self.port = port
        self.headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        connection.request("GET", path, headers={**self.headers, **(headers or {})})
        reply = connection.getresponse()
        return reply.status, reply.read().decode()

    def is_ready(self) -> bool:
        try:
            return self.get("/health")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def open(self, body: Mapping[str, Any], path: str = "/v1/completions") -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        connection.request("POST", path, body=json.dumps(dict(body)), headers=self.headers)
        return connection.getresponse()

    def stream(self, body: Mapping[str, Any], reply: Reply | None = None, path: str = "/v1/completions") -> Reply:
        """Read a stream to its end; ``reply`` grows while it comes."""
        reply = Reply() if reply is None else reply
        began = time.monotonic()
        try:
            response = self.open({**body, "stream": True}, path)
            reply.replica = response.headers.get("x-microscale-replica", "")
            reply.status = response.status
            if response.status != 200:
                reply.errors.append(json.loads(response.read())["error"])
                return reply
            for line in response:
                self._take(reply, line, began)
            if not (reply.done or reply.errors):
                reply.broken = "the stream ended without a word"
        except (OSError, http.client.HTTPException) as error:
            reply.broken = f"{type(error).__name__}: {error}"
        return reply

    def _take(self, reply: Reply, line: bytes, began: float) -> None:
        if not line.startswith(b"data: "):
            return
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            reply.done = True
            return
        event = json.loads(data)
        if "error" in event:
            reply.errors.append(event["error"])
        elif event.get("choices"):
            reply.first_s = reply.first_s or time.monotonic() - began
            reply.num_events += 1
            reply.text += event["choices"][0].get("text") or ""
        reply.usage = event.get("usage") or reply.usage


def replica_pids() -> dict[str, int]:
    """Replica's id → its process. A process holds its log open, whose name has the id."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            names = [os.readlink(fd) for fd in (process / "fd").iterdir()]
        except OSError:
            continue  # it has ended, or is another user's
        for name in names:
            if match := re.search(r"replica_microscale_Replica_(\w+)\.log$", name):
                found[match[1]] = int(process.name)
    return found


def engine_of(pid: int) -> int:
    """The engine process of a replica."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            if b"microscale.engine.process" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    raise AssertionError(f"process {pid} has no engine")


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def logs(folder: Path, replica: str) -> str:
    """What a replica logged."""
    found = folder.glob(f"session_latest/logs/serve/replica_microscale_Replica_{replica}.log*")
    return "".join(path.read_text() for path in found)
