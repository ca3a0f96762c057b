"""A proxy between a client and a server that writes each request and its answer to a folder, one JSON file each.

Run as a program: ``python recorder.py UPSTREAM FOLDER [PREFIX]``; it prints its address and serves until it is killed.
"""

from __future__ import annotations

import gzip
import http.client
import itertools
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PRIVATE = {"authorization", "x-api-key", "host"}
HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}


class Recorder(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, upstream: str, folder: Path, prefix: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.upstream = urlsplit(upstream)
        self.folder = folder
        self.prefix = prefix
        self.numbers = itertools.count(1)
        self.lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def write(self, record: dict[str, Any]) -> None:
        with self.lock:
            number = next(self.numbers)
        path = self.folder / f"{self.prefix}{number:03d}.json"
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False))


class Handler(BaseHTTPRequestHandler):
    server: Recorder
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        upstream = http.client.HTTPConnection(
            self.server.upstream.hostname or "", self.server.upstream.port, timeout=600
        )
        headers = {k: v for k, v in self.headers.items() if k.lower() not in {"host", "connection"}}
        upstream.request(self.command, self.path, body or None, headers)
        reply = upstream.getresponse()
        self.send_response(reply.status)
        for name, value in reply.getheaders():
            if name.lower() not in HOP:
                self.send_header(name, value)
        # Chunks as they came: some clients read a body without them only when it is whole.
        has_body = self.command != "HEAD" and reply.status not in (204, 304)
        self.send_header("transfer-encoding", "chunked") if has_body else None
        self.end_headers()
        taken = b""
        try:
            while chunk := reply.read1(65536):
                taken += chunk
                self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n" if has_body else b"")
        finally:
            self.server.write(
                {
                    "method": self.command,
                    "path": self.path,
                    "headers": {k: v for k, v in self.headers.items() if k.lower() not in PRIVATE},
                    "body": readable(body, self.headers.get("content-encoding")),
                    "status": reply.status,
                    "reply": readable(taken, reply.getheader("content-encoding")),
                }
            )

    do_GET = do_POST = do_HEAD = do_OPTIONS = do_DELETE = do_PUT = do_PATCH = forward


def readable(body: bytes, encoding: str | None) -> Any:
    if encoding == "gzip":
        body = gzip.decompress(body)
    text = body.decode(errors="replace")
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    recorder = Recorder(sys.argv[1], Path(sys.argv[2]), "".join(sys.argv[3:]))
    print(recorder.address, flush=True)
    recorder.serve_forever()
