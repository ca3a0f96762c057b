"""Models whose small sums go through peer-mapped memory: the same bits, in one launch with what follows."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from msgspec import structs
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store

from microscale import hardware
from microscale.backends.decision import Plan
from microscale.backends.ops import Activations, Ops, Preference, recording
from microscale.backends.peer_ranks import peer_bytes, record_sums, shape_ranks
from microscale.backends.plan import Setup
from microscale.backends.precision import EXACT
from microscale.backends.ranks import ALONE, Absent
from microscale.engine.config import EngineConfig
from microscale.engine.loading import prepare as preparing
from microscale.engine.loading.description import RanksTold, describe
from microscale.engine.loading.fit import refusal
from microscale.engine.loading.joining import joined_as, peer_buffer
from microscale.engine.loading.warming import recorded
from microscale.engine.ranks.summing import agree_on_sums
from microscale.errors import RankFailed, Unsupported
from microscale.explain.report import Question, explain
from microscale.explain.speed_text import prediction_lines
from microscale.explain.text import render
from microscale.hardware import cpu, known
from microscale.hardware.sums import PEER_ROWS, Joined, sums_table
from microscale.models.batch import Chunk, build_batch
from microscale.models.config import LayerKind
from microscale.models.families import AnyModel, build_model, open_weights, preset
from microscale.models.taps import Taps
from microscale.parallel.group import Group
from microscale.parallel.nodes import Nodes
from microscale.parallel.sharding import Shard
from microscale.parallel.transport import Transport
from microscale_lab.prove import inventory
from support import tiny_checkpoints
from support.thread_ranks import ThreadRank, run_ranks

CPU = torch.device("cpu")
TOKENS = [3, 1, 4, 1, 5, 9, 2]


class FusingRank(ThreadRank):
    """Leaves sums to the norm behind them, up to ``most`` rows."""

    most = 4
    fused = 0

    def fuses(self, part: Tensor) -> bool:
        return part.shape[0] <= self.most

    def sum_add_norm(self, part: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        self.fused += 1
        total = self.sum(part) + residual
        scale = (total.square().mean(-1, keepdim=True) + epsilon).rsqrt()
        return total * scale * weight, total


@dataclass(frozen=True)
class MetRank:
    """What ``agree_on_sums`` asks of a group before it maps anything."""

    ranks: ThreadRank
    shard: Shard
    store: Store

    @property
    def world(self) -> int:
        return self.shard.world


def run_model(model: AnyModel) -> tuple[Tensor, Tensor]:
    """Logits and taps of a prompt and of one token after it."""
    pages = dict.fromkeys(LayerKind, range(3))
    cache = model.new_cache(dict.fromkeys(LayerKind, 3))
    taps = Taps.empty((1, model.config.num_layers), len(TOKENS), model.config.hidden, model.ops.dtype, CPU)
    found = []
    for first, tokens in ((0, TOKENS[:-1]), (len(TOKENS) - 1, TOKENS[-1:])):
        batch = build_batch([Chunk(tokens, first, pages, 1)], 4, CPU)
        found.append(model.forward(batch, cache, taps.first(len(tokens))).values)
    return torch.cat(found), taps.rows[:1].clone()


def test_a_sum_that_the_norm_takes_gives_the_same_numbers(tmp_path: Path) -> None:
    folder = tiny_checkpoints.write_hf(tmp_path, tiny_checkpoints.CASES["heads_4_2"], shards=1)

    def work(ranks: ThreadRank, rank: int, *, fusing: bool) -> tuple[Tensor, Tensor, int]:
        if fusing:
            ranks.__class__ = FusingRank
        weights = open_weights(str(folder), shard=Shard(rank, 2))
        ops = Ops(cpu(), Activations.FLOAT32, Preference(), ranks=ranks)
        with weights.reading(CPU, lambda done, total: None):
            model = build_model(weights, ops, CPU, 4, lambda: None)
        return *run_model(model), getattr(ranks, "fused", 0)

    num_layers = tiny_checkpoints.CASES["heads_4_2"].num_layers
    apart = run_ranks(2, lambda ranks, rank: work(ranks, rank, fusing=False))
    fused = run_ranks(2, lambda ranks, rank: work(ranks, rank, fusing=True))
    for (logits, taps, none), (same_logits, same_taps, count) in zip(apart, fused, strict=True):
        assert none == 0
        # Of the prompt the last layer's, which one row passes; of the token after it all layers'.
        assert count == 1 + num_layers
        assert torch.allclose(logits, same_logits, rtol=1e-5, atol=1e-5 * float(logits.abs().max()))
        assert torch.allclose(taps, same_taps, rtol=1e-5, atol=1e-5 * float(taps.abs().max()))


def test_what_is_larger_or_odd_goes_by_the_library() -> None:
    heard: list[tuple[int, ...]] = []

    class Library(Absent):
        def sum(self, part: Tensor) -> Tensor:
            heard.append(tuple(part.shape))
            return part

        def count(self) -> None: ...

        def uncapturable(self, tokens: int) -> str | None:
            return "it passes the host"

    ranks = shape_ranks(2)
    ranks._library = Library(2)

    def part(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    with recording() as found:
        for small in (part(PEER_ROWS, 2880), part(2, 32, 64), part(1, 4, dtype=torch.float32)):
            assert ranks.sum(small).shape == small.shape
        assert not heard
        assert len(found) == 3
        for large in (part(PEER_ROWS + 1, 2880), part(1, 20000), part(0, 64), part(1, 64, dtype=torch.float16)):
            assert ranks.sum(large) is large
            assert not ranks.fuses(large)
        assert len(heard) == 4
        assert len(found) == 3
    assert ranks.fuses(part(2, 64))
    assert not ranks.fuses(part(2, 64, dtype=torch.float32))
    assert ranks.uncapturable(PEER_ROWS // 2) is None
    assert ranks.uncapturable(PEER_ROWS) == "it passes the host"
    with pytest.raises(Unsupported):
        ALONE.sum_add_norm(part(1, 64), part(1, 64), part(64), 1e-5)


def test_sums_are_proved_and_warmed() -> None:
    sums = set(record_sums(2880, 2))
    assert len(sums) == 3  # alone, with the norm, and what draft heads tell each other
    gpu = known("h200")
    listed = inventory.recorded(gpu, ["gpt-oss-20b"], inventory.SETTINGS[:1])
    assert sums <= set(listed)
    assert all(listed[kernel] == ["gpt-oss-20b on several ranks"] for kernel in sums)
    config = preset("gpt-oss-20b", {"num_hidden_layers": 2})
    warmed = recorded(config.sharded(Shard(0, 2)), Setup(gpu, Activations.BF16), 16, 8)
    assert {kernel for kernel in warmed if kernel.op == "sums"} == set(record_sums(2880, 2, draft_head=False))
    assert not [kernel for kernel in recorded(config, Setup(gpu, Activations.BF16), 16, 8) if kernel.op == "sums"]


@pytest.mark.parametrize("refusing", [{0}, {1}, {0, 1}])
def test_one_rank_that_knows_that_it_cannot_map_is_enough_for_the_library(refusing: set[int]) -> None:
    store = HashStore()

    def work(ranks: ThreadRank, rank: int) -> tuple[bool, str | None]:
        joined = Joined(2, unmapped="it has no access" if rank in refusing else None)
        group = cast(Group, MetRank(ranks, Shard(rank, 2), store))
        found, seen = agree_on_sums(group, joined, CPU)
        return found is group, seen.refuses_peers()

    answers = run_ranks(2, work)
    assert [kept for kept, _ in answers] == [True, True]
    reason = "it has no access" if len(refusing) == 2 else f"rank {min(refusing)}: it has no access"
    assert [seen for _, seen in answers] == [reason] * 2


def test_what_is_demanded_is_not_given_up_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MICROSCALE_PEER_SUMS", "1")
    store = HashStore()

    def work(ranks: ThreadRank, rank: int) -> str:
        group = cast(Group, MetRank(ranks, Shard(rank, 3), store))
        with pytest.raises(RankFailed) as failed:
            agree_on_sums(group, Joined(3), CPU)
        kept, _ = agree_on_sums(group, Joined(3, on_gpus=False, own_gpus=False), CPU)
        assert kept is group  # ranks on a CPU have nothing to map
        return str(failed.value)

    said = run_ranks(3, work)
    assert len(set(said)) == 1
    assert "MICROSCALE_PEER_SUMS=1 demands: there are kernels for 2, 4, 8 ranks, not for 3; without it" in said[0]


def test_ranks_on_a_cpu_are_joined_by_gloo() -> None:
    options = EngineConfig("demo", device="cpu", shard=Shard(0, 2), tensor_parallel_size=2)
    joined = joined_as(options, Transport.GLOO, CPU)
    assert joined.backend == "gloo"
    assert "CPU" in str(joined.refuses_peers())


@pytest.mark.parametrize(("card", "ways"), [("h200", ["peers", "nccl"]), ("rtx5090", ["nccl"]), ("gb10", ["nccl"])])
def test_explain_says_which_way_sums_go(card: str, ways: list[str]) -> None:
    report = explain(Question("gpt-oss-120b", card, tensor_parallel_size=2))
    told = report.to_json()["tensor_parallel"]
    assert [line["reduction"] for line in told["sums"]] == ways
    assert "peer-mapped memory" in " ".join(" ".join(prediction_lines(report)).split())
    assert "tensor_parallel" not in explain(Question("gpt-oss-120b", card)).to_json()


def test_the_plan_of_a_server_says_it_too() -> None:
    told = RanksTold([{"weights": 5}, {"weights": 4}], sums_table(Joined(2), 5760)).to_json()
    assert told["ranks"] == [{"weights": 5}, {"weights": 4}]
    assert [(line["reduction"], line["up_to_rows"]) for line in told["sums"]] == [("peers", 64), ("nccl", None)]


def test_the_buffer_for_other_ranks_counts_in_memory() -> None:
    two, off = (explain(Question("gpt-oss-120b", card, tensor_parallel_size=2)) for card in ("h200", "rtx5090"))
    memory = two.memory
    assert two.to_json()["memory"]["bytes"]["peer_buffer"] == memory.peer_buffer == peer_bytes(2) > 8 << 20
    without = replace(memory, workload=replace(memory.workload, peer_buffer=0))
    assert memory.needed - without.needed == peer_bytes(2)
    assert "peer buffer" in "\n".join(render(two))
    assert (off.memory.peer_buffer, "peer buffer" in "\n".join(render(off))) == (0, False)
    assert explain(Question("gpt-oss-120b", "h200")).memory.peer_buffer == 0
    assert explain(Question("gpt-oss-120b", "h200", tensor_parallel_size=8)).memory.peer_buffer == peer_bytes(8)


def test_memory_that_only_the_buffer_overfills_is_refused() -> None:
    report = explain(Question("gpt-oss-120b", "h200", tensor_parallel_size=2))
    full = replace(report.memory, usable=report.memory.needed - peer_bytes(2) // 2)
    assert not full.fits
    assert "peer-mapped buffer 0.01" in refusal(report.outline, report.setup, full)
    assert replace(full, workload=replace(full.workload, peer_buffer=0)).fits


def test_a_rank_prepares_room_for_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)

    def room(world: int, device: torch.device = gpu, **others: Any) -> int:
        options = EngineConfig("demo", shard=Shard(0, world), tensor_parallel_size=world)
        return peer_buffer(structs.replace(options, **others), device)

    assert [room(world) for world in (1, 2, 3, 8)] == [0, peer_bytes(2), 0, peer_bytes(8)]
    assert room(2, CPU) == 0
    assert room(2, tensor_parallel_size=1) == 0  # one rank's part alone
    assert room(2, nodes=Nodes(2, "10.0.0.1", 1, "secret")) == 0
    assert room(2, sharing=2) == 0
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    assert room(2, sharing=2) == peer_bytes(2)
    monkeypatch.setenv("MICROSCALE_PEER_SUMS", "0")
    assert room(2) == 0
    monkeypatch.delenv("MICROSCALE_PEER_SUMS")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)
    assert room(2) == 0


def test_what_a_rank_prepares_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "peer_buffer", lambda options, device: 12345)
    memory = preparing.prepare(EngineConfig("demo", device="cpu")).memory
    assert memory.by_kind()["peer_buffer"] == 12345
    told = json.loads(describe(Plan(), EXACT, memory, memory.pages()))
    assert told["memory"]["peer_buffer"] == 12345


def test_explain_says_where_sums_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MICROSCALE_PEER_SUMS", "0")
    report = explain(Question("gpt-oss-120b", "h200", tensor_parallel_size=2))
    [line] = report.to_json()["tensor_parallel"]["sums"]
    assert "MICROSCALE_PEER_SUMS is off" in line["because"]
    assert report.memory.peer_buffer == 0


def test_explain_asks_the_driver_where_this_machine_has_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "detect", lambda: known("h200"))
    monkeypatch.setattr(hardware, "available_memory", lambda gpu: 130 * hardware.GIB)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)
    here = explain(Question("gpt-oss-120b", tensor_parallel_size=2))
    assert "GPU 0 has no access to the memory of GPU 1" in here.sums[0].because
    # Of four such cards this machine knows nothing.
    assert explain(Question("gpt-oss-120b", tensor_parallel_size=4)).sums[0].reduction == "peers"


def test_the_plan_of_a_server_says_why_memory_was_not_mapped() -> None:
    joined = replace(Joined(2), unmapped="rank 1: CUDA driver error: out of memory")
    [line] = RanksTold([], sums_table(joined, 5760)).to_json()["sums"]
    assert line["because"].endswith("not through peer-mapped memory: rank 1: CUDA driver error: out of memory")
