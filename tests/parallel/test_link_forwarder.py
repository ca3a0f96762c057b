"""The slow link of ``make test-links`` delays all packets, loses the ones it should, and keeps their order."""

from __future__ import annotations

import os
import socket
import threading

from support.link_forwarder import Direction, run


def test_packets_come_late_and_in_order() -> None:
    way = Direction(0.02, 0)
    arrived: list[bytes] = []
    for number in range(3):
        way.take(bytes([number]), now=number * 0.01)
    way.deliver(0.019, arrived.append)
    assert not arrived
    assert abs(way.due_s(0.019) - 0.001) < 1e-9
    way.deliver(0.031, arrived.append)
    assert arrived == [b"\x00", b"\x01"]
    way.deliver(1.0, arrived.append)
    assert arrived == [b"\x00", b"\x01", b"\x02"]
    assert way.report()["least_delay_ms"] >= 20.0


def test_one_in_so_many_is_lost() -> None:
    way = Direction(0.0, 100)
    for _ in range(1000):
        way.take(b"x", 0.0)
    assert (way.lost, len(way.waiting)) == (10, 990)


def test_a_cut_link_loses_all_that_is_on_its_way() -> None:
    way = Direction(0.02, 0)
    way.take(b"x", 0.0)
    way.is_cut = True
    way.take(b"y", 0.0)
    arrived: list[bytes] = []
    way.deliver(1.0, arrived.append)
    assert (arrived, way.lost) == ([], 2)


def test_it_forwards_both_ways() -> None:
    """Datagrams of socket pairs in the place of TUN devices."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
    (one, first), (other, second) = pairs
    ways, over = (Direction(0.01, 0), Direction(0.01, 0)), threading.Event()
    thread = threading.Thread(target=run, args=((first.fileno(), second.fileno()), ways, over.is_set))
    thread.start()
    try:
        one.send(b"there")
        assert other.recv(100) == b"there"
        other.send(b"back")
        assert one.recv(100) == b"back"
    finally:
        over.set()
        os.write(one.fileno(), b"wakes it")
        thread.join()
        for pair in pairs:
            for end in pair:
                end.close()
    assert all(way.report()["least_delay_ms"] >= 10.0 for way in ways)
