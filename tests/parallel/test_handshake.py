"""Who does not know the secret does not get in, is not believed, and keeps nobody waiting."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from microscale import settings
from microscale.cli.serve import nodes_of, under_torchrun
from microscale.errors import BadMessage, BadSetting, RankFailed
from microscale.parallel.handshake import accept, admit, connect, introduce, listen, read_secret

SECRET, OTHER = b"a secret of some length", b"another of some length"
HERE = "127.0.0.1"


def both(first: Callable[[socket.socket], None], second: Callable[[socket.socket], None]) -> list[Exception | None]:
    """What the two ends of a connection raise."""
    ends = socket.socketpair()
    raised: list[Exception | None] = [None, None]

    def run(place: int, work: Callable[[socket.socket], None]) -> None:
        with ends[place]:
            try:
                work(ends[place])
            except Exception as error:
                raised[place] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_those_who_know_it_believe_each_other() -> None:
    assert both(lambda sock: admit(sock, SECRET), lambda sock: introduce(sock, SECRET)) == [None, None]


def test_another_secret_is_refused_by_both() -> None:
    refused, told = both(lambda sock: admit(sock, SECRET), lambda sock: introduce(sock, OTHER))
    assert isinstance(refused, BadMessage)
    assert "does not know the secret" in str(refused)
    assert isinstance(told, BadMessage)
    assert "the secrets of --rank-secret-file differ" in str(told)


def test_a_false_leader_is_not_believed() -> None:
    def pretend(sock: socket.socket) -> None:
        sock.sendall(b"n" * 32)
        sock.recv(64)
        sock.sendall(b"p" * 32)

    _, told = both(pretend, lambda sock: introduce(sock, SECRET))
    assert isinstance(told, BadMessage)
    assert "does not know the secret" in str(told)


def test_a_proof_cannot_be_sent_back() -> None:
    """Who has no secret and answers with what the other said is not believed: the sides prove different things."""

    def reflect(sock: socket.socket) -> None:
        sock.sendall(b"n" * 32)
        said = sock.recv(64, socket.MSG_WAITALL)
        sock.sendall(said[32:])

    _, told = both(reflect, lambda sock: introduce(sock, SECRET))
    assert isinstance(told, BadMessage)


def test_strangers_are_turned_away_and_ranks_come_in() -> None:
    with listen(HERE, 0) as server:
        port = server.getsockname()[1]
        failures: list[Exception] = []

        def come() -> None:
            with socket.create_connection((HERE, port)) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 64)
                stranger.recv(64)
            for rank, secret in ((1, OTHER), (7, SECRET), (2, SECRET), (1, SECRET)):
                try:
                    found.append(connect(HERE, port, rank, secret))
                except BadMessage as error:
                    failures.append(error)

        found: list[socket.socket] = []
        thread = threading.Thread(target=come)
        thread.start()
        ranks = accept(server, {1, 2}, SECRET)
        thread.join()
        assert sorted(ranks) == [1, 2]
        assert len(failures) == 1
        for sock in (*ranks.values(), *found):
            sock.close()


def test_a_rank_that_does_not_come_is_named() -> None:
    with listen(HERE, 0) as server, pytest.raises(RankFailed, match=r"Rank 3 did not connect within 0 s"):
        accept(server, {3}, SECRET, within_s=0.1)


def test_a_leader_that_is_not_there_is_told() -> None:
    with listen(HERE, 0) as server:
        port = server.getsockname()[1]
    with pytest.raises(RankFailed, match=f"Rank 0 cannot be reached at {HERE} port {port}"):
        connect(HERE, port, 1, SECRET, within_s=0.1)


def test_a_short_secret_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("short\n")
    with pytest.raises(BadSetting, match="holds 5 bytes"):
        read_secret(file)
    with pytest.raises(BadSetting, match="cannot be read"):
        read_secret(tmp_path / "none")
    file.write_bytes(SECRET + b"\n")
    assert read_secret(file) == SECRET


def test_what_torchrun_says_is_understood(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET)
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": HERE, "MASTER_PORT": "29500"}
    assert settings.torchrun(env) is None  # somebody else's variables
    launched = settings.torchrun(env | {"TORCHELASTIC_RUN_ID": "none"})
    assert launched == settings.Torchrun(1, 2, 1, HERE, 29500)
    ranks = under_torchrun(launched, file)
    assert (ranks.world, ranks.node_rank, ranks.local_rank) == (2, 1, 1)
    assert ranks.nodes is not None
    assert (ranks.nodes.count, ranks.nodes.address, ranks.nodes.port) == (2, HERE, 29501)
    assert under_torchrun(settings.Torchrun(0, 1, 0, HERE, 1), None).nodes is None
    with pytest.raises(BadSetting, match="TORCHELASTIC_RUN_ID"):
        settings.torchrun({"TORCHELASTIC_RUN_ID": "none", "RANK": "x"})


def test_what_options_say_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET)
    assert nodes_of(1, 0, "", 29501, None) is None
    for given, said in (
        ((1, 1, "", 29501, None), "need --nnodes 2 or more"),
        ((2, 2, HERE, 29501, file), "--node-rank 2 is not below --nnodes 2"),
        ((2, 0, "", 29501, file), "needs --master-addr"),
        ((2, 0, HERE, 29501, None), "needs --rank-secret-file"),
    ):
        with pytest.raises(BadSetting, match=said):
            nodes_of(*given)
