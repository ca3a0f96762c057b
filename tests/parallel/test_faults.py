"""Each way in which a rank can fail is reported in one sentence, and nothing waits for it any longer.

What happens when a real rank process is killed in the middle of a step is in ``test_ranks``.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch

from microscale.engine.config import EngineConfig
from microscale.engine.loading.prepare import prepare_team
from microscale.engine.ranks.__main__ import follow
from microscale.engine.ranks.leader import RankTeam
from microscale.engine.ranks.messages import Assembled, Join, Loaded, RankLink, RankPrepared, decode_for_leader
from microscale.engine.ranks.processes import Peer, spawn
from microscale.engine.ranks.watch import Patience, Watch
from microscale.errors import BadCheckpoint, MicroscaleError, RankFailed
from microscale.parallel import group
from microscale.parallel.group import Group, file_store
from microscale.parallel.sharding import Shard
from support.child import as_process
from support.ranks import PATIENT

DEMO = EngineConfig("demo", device="cpu", threads=1, tensor_parallel_size=2)


def thin(rank: int, how: str) -> Peer:
    return spawn(rank, as_process("support.thin_rank", how))


def process_of(peer: Peer) -> subprocess.Popen[bytes]:
    assert peer.process is not None
    return peer.process


@contextmanager
def watching(*hows: str, patience: Patience = PATIENT) -> Iterator[Watch]:
    peers = [thin(rank, how) for rank, how in enumerate(hows, 1)]
    watch = Watch(peers, patience)
    try:
        yield watch
    finally:
        watch.close()
        for peer in peers:
            peer.close(0.0)


def fault(watch: Watch, due: Sequence[type] = (RankPrepared, Loaded, Assembled)) -> MicroscaleError:
    """Wait for answers that do not come, as rank 0 does."""

    def wait() -> None:
        for kind in due:
            watch.wait_for(kind)

    with pytest.raises(MicroscaleError) as caught:
        wait()
    for peer in watch.peers:
        process_of(peer).wait(60)  # all ranks are ended
    return caught.value


def test_killed() -> None:
    with watching("lives", "lives") as watch:
        second = process_of(watch.peers[1])
        second.send_signal(signal.SIGKILL)
        reported = str(fault(watch))
    assert reported == f"Rank 2 (process {second.pid}) was killed by signal 9 (SIGKILL); the engine ends with it."


def test_stopped_before_it_has_prepared() -> None:
    with watching("lives", patience=Patience(0.2, 3600.0)) as watch:
        process_of(watch.peers[0]).send_signal(signal.SIGSTOP)
        assert "has been silent for" in str(fault(watch))


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("exits", RankFailed, "ended with status 3; the engine ends with it."),
        ("says what is wrong", BadCheckpoint, ": a tensor is missing"),
        ("talks nonsense", RankFailed, "does not follow the protocol: a message of 3 bytes"),
        ("falls silent", RankFailed, "has been silent for"),
    ],
)
def test_ended(how: str, kind: type[MicroscaleError], text: str) -> None:
    patience = Patience(3600.0, 1.0) if how == "falls silent" else PATIENT
    with watching(how, patience=patience) as watch:
        error = fault(watch)
        assert isinstance(error, kind)
        assert str(error).startswith(f"Rank 1 (process {process_of(watch.peers[0]).pid})")
        assert text in str(error)


def test_a_fault_is_reported_while_rank_0_is_idle() -> None:
    reported = threading.Event()
    with watching("exits") as watch:
        watch.on_stuck = lambda error: reported.set()
        assert reported.wait(60)


def test_another_checkpoint_is_refused_before_it_is_loaded() -> None:
    with pytest.raises(RankFailed, match=r"Rank 1 \(process \d+\) has a different .* than rank 0: "):
        prepare_team(RankTeam(DEMO, partial(thin, how="lives"), PATIENT))


def test_another_version_is_refused() -> None:
    ours, theirs = socket.socketpair()
    leader = RankLink(ours)
    leader.send(Join("0.0.1", 1, 2, DEMO, "cpu", 2))
    assert follow(RankLink(theirs)) == 1
    [message] = [decode_for_leader(payload) for payload in leader.read()]
    assert "rank 0 has 0.0.1; install the same version" in str(message)
    theirs.close()
    leader.close()


def test_a_sum_does_not_wait_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 hangs: it is alive and never adds up."""
    monkeypatch.setattr(group, "WAIT", timedelta(seconds=2))
    groups: list[Group] = []

    def connect(rank: int) -> None:
        groups.append(Group(Shard(rank, 2), file_store(str(tmp_path / "store"), 2), torch.device("cpu")))

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = next(each for each in groups if each.shard.is_first)
    with pytest.raises(RankFailed, match=r"Rank 0 lost another rank: .*[Tt]imed out"):
        first.sum(torch.ones(4))
