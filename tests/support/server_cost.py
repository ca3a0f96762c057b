"""What the server itself costs: ``make cost``, on a quiet machine.

The engine is scripted, so all that is counted is the way of a token from the engine's socket to the client's. Cost is
the time that the server's main thread had a core, which other programs on the machine change little; throughput is by
the clock. Times of two versions on a shared machine differ by a quarter for no reason; where valgrind is installed its
count of instructions tells them apart.
"""

from __future__ import annotations

import json
import re
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from support.live_server import KEY, TURNS, Live, live

MODEL_LEN = 100_000
TEXT = "<|channel|>final<|message|>" + "and so on " * 4000
"""A plain answer, so that nearly every token is an event."""
CHUNK = 2**20
COUNTED = (300, 1300)
"""Tokens of the two streams whose instructions are counted."""


@dataclass(frozen=True)
class Cost:
    num_tokens: int
    wall_s: float
    server_s: float
    """Of the server's main thread."""

    @property
    def us_per_token(self) -> float:
        return self.server_s * 1e6 / self.num_tokens

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s


def request(max_tokens: int) -> bytes:
    fields = {"max_tokens": max_tokens, "ignore_eos": True, "stream": True, "seed": len(TURNS)}
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], **fields}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def on_core_s(pid: int) -> float:
    """Seconds that the main thread of a process has had a core."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def measure(server: Live, num_streams: int, max_tokens: int) -> Cost:
    """Stream, and read no more of it than that it ends well: this client must not take the time that is measured."""
    where = urlsplit(server.address)
    sockets = [socket.create_connection((where.hostname, where.port)) for _ in range(num_streams)]
    tails = dict.fromkeys(sockets, b"")
    asked = request(max_tokens)
    with selectors.DefaultSelector() as ready:
        began, before = time.perf_counter(), on_core_s(server.process.pid)
        for each in sockets:
            each.sendall(asked)
            ready.register(each, selectors.EVENT_READ)
        while ready.get_map():
            for key, _ in ready.select():
                data = key.fileobj.recv(CHUNK)  # type: ignore[union-attr]
                tails[key.fileobj] = (tails[key.fileobj] + data[-64:])[-64:]  # type: ignore[index]
                if not data:
                    ready.unregister(key.fileobj)
            if num_streams > 1:
                time.sleep(0.002)  # read much at once: this process shares the cores with those it measures
        cost = Cost(num_streams * max_tokens, time.perf_counter() - began, on_core_s(server.process.pid) - before)
    for each, tail in tails.items():
        each.close()
        assert b"data: [DONE]" in tail, tail
    return cost


def one_stream(log: Path, rounds: int = 8, num_tokens: int = 1000) -> list[Cost]:
    """At batch 1, with steps of a millisecond: every token is a chunk of its own. The cheapest round first."""
    with live(log, step_s=0.001, max_model_len=MODEL_LEN, turns=[TEXT]) as server:
        measure(server, 1, 200)
        costs = [measure(server, 1, num_tokens) for _ in range(rounds)]
    return sorted(costs, key=lambda cost: cost.us_per_token)


def many_streams(log: Path, num_tokens: int = 1000) -> Cost:
    """64 together, as fast as they go."""
    with live(log, step_s=0.0, max_model_len=MODEL_LEN, turns=[TEXT]) as server:
        measure(server, 64, 20)
        return measure(server, 64, num_tokens)


def instructions_per_token(folder: Path) -> int:
    """Of the server's main thread, by callgrind: a stream's less those of a shorter one, so that what a request costs
    whatever its length is left out."""
    under = ("valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/counts")
    counts = []
    # The steps are longer, for a server that runs some fifty times slower still gives every token a chunk of its own.
    with live(
        folder / "log", step_s=0.03, max_model_len=MODEL_LEN, under=(*under, "--separate-threads=yes"), turns=[TEXT]
    ) as server:
        control = ("callgrind_control", str(server.process.pid))
        measure(server, 1, 200)
        subprocess.run([*control, "-i", "on"], check=True, capture_output=True)
        for at, num_tokens in enumerate(COUNTED, 1):
            subprocess.run([*control, "-z"], check=True, capture_output=True)
            measure(server, 1, num_tokens)
            subprocess.run([*control, "-d"], check=True, capture_output=True)
            total = re.search(r"^totals: (\d+)$", (folder / f"counts.{at}-01").read_text(), re.MULTILINE)
            assert total is not None
            counts.append(int(total[1]))
    short, long = COUNTED
    return (counts[1] - counts[0]) // (long - short)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        ones = [cost.us_per_token for cost in one_stream(Path(folder) / "one")]
        print(
            f"one stream:   {ones[0]:.1f} to {ones[-1]:.1f} us of the server a token, {median(ones):.1f} in the middle"
        )
        many = many_streams(Path(folder) / "many")
        print(
            f"64 streams:   {many.tokens_per_s:.0f} tok/s in all, {many.us_per_token:.1f} us of the server a token "
            f"({many.num_tokens} tokens)"
        )
        if shutil.which("callgrind_control") is None:
            print("instructions: not counted, for valgrind is not installed")
        else:
            print(f"instructions: {instructions_per_token(Path(folder))} of the server a token, one stream")
    return 0


if __name__ == "__main__":
    sys.exit(main())
