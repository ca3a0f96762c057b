"""``doctor --peer``: both machines say the same of each other."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from microscale.cli.doctor import examine_peer
from microscale.engine.ranks import peer
from microscale.errors import BadMessage, BadSetting

SECRET = b"a secret of some length"
HERE = "127.0.0.1"


def free_port() -> int:
    with socket.create_server((HERE, 0)) as server:
        return int(server.getsockname()[1])


def test_two_machines_look_at_each_other() -> None:
    port, told = free_port(), []
    thread = threading.Thread(target=lambda: told.append(peer.host(HERE, port, SECRET)))
    thread.start()
    visited = peer.visit(HERE, port, SECRET)
    thread.join()
    (hosted,) = told
    for findings in (visited, hosted):
        by_name = {finding.name: finding for finding in findings}
        assert by_name["torch"].value.endswith(" on both")
        assert by_name["torch"].mend is None
        assert HERE in by_name["Network"].value
        assert by_name["Clocks"].value.endswith(" s apart")
        for name in ("Sum of 6 KiB", "Sum of 16 MiB"):
            assert "us over gloo" in by_name[name].value


def test_what_differs_has_a_mend() -> None:
    found = {each.name: each for each in peer.compare(peer.facts() | {"torch": "1.0", "clock": 0.0})}
    assert "1.0 there" in found["torch"].value
    assert found["torch"].mend == "Use the same torch on both machines."
    assert "time server" in (found["Clocks"].mend or "")


def test_nonsense_is_refused() -> None:
    for said in (b"\0\0\0\x02[]", b"\x7f\xff\xff\xff", b"\0\0\0\x05hello", b""):
        ends = socket.socketpair()
        with ends[0], ends[1]:
            ends[1].sendall(said)
            ends[1].shutdown(socket.SHUT_WR)
            with pytest.raises(BadMessage):
                peer._exchange(ends[0], {"port": 0})


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="needs --rank-secret-file"):
        examine_peer(HERE, "", 1, None)
    with pytest.raises(BadSetting, match="for the other"):
        examine_peer(HERE, HERE, 1, tmp_path)
