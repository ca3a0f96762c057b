"""Each way in which a rank can be at fault is told in one sentence, and nobody waits for it any more."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from microscale.engine.ranks.messages import Assembled, Loaded, Prepared
from microscale.engine.ranks.team import _spawn
from microscale.engine.ranks.watch import Patience, Watch
from microscale.errors import BadCheckpoint, MicroscaleError, RankFailed
from support.child import as_process

LONG = 3600.0
"""A patience that no test outlasts: each has only that short which it is about."""


def command(how: str) -> tuple[str, ...]:
    return as_process("support.thin_rank", how)


@contextmanager
def watching(
    *hows: str, patience: Patience | None = None, waits: tuple[int, float | None] = (0, None)
) -> Iterator[Watch]:
    patience = patience or Patience(LONG, LONG, LONG, LONG)
    peers = [_spawn(rank, command(how)) for rank, how in enumerate(hows, 1)]
    watch = Watch(peers, patience, lambda: waits)
    try:
        yield watch
    finally:
        watch.close()
        for peer in peers:
            assert peer.process is not None
            peer.process.kill()
            peer.process.wait()
            peer.link.close()


def fault(watch: Watch, due: Sequence[type] = (Prepared, Loaded, Assembled)) -> MicroscaleError:
    """Waits for answers that do not come, as rank 0 would. A rank may be gone before it has said anything."""

    def wait() -> None:
        for kind in due:
            watch.wait_for(kind)

    with pytest.raises(MicroscaleError) as caught:
        wait()
    for peer in watch.peers:
        assert peer.process is not None
        peer.process.wait(60)  # none of them is left to wait for the others
    return caught.value


def test_killed() -> None:
    with watching("lives", "lives") as watch:
        second = watch.peers[1].process
        assert second is not None
        second.send_signal(signal.SIGKILL)
        said = str(fault(watch))
        assert said == f"Rank 2 (process {second.pid}) was killed by signal 9 (SIGKILL); the engine ends with it."


def test_stopped() -> None:
    with watching("lives", patience=Patience(LONG, LONG, 0.5, LONG)) as watch:
        process = watch.peers[0].process
        assert process is not None
        watch.wait_for(Prepared)
        watch.wait_for(Loaded)
        process.send_signal(signal.SIGSTOP)
        assert "has been stopped for" in str(fault(watch, [Assembled]))


def test_stopped_for_a_moment_is_forgiven() -> None:
    with watching("lives", patience=Patience(LONG, LONG, 30.0, LONG)) as watch:
        process = watch.peers[0].process
        assert process is not None
        watch.wait_for(Prepared)
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.6)
        process.send_signal(signal.SIGCONT)
        before = watch.peers[0].heard_at
        while watch.peers[0].heard_at == before:
            time.sleep(0.05)
        watch.check()


def test_silent() -> None:
    with watching("falls silent", patience=Patience(LONG, 1.0, LONG, LONG)) as watch:
        assert "has said nothing for" in str(fault(watch))


def test_silent_from_the_start() -> None:
    with watching("lives", patience=Patience(0.2, LONG, LONG, LONG)) as watch:
        process = watch.peers[0].process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        assert "has said nothing for" in str(fault(watch))


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("exits", RankFailed, "ended with status 3; the engine ends with it."),
        ("says what is wrong", BadCheckpoint, ": a tensor is missing"),
        ("talks nonsense", RankFailed, "cannot be understood: A message of 3 bytes"),
        ("lost another", RankFailed, "Connection closed by peer"),
    ],
)
def test_ended(how: str, kind: type[MicroscaleError], said: str) -> None:
    with watching(how) as watch:
        error = fault(watch)
        assert isinstance(error, kind)
        assert f"Rank 1 (process {watch.peers[0].process.pid})" in str(error)  # type: ignore[union-attr]
        assert said in str(error)


def test_who_lost_another_is_not_blamed_for_it() -> None:
    with watching("lost another", "exits", patience=Patience(LONG, LONG, LONG, LONG, LONG)) as watch:
        said = str(fault(watch))
        assert said.startswith("Rank 2 (process")
        assert "ended with status 3" in said


def test_other_sums() -> None:
    with watching("counts other sums", waits=(40, None)) as watch:
        watch.ran(7, 40)
        assert "disagrees with rank 0 on step 7: it has run 41 sums and rank 0 40." in str(fault(watch))


def test_too_slow() -> None:
    with watching("lives", patience=Patience(LONG, LONG, LONG, 0.5), waits=(40, time.monotonic())) as watch:
        said = str(fault(watch))
        assert "is too slow: sum 40 has taken" in said
        assert "Rank 1 (process" in said


def test_a_fault_that_nobody_waits_for_is_heard() -> None:
    heard = threading.Event()
    with watching("exits") as watch:
        watch.on_stuck = lambda error: heard.set()
        assert heard.wait(60)
