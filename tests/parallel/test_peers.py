"""Memory that all ranks map: who torch finds under our name, and what happens where one rank cannot."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, _resolve_process_group

from microscale.errors import RankFailed
from microscale.parallel import exchange, peers
from microscale.parallel.answers import Answers
from microscale.parallel.exchange import Exchange, GivenUp
from microscale.parallel.peer_access import why_unmapped
from microscale.parallel.peers import Unmapped, map_peers, registered, why_unshareable
from microscale.parallel.sharding import Shard
from support.child import as_process
from support.host_peers import HostMemory

CPU = torch.device("cpu")
PATIENT_S = 120.0
AT_ONCE_S = 10.0
"""A rank that fails must not cost the others torch's timeout, which is minutes."""


def never() -> bool:
    return False


# ---- the name ----


def test_torch_finds_store_rank_and_size_under_the_name_meanwhile() -> None:
    store = HashStore()
    open_before = len(os.listdir("/proc/self/fd"))
    with registered(store, Shard(1, 3)) as name:
        group = _resolve_process_group(name)
        assert (group.rank(), group.size()) == (1, 3)
        group.get_group_store().set("key", "value")
        assert store.get("key") == b"value"
        assert len(os.listdir("/proc/self/fd")) == open_before  # no socket
        with registered(store, Shard(1, 3)) as other:
            assert other != name
    for gone in (name, other):
        with pytest.raises(RuntimeError, match="Could not resolve the process group"):
            _resolve_process_group(gone)


def test_the_name_goes_with_an_error() -> None:
    with pytest.raises(ValueError, match="of ours"), registered(HashStore(), Shard(0, 2)) as name:
        raise ValueError("of ours")
    with pytest.raises(RuntimeError):
        _resolve_process_group(name)


# ---- the exchange ----


def test_ranks_meet_whatever_their_processes_have_exchanged_before() -> None:
    """As torch calls it, from C++."""
    store = HashStore()
    exchanges = [Exchange(store, never) for _ in range(2)]
    old, fresh = (PrefixStore("torch", each) for each in exchanges)
    for number in range(3):
        old.set(f"CUDASymmetricMemory/{number + 40}/0", f"old {number}")
        fresh.set(f"CUDASymmetricMemory/{number}/1", f"fresh {number}")
        for each, first in ((old, 40), (fresh, 0)):
            keys = [f"CUDASymmetricMemory/{number + first}/{rank}" for rank in range(2)]
            each.wait(keys[:1])
            assert each.check(keys)
            assert each.get(keys[1]) == f"fresh {number}".encode()
            assert each.multi_get(keys) == [f"old {number}".encode(), f"fresh {number}".encode()]
    assert old.add("CUDASymmetricMemory/43/num_members", 1) == 1
    assert fresh.add("CUDASymmetricMemory/3/num_members", 1) == 2
    old.set("no number", "here")
    assert fresh.get("no number") == b"here"


def test_a_wait_ends_when_another_rank_has_failed() -> None:
    failed = threading.Event()
    store = Exchange(HashStore(), failed.is_set)
    threading.Timer(0.2, failed.set).start()
    began = time.monotonic()
    with pytest.raises(GivenUp):
        PrefixStore("torch", store).multi_get(["CUDASymmetricMemory/0/1"])
    assert 0.15 < time.monotonic() - began < AT_ONCE_S


def test_other_threads_run_while_one_waits() -> None:
    """Torch holds the interpreter while it exchanges; a rank says every second that it is alive."""
    beats: list[float] = []
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.01):
            beats.append(time.monotonic())
        failed.set()

    failed = threading.Event()
    threading.Timer(0.5, over.set).start()
    threading.Thread(target=beat).start()
    store = Exchange(HashStore(), failed.is_set)
    with pytest.raises(GivenUp):
        PrefixStore("torch", store).wait(["key"], timedelta(seconds=0.1))
    assert len(beats) > 5


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "PATIENCE_S", 0.1)
    store = Exchange(HashStore(), never)
    with pytest.raises(RuntimeError, match="another rank has said nothing"):
        PrefixStore("torch", store).get("CUDASymmetricMemory/0/1")


# ---- what ranks say of themselves ----


@pytest.mark.parametrize(
    ("said", "why_not"),
    [
        ([None, None, None], None),
        (["it is off", "it is off", "it is off"], "it is off"),
        ([None, "no access", None], "rank 1: no access"),
        ([None, "no access", "no memory"], "rank 1: no access"),
        (["yes", None, None], "rank 0: yes"),
    ],
)
def test_all_ranks_hear_the_same_reason(said: list[str | None], why_not: str | None, tmp_path: Path) -> None:
    stores: list[Store] = [FileStore(str(tmp_path / "store"), len(said)) for _ in said]
    ranks = [Answers(store, Shard(rank, len(said)), "able") for rank, store in enumerate(stores)]
    assert not ranks[0].refused()
    for rank, reason in zip(ranks, said, strict=True):
        rank.say(reason)
    assert [rank.why_not() for rank in ranks] == [why_not] * len(said)
    assert ranks[-1].refused() == (why_not is not None)


def test_a_rank_that_never_answers_is_lost() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    answers = Answers(store, Shard(0, 2), "able")
    answers.say(None)
    with pytest.raises(RankFailed, match="Rank 0 lost another rank"):
        answers.why_not()


# ---- mapping ----


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_torch_itself_says_why_it_cannot(device: str) -> None:
    """Its own symmetric memory, without a GPU: the reason reaches the caller, and nothing is left behind."""
    if device != "cpu" and torch.cuda.is_available():
        pytest.skip("a GPU can")
    found = map_peers(HashStore(), Shard(0, 1), torch.device(device), 4096)
    assert found == Unmapped(f"SymmetricMemory does not support device type {device.partition(':')[0]}")
    assert why_unshareable(torch.device(device), 4096) == found.because


def test_a_gpu_that_is_not_there_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    assert why_unmapped(torch.device("cuda:1"), [0, 1]) is None
    assert why_unmapped(torch.device("cuda:1"), [0, 1, 2]) == "there is no GPU 2"


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("at", ["alloc", "export", "import"])
def test_one_rank_that_cannot_map_ends_the_wait_of_all(
    world: int, at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = world - 1
    monkeypatch.setattr(peers, "_SymmetricMemory", HostMemory(tmp_path, {failing: at}))
    store = HashStore()
    began = time.monotonic()
    with ThreadPoolExecutor(world) as ranks:
        found = list(ranks.map(lambda rank: map_peers(store, Shard(rank, world), CPU, 256), range(world)))
    assert found == [Unmapped(f"rank {failing}: CUDA driver error: {at} is not supported")] * world
    assert time.monotonic() - began < AT_ONCE_S


def run_ranks(world: int, tmp_path: Path, fails: Mapping[int, str]) -> tuple[list[dict[str, Any]], list[str]]:
    """What each of these processes tells, and what all of them log of sums."""
    store = str(tmp_path / "store")
    processes = [
        subprocess.Popen(
            as_process("support.joining_rank", str(rank), str(world), store, *fails.get(rank, "").split()),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [process.communicate(timeout=PATIENT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * world, said
    told = [json.loads(out) for out, _ in said]
    for rank, each in enumerate(told):
        assert each["found"] == [[rank, world]]
        assert (each["names"], each["left"]) == (1, [])
        assert each["seconds"] < AT_ONCE_S
    return told, [line for _, err in said for line in err.splitlines() if "sum" in line.lower()]


def test_three_processes_map_each_others_memory(tmp_path: Path) -> None:
    told, _ = run_ranks(3, tmp_path, {})
    for rank in told:
        assert rank["zeros"]
        assert rank["seen"] == [[1, 2, 3]] * 3


def test_of_three_processes_one_cannot_map(tmp_path: Path) -> None:
    told, _ = run_ranks(3, tmp_path, {0: "import"})
    assert [rank["because"] for rank in told] == ["rank 0: CUDA driver error: import is not supported"] * 3


def test_two_processes_add_up_through_mapped_memory(tmp_path: Path) -> None:
    told, logged = run_ranks(2, tmp_path, {})
    assert [rank["peers"] for rank in told] == [True, True]
    assert logged == ["Small sums go through peers, others by nccl."]


def test_of_two_processes_one_cannot_map_and_both_leave_sums_to_the_library(tmp_path: Path) -> None:
    told, logged = run_ranks(2, tmp_path, {1: "export"})
    reason = "rank 1: CUDA driver error: export is not supported"
    for rank in told:
        assert not rank["peers"]
        assert rank["sum"] == 2.0
        assert rank["told"].startswith("all: NCCL")
        assert f"not through peer-mapped memory: {reason}" in rank["told"]
    assert logged == [f"All sums go by nccl, none through peer-mapped memory: {reason}."]


def test_what_is_demanded_and_cannot_be_is_an_error_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MICROSCALE_PEER_SUMS", "1")
    told, logged = run_ranks(2, tmp_path, {1: "import"})
    assert [rank["error"] for rank in told] == [
        "No sum can go through peer-mapped memory, as MICROSCALE_PEER_SUMS=1 demands: rank 1: CUDA driver error: "
        "import is not supported; without it all go by nccl."
    ] * 2
    assert not logged
