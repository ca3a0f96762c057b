"""A model hub on loopback: as much of it as a download asks for. It keeps a list of the files that were fetched."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0" * 40
TROUBLES = {"gated": (403, "GatedRepo"), "gone": (404, "RepoNotFound"), "broken": (400, "")}
"""Repositories that no download gets: the status, and the hub's own error code."""


@dataclass
class FakeHub:
    """Repositories by name, each with its files."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    """The size that the hub states for a file, where it is not its real one."""
    fetched: list[str] = field(default_factory=list)
    url: str = ""
    hold: threading.Event | None = None
    """Weights are sent when this is set."""


@contextmanager
def serve_hub(hub: FakeHub) -> Iterator[FakeHub]:
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        name = re.search(r"owner/([\w.-]+)", path)
        if name is None:  # the library asks for other things too
            return self._answer(404, b"{}")
        if name[1] in TROUBLES:
            status, code = TROUBLES[name[1]]
            return self._answer(status, b"{}", {"X-Error-Code": code})
        files = self.hub.repositories[name[1]]
        if "/tree/" in path:
            tree = [
                {"type": "file", "path": file, "size": self.hub.sizes.get(file, len(data)), "oid": "1" * 40}
                for file, data in files.items()
            ]
            return self._answer(200, json.dumps(tree).encode())
        if path.startswith("/api/"):
            siblings = [{"rfilename": file} for file in files]
            return self._answer(200, json.dumps({"id": name[0], "sha": COMMIT, "siblings": siblings}).encode())
        file = path.split(f"/resolve/{COMMIT}/")[1]
        if self.command == "GET":
            self.hub.fetched.append(file)
            if self.hub.hold is not None and file.endswith(".safetensors"):
                self.hub.hold.wait()
        headers = {"ETag": f'"{file}"', "X-Repo-Commit": COMMIT}
        return self._answer(200, files[file], headers, self.hub.sizes.get(file))

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str] = {}, size: int | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body) if size is None else size), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Keep the test's output clean."""
