"""A process that sends a rank's messages and computes nothing. It imports no torch."""

from __future__ import annotations

import os
import socket
import sys
import time

from microscale.engine.ranks.messages import Alive, Fault, Loaded, RankLink, RankPrepared


def main(how: str, sock: socket.socket) -> None:
    link = RankLink(sock)
    link.send(RankPrepared({}, {"checkpoint": "another one"}, {}))
    link.send(Loaded())
    if how == "exits":
        os._exit(3)
    if how == "says what is wrong":
        link.send(Fault("BadCheckpoint", "a tensor is missing"))
    if how == "talks nonsense":
        sock.sendall(b"\0\0\0\x03abc")
    beats = 2 if how == "falls silent" else 10**6
    for _ in range(beats):
        link.send(Alive())
        time.sleep(0.1)
    time.sleep(3600)


if __name__ == "__main__":
    main(sys.argv[1], socket.socket(fileno=int(sys.argv[-1])))
