"""The process of a rank other than 0: ``python -m microscale.engine.ranks --fd N``.

Rank 0 (``team.RankTeam``) starts it with one end of a socket pair as file ``N``; nobody else can reach it. It says that
it is alive from the first moment on, while torch is imported, and ends when rank 0 does.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

import msgspec

from microscale.engine.protocol.messages import failure
from microscale.engine.ranks.link import Link, LinkClosed
from microscale.engine.ranks.messages import VERSION, Alive, Fault, Join, decode_for_follower
from microscale.engine.ranks.nodes import connect
from microscale.engine.ranks.progress import Progress
from microscale.errors import BadMessage, MicroscaleError, RankFailed
from microscale.parallel.handshake import read_secret

ALIVE_S = 1.0
GRACE_S = 0.5
"""What a step may still take when rank 0 is gone; then the process ends in the midst of it."""
log = logging.getLogger(__name__)


def say_alive(link: Link, progress: Progress) -> None:
    with contextlib.suppress(LinkClosed):
        while True:
            link.send(Alive(progress.number, progress.calls))
            time.sleep(ALIVE_S)


def tell_gone(sock: socket.socket) -> None:
    """On another machine somebody wonders why."""
    if sock.family != socket.AF_UNIX:
        log.warning("Rank 0 has ended or cannot be reached any more, and this rank ends with it.")


def end_with_leader(sock: socket.socket) -> None:
    """Rank 0 is gone: this process ends, whatever it waits for."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    poll.poll()
    time.sleep(GRACE_S)
    tell_gone(sock)
    os._exit(0)


def greet(link: Link) -> Join:
    join = decode_for_follower(link.next())
    if not isinstance(join, Join):
        raise BadMessage(f"Rank 0's first message must be Join and is {type(join).__name__}.")
    if join.version != VERSION:
        raise BadMessage(
            f"Rank 0 speaks version {join.version} of the ranks' messages and this rank version {VERSION}; run both "
            f"from one installation."
        )
    return join


def reach(options: argparse.Namespace) -> socket.socket:
    """The connection to rank 0: one that it gave to this process, or over the network."""
    if options.fd is not None:
        sock = socket.socket(fileno=options.fd)
        sock.set_inheritable(False)
        return sock
    host, port = options.leader
    return connect(host, int(port), options.rank, read_secret(options.secret_file))


def placed(join: Join, gpu: str | None) -> Join:
    """On this machine's own choice among its GPUs."""
    return msgspec.structs.replace(join, device=gpu) if gpu is not None and join.device.startswith("cuda") else join


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="microscale.engine.ranks", description="Started by rank 0.")
    parser.add_argument("--fd", type=int, help="The socket to rank 0.")
    parser.add_argument("--leader", nargs=2, metavar=("HOST", "PORT"), help="Rank 0 on another machine.")
    parser.add_argument("--rank", type=int, help="Which rank this is, on another machine.")
    parser.add_argument("--secret-file", type=Path, help="What rank 0 knows too.")
    parser.add_argument("--model", help="What this machine calls the model.")
    parser.add_argument("--gpu", help="The GPU to run on, where rank 0 wants one.")
    options = parser.parse_args(arguments)
    # Ctrl-C is for rank 0, which ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        sock = reach(options)
    except MicroscaleError as error:
        print(f"rank {options.rank}: {error}", file=sys.stderr)
        return 1
    link, progress = Link(sock), Progress()
    threading.Thread(target=say_alive, args=(link, progress), daemon=True).start()
    threading.Thread(target=end_with_leader, args=(sock,), daemon=True).start()
    try:
        join = greet(link)
        logging.basicConfig(level=logging.WARNING, format=f"rank {join.rank}: %(message)s")
        # Only now: it imports torch, which takes seconds.
        importlib.import_module("microscale.engine.ranks.follower").follow(
            link, placed(join, options.gpu), progress, options.model
        )
    except LinkClosed:
        tell_gone(sock)
        return 0
    except Exception as error:
        if not isinstance(error, MicroscaleError):
            traceback.print_exc()
        with contextlib.suppress(LinkClosed):
            link.send(Fault(*failure(error), lost=isinstance(error, RankFailed)))
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads and destructors of a group that has lost a rank can hang.
    os._exit(status)
