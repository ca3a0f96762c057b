"""A rank's part of a tensor is what slicing the whole tensor gives, and no more is read than the docs say."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from microscale.models.checkpoint import Checkpoint
from microscale.models.families import open_weights
from microscale.models.reading import parts as parts_module
from microscale.models.reading.file import BLOCK
from microscale.models.reading.parts import AxisPiece, RankPart
from microscale.parallel.sharding import WHOLE, Shard
from microscale_lab.model_bench.random_checkpoint import write_random_checkpoint

CPU = torch.device("cpu")


def sliced(whole: Tensor, part: RankPart) -> Tensor:
    """The part by plain slicing: the truth."""
    found = []
    for piece in part.pieces:
        found.append(whole.narrow(part.axis, piece.begin, piece.end - piece.begin))
        shape = list(whole.shape)
        shape[part.axis] = piece.size - (piece.end - piece.begin)
        found.append(torch.zeros(shape, dtype=whole.dtype))
    return torch.cat(found, dim=part.axis)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], RankPart]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    axis = draw(st.integers(0, len(shape) - 1))
    pieces = []
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, shape[axis]))
        end = draw(st.integers(begin, shape[axis]))
        pieces.append(AxisPiece(begin, end, end - begin + draw(st.integers(0, 3))))
    return shape, RankPart(axis, tuple(pieces))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tensors(),
    st.sampled_from([torch.bfloat16, torch.uint8, torch.float32, torch.float8_e4m3fn]),
    st.sampled_from([1, 64]),
    st.booleans(),
)
def test_a_part_is_what_slicing_gives(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    drawn: tuple[tuple[int, ...], RankPart],
    dtype: torch.dtype,
    least_run: int,
    ahead: bool,
) -> None:
    shape, part = drawn
    monkeypatch.setattr(parts_module, "LEAST_RUN", least_run)
    monkeypatch.setattr(parts_module, "SLAB", 40)
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape).remainder(97).to(torch.uint8).to(dtype)
    file = tmp_path / "model.safetensors"
    save_file({"before": torch.ones(3, dtype=torch.uint8), "x": whole, "z": torch.ones(5)}, file)
    checkpoint = Checkpoint(tmp_path).of_rank({"x": part})
    if ahead:
        heard: list[tuple[int, int]] = []
        with checkpoint.reading(["before", "x", "z"], CPU, lambda done, total: heard.append((done, total))):
            assert checkpoint.read("before", CPU).tolist() == [1, 1, 1]
            found = checkpoint.read("x", CPU)
            checkpoint.read("z", CPU)
        assert heard[-1][0] == heard[-1][1]
    else:
        found = checkpoint.read("x", CPU)
    wanted = sliced(whole.to(torch.float32), part)
    assert found.dtype == dtype
    assert torch.equal(found.to(torch.float32), wanted)


def test_zeros_read_nothing(tmp_path: Path) -> None:
    save_file({"bias": torch.ones(4, 6)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path).of_rank({"bias": RankPart(1, (AxisPiece(0, 0, 6),))})
    assert checkpoint.read_entries(["bias"]) == []
    assert torch.equal(checkpoint.read("bias", CPU), torch.zeros(4, 6))


SHAPE = {
    "num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 8192,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


def bytes_read(folder: Path, shard: Shard, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """What a load of one rank asks of the files: ranges, and bytes that the system brought for them."""
    brought = []
    plain = os.preadv

    def preadv(fd: int, buffers: Any, offset: int, *flags: int) -> int:
        got = plain(fd, buffers, offset, *flags)
        brought.append(got)
        return got

    weights = open_weights(str(folder), shard=shard)
    totals = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        with weights.reading(CPU, lambda done, total: totals.append((done, total))):
            weights.embed(CPU)
            for layer_idx in range(weights.config.num_layers):
                weights.layer(layer_idx, CPU)
            weights.norm(CPU)
            weights.lm_head(CPU)
    assert totals[-1][0] == totals[-1][1]  # all that was planned was taken
    return totals[-1][1], sum(brought)


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_reads_its_part_only(world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random_checkpoint("gpt-oss-tiny", tmp_path, SHAPE)
    config = json.loads((tmp_path / "config.json").read_text())
    whole, _ = bytes_read(tmp_path, WHOLE, monkeypatch)
    hidden, width, experts, heads = 512, 1024, 4, 8
    # What every rank reads in full: the embedding table, norms, routers; and o and down, whose shares are runs shorter
    # than a block of the disk. Everything else is cut by the number of ranks.
    small = 2 * (2 * 2 * hidden + 2 * (experts * hidden + experts)) + 2 * hidden
    shared = 2 * 8192 * hidden + small
    o, down = 2 * hidden * heads * 64, experts * hidden * width * 17 // 32
    # Of each expert's gate_up scales: runs that are short, so read in full.
    scales, gate_up_bias = experts * 2 * width * hidden // 32, experts * 2 * width * 2
    in_full = shared + 2 * (o + down + scales + gate_up_bias)
    first_only = 2 * (2 * hidden + 2 * experts * hidden)
    qkv = 2 * (heads + 2 * 4) * 64 * (hidden + 1)
    gate_up = experts * 2 * width * hidden // 2
    cut = 2 * 8192 * hidden + 2 * (qkv + gate_up + 2 * heads)
    assert config["vocab_size"] == 8192
    assert whole == in_full + first_only + cut
    for rank in range(world):
        planned, brought = bytes_read(tmp_path, Shard(rank, world), monkeypatch)
        assert planned == in_full + (first_only if rank == 0 else 0) + cut // world
        # A range that begins and ends within blocks brings these whole.
        assert brought <= planned + 2 * BLOCK * 64
