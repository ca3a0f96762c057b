"""What Ray's processes cost a token: CPU time of proxy, front and replica while streams pass through them.

``PYTHONPATH=tests python -m support.ray_cost``, in the environment of ``make test-ray``. Two kinds of streams tell a
request's cost from an event's: as many requests with few tokens, and with many. The embedded model on a CPU, or what
the application's arguments say: ``… -m support.ray_cost '{"model": "gpt-oss-20b", "load_format": "dummy"}'``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.ray_cluster import Client, config, free_port, running, serve_run, wait_for

ON_A_CPU = {"device": "cpu", "threads": 1}
SAME = {"min_replicas": 1, "max_num_seqs": 16, "messages_per_front": 1e6}
ROLES = {"proxy": "ProxyActor", "front": "ServeReplica:microscale:Front", "replica": "ServeReplica:microscale:Replica"}
NUM_REQUESTS, AT_ONCE, FEW, MANY = 48, 8, 2, 66


def cpu_s() -> dict[str, float]:
    """CPU seconds of each role's process so far, by what Ray calls it."""
    found = dict.fromkeys(ROLES, 0.0)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            title = (process / "cmdline").read_bytes().decode(errors="replace")
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        for role, name in ROLES.items():
            if title.startswith("ray::") and name in title:
                found[role] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def spent(client: Client, tokens: int) -> dict[str, float]:
    """CPU milliseconds of a request with so many tokens."""
    body = {"prompt": "1 + 1 =", "max_tokens": tokens, "ignore_eos": True}
    before = cpu_s()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        replies = list(pool.map(lambda _: client.stream(body), range(NUM_REQUESTS)))
    assert all(reply.done for reply in replies)
    return {role: 1e3 * (after - before[role]) / NUM_REQUESTS for role, after in cpu_s().items()}


def main() -> None:
    with tempfile.TemporaryDirectory() as name, running(Path(name)):
        port = free_port()
        given = json.loads(sys.argv[1]) if len(sys.argv) > 1 else ON_A_CPU
        serve_run(Path(name), config({**SAME, **given}, port))
        client = Client(port)
        wait_for("a replica", client.is_ready)
        spent(client, FEW)
        for _ in range(3):
            few, many = spent(client, FEW), spent(client, MANY)
            for role in ROLES:
                event_us = 1e3 * (many[role] - few[role]) / (MANY - FEW)
                print(f"{role:>8}: {few[role]:6.2f} ms a request, {event_us:6.0f} us a token")


if __name__ == "__main__":
    main()
