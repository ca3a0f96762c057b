"""A machine that holds some ranks of a model and not rank 0: starts their processes and waits for their end."""

from __future__ import annotations

import subprocess
import sys
import time

from microscale.engine.ranks.command import COMMAND, END_S
from microscale.parallel.nodes import Nodes

TURN_S = 0.2


def run_node(model: str, world: int, nodes: Nodes, node_rank: int, device: str | None = None) -> int:
    """Until all of its ranks have ended; the exit status. They say themselves what went wrong. ``device``: a GPU for
    them, where there is one; without, what rank 0 says."""
    each = world // nodes.count
    where = ["--leader", nodes.address, str(nodes.port), "--secret-file", nodes.secret_file, "--model", model]
    if device is not None:
        where += ["--gpu", device]
    ranks = range(node_rank * each, (node_rank + 1) * each)
    running = [subprocess.Popen([*COMMAND, *where, "--rank", str(rank)], stdin=subprocess.DEVNULL) for rank in ranks]
    print(f"Ranks {ranks.start} to {ranks.stop - 1} of {world} run here.", file=sys.stderr, flush=True)
    try:
        while all(process.poll() is None for process in running):
            time.sleep(TURN_S)
        # One has ended: the others end with it, by themselves if they can.
        deadline = time.monotonic() + END_S
        statuses = [_ended(process, deadline) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return max(statuses, key=abs)


def _ended(process: subprocess.Popen[bytes], deadline: float) -> int:
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return 1
