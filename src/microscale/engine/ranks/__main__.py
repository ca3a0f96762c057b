"""The process of a rank other than 0: ``python -m microscale.engine.ranks``.

Rank 0 (``leader.RankTeam``) starts it with ``--fd N``, one end of a socket pair. On another machine
``processes.run_node`` starts it with ``--leader``. It sends heartbeats from the first moment, while torch is imported,
and ends when rank 0 does, whatever it is waiting for.
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

from microscale.engine.process.connection import end_with_owner
from microscale.engine.protocol.messages import failure
from microscale.engine.ranks.messages import Alive, Fault, Join, LinkClosed, RankLink
from microscale.engine.ranks.watch import BLAME_S
from microscale.errors import BadMessage, MicroscaleError, RankFailed
from microscale.parallel.handshake import connect, read_secret
from microscale.version import __version__

ALIVE_S = 1.0
GRACE_S = 0.5
"""How long a step may go on after rank 0 is gone. Then the process ends in the middle of it."""
log = logging.getLogger(__name__)


def send_heartbeats(link: RankLink) -> None:
    with contextlib.suppress(LinkClosed):
        while True:
            link.send(Alive())
            time.sleep(ALIVE_S)


def end_with_leader(sock: socket.socket) -> None:
    """End this process when rank 0 is gone, whatever it is waiting for."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    poll.poll()
    time.sleep(GRACE_S)
    warn_gone(sock)
    os._exit(0)


def warn_gone(sock: socket.socket) -> None:
    """The log of another machine must say why this process has ended."""
    if sock.family != socket.AF_UNIX:
        log.warning("Rank 0 has ended or can no longer be reached, so this rank ends too.")


def greet(link: RankLink) -> Join:
    join = link.next()
    if not isinstance(join, Join):
        raise BadMessage(f"Rank 0's first message must be Join and is {type(join).__name__}.")
    if join.version != __version__:
        raise BadMessage(
            f"This machine has Microscale {__version__} and rank 0 has {join.version}; install the same version."
        )
    return join


def reach(options: argparse.Namespace) -> socket.socket:
    """The connection to rank 0: an inherited one, or one over the network."""
    if options.fd is not None:
        sock = socket.socket(fileno=options.fd)
        sock.set_inheritable(False)
        return sock
    host, port = options.leader
    return connect(host, int(port), options.rank, read_secret(options.secret_file))


def follow(link: RankLink, model: str | None = None, gpu: str | None = None) -> int:
    """Run until rank 0 says stop, and report what goes wrong. Returns the exit status."""
    try:
        join = greet(link)
        logging.basicConfig(level=logging.WARNING, format=f"rank {join.rank}: %(message)s")
        if gpu is not None and join.device.startswith("cuda"):
            join = msgspec.structs.replace(join, device=gpu)
        # Imported only now, because it imports torch, which takes seconds.
        importlib.import_module("microscale.engine.ranks.follower").follow(link, join, model)
    except LinkClosed:
        warn_gone(link.sock)
        return 0
    except Exception as error:
        if not isinstance(error, MicroscaleError):
            traceback.print_exc()
        if isinstance(error, RankFailed):
            time.sleep(BLAME_S)  # the rank that failed is reported first
        with contextlib.suppress(LinkClosed):
            link.send(Fault(*failure(error)))
        return 1
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="microscale.engine.ranks", description="Started by rank 0 or by serve.")
    parser.add_argument("--fd", type=int, help="The socket to rank 0.")
    parser.add_argument("--leader", nargs=2, metavar=("HOST", "PORT"), help="Rank 0 on another machine.")
    parser.add_argument("--rank", type=int, help="The number of this rank, with --leader.")
    parser.add_argument("--secret-file", type=Path, help="The secret that all machines share.")
    parser.add_argument("--model", help="This machine's name for the model.")
    parser.add_argument("--gpu", help="The GPU to use instead of the one that rank 0 chooses.")
    options = parser.parse_args(arguments)
    end_with_owner()
    # Ctrl-C is for rank 0, which ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        sock = reach(options)
    except MicroscaleError as error:
        print(f"rank {options.rank}: {error}", file=sys.stderr)
        return 1
    link = RankLink(sock)
    threading.Thread(target=send_heartbeats, args=(link,), daemon=True).start()
    threading.Thread(target=end_with_leader, args=(sock,), daemon=True).start()
    return follow(link, options.model, options.gpu)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads and destructors of a group that has lost a rank can hang.
    os._exit(status)
