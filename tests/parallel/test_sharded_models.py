"""Shards of a model, each read from the files on its own, compute the whole model's logits together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from microscale.hardware import cpu
from microscale.models.embedded import embedded_folder
from microscale.models.families import AnyModel, build_model, open_weights
from microscale.models.qwen3_moe.config import Qwen3MoeConfig, to_hugging_face
from microscale.parallel.sharding import WHOLE, Shard
from microscale.planning.ops import Activations, Ops, Preference, RankSums
from microscale.planning.precision import make_precision
from microscale.planning.ranks import ALONE
from support import containers, tiny_checkpoints, tiny_gemma4, tiny_qwen3_moe
from support.forward import all_logits
from support.thread_ranks import ThreadRank, run_ranks

CPU = torch.device("cpu")
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], [7, 11, 13]]


def gpt_oss(name: str, *, original: bool = False) -> Callable[[Path], Path]:
    write = tiny_checkpoints.write_original if original else tiny_checkpoints.write_hf
    return lambda folder: write(folder, tiny_checkpoints.CASES[name], shards=2)


def gemma4(name: str, *, mxfp8: bool = False) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        config = tiny_gemma4.CASES[name]
        tensors, ignore = tiny_gemma4.random_gemma4(config), None
        if mxfp8:
            tensors, ignore = tiny_gemma4.to_modelopt(tensors), tiny_gemma4.routers(config)
        return tiny_gemma4.write_gemma4(folder, config, tensors, ignore=ignore)

    return write


def qwen3_moe(name: str, *, apart: bool = False) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        config = tiny_qwen3_moe.CASES[name]
        tensors = tiny_qwen3_moe.random_qwen3_moe(config)
        return tiny_qwen3_moe.write_qwen3_moe(folder, config, tiny_qwen3_moe.published(tensors) if apart else tensors)

    return write


Written = Callable[[Path], Path]


def embedded(folder: Path) -> Path:
    return embedded_folder()


def plain_gpt_oss(folder: Path) -> Path:
    return tiny_checkpoints.write_plain(folder, tiny_checkpoints.CASES["all_experts"])


def quantised(name: str, config: Qwen3MoeConfig) -> Callable[[Path], Path]:
    """A container of Qwen3-MoE."""

    def write(folder: Path) -> Path:
        stored, _ = containers.quantise(tiny_qwen3_moe.random_qwen3_moe(config), containers.CONTAINERS[name])
        return containers.write(folder, to_hugging_face(config), stored, containers.CONTAINERS[name])

    return write


PUBLISHED = tiny_qwen3_moe.CASES["as_published"]
WIDE = replace(PUBLISHED, hidden=256, intermediate=256, head_dim=128, num_heads=4, num_kv_heads=2)
CASES: dict[str, tuple[Written, int]] = {
    "embedded, 2 ranks": (embedded, 2),
    "embedded, two ranks to a KV head": (embedded, 4),
    "gpt-oss, one block of experts: zeros on the second rank": (gpt_oss("heads_4_2"), 2),
    "gpt-oss, original layout": (gpt_oss("all_experts", original=True), 4),
    "gpt-oss, 3 ranks": (gpt_oss("heads_6_3"), 3),
    "gpt-oss, one KV head on 8 ranks": (gpt_oss("heads_8_1"), 8),
    "Gemma, keys are values, MXFP8": (gemma4("shared_kv", mxfp8=True), 2),
    "Gemma, keys are values, BF16": (gemma4("shared_kv"), 4),
    "Gemma, untied": (gemma4("own_values"), 3),
    "Gemma, all experts": (gemma4("all_experts", mxfp8=True), 2),
    "gpt-oss, BF16": (plain_gpt_oss, 2),
    "Qwen3 in NVFP4, a scale for each matrix": (quantised("compressed-nvfp4", PUBLISHED), 2),
    "Qwen3 in FP8, a scale for each row": (quantised("compressed-fp8-rows", PUBLISHED), 4),
    "Qwen3 in mixed precision, FP8 with a scale for each matrix": (quantised("modelopt-mixed", PUBLISHED), 2),
    "Qwen3 in FP8 with blocks": (quantised("fp8-blocks", WIDE), 2),
    "Qwen3": (qwen3_moe("as_published"), 4),
    "Qwen3, experts apart, tied": (qwen3_moe("odd_groups_tied", apart=True), 3),
}
BF16_EXPERTS = ("gpt-oss, BF16", "Gemma, keys are values, BF16", "Gemma, untied", "Qwen3", "Qwen3, experts apart, tied")
"""They run in no format of their own."""


def build(folder: Path, case: str, shard: Shard = WHOLE, ranks: RankSums = ALONE) -> AnyModel:
    precision = make_precision(layer_formats=["experts=mxfp8"] if case in BF16_EXPERTS else [])
    weights = open_weights(str(folder), shard=shard)
    ops = Ops(cpu(), Activations.FLOAT32, Preference(), precision, ranks=ranks)
    with weights.reading(CPU, lambda done, total: None):
        return build_model(weights, ops, CPU, 4, lambda: None)


@pytest.mark.parametrize("case", CASES)
def test_shards_compute_the_whole(case: str, tmp_path: Path) -> None:
    write, world = CASES[case]
    folder = write(tmp_path)
    whole = build(folder, case)
    wanted = all_logits(whole, PROMPTS, chunk=5)

    def work(ranks: ThreadRank, rank: int) -> tuple[list[Tensor], int]:
        model = build(folder, case, Shard(rank, world), ranks)
        return all_logits(model, PROMPTS, chunk=5), ranks.sums

    found = run_ranks(world, work)
    steps = -(-max(map(len, PROMPTS)) // 5)
    # After attention and after the experts, and nowhere else.
    assert {sums for _, sums in found} == {steps * 2 * whole.config.num_layers}
    for place, whole_rows in enumerate(wanted):
        together = torch.cat([logits[place] for logits, _ in found], dim=1)  # each rank has some of the vocabulary
        assert together.shape == whole_rows.shape
        # Sums of float32 in another order: 1e-7 an addition, some thousands of them in a row.
        assert (together - whole_rows).abs().max() <= 1e-4 * whole_rows.abs().max()
