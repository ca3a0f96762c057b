"""Ranks' parts of a model on one GPU, as threads that add up what each computes, against the whole model there.

Sums go through the GPU's memory and cost nothing: what is tested are the kernels at the shapes that a rank has.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from microscale.engine.config import EngineConfig
from microscale.engine.loading.load import load
from microscale.engine.loading.prepare import prepare
from microscale.models.families import AnyModel
from microscale.parallel.sharding import WHOLE, Shard
from microscale.planning.ops import RankSums
from microscale.planning.ranks import ALONE
from microscale_lab.model_bench.random_checkpoint import write_random_checkpoint
from support.forced_routing import Run, assert_as_good_as_bf16, forced_run, reference_run
from support.thread_ranks import ThreadRank, run_ranks

pytestmark = pytest.mark.odd_shapes
# gpt-oss-20b's widths: 2880 on 4 ranks is 736 each, with zeros on the last.
SHAPE = {"num_hidden_layers": 2, "num_local_experts": 8, "vocab_size": 8192}
PROMPTS = [list(range(1, 101)), [5, 6, 7], list(range(1000, 1040))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_random_checkpoint("gpt-oss-20b", folder, SHAPE)
    return folder


def model(folder: Path, dtype: str, backend: str | None, shard: Shard = WHOLE, ranks: RankSums = ALONE) -> AnyModel:
    options = EngineConfig(str(folder), device="cuda", dtype=dtype, backend=backend, shard=shard, sharing=shard.world)
    return load(prepare(options), ranks=ranks)


@pytest.fixture(scope="module")
def truth(folder: Path) -> Run:
    return reference_run(model(folder, "float32", "reference"), PROMPTS, 512)


@pytest.fixture(scope="module")
def plain(folder: Path, truth: Run) -> Run:
    return forced_run(model(folder, "bfloat16", "reference"), PROMPTS, 512, truth)


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("chunk", [512, 1])
def test_ranks_compute_what_one_computes(folder: Path, truth: Run, plain: Run, world: int, chunk: int) -> None:
    def work(ranks: ThreadRank, rank: int) -> Run:
        with torch.cuda.stream(torch.cuda.default_stream()):
            mine = model(folder, "bfloat16", None, Shard(rank, world), ranks)
            return forced_run(mine, PROMPTS, chunk, truth)

    found = run_ranks(world, work)
    # Each rank has some of the vocabulary.
    whole = replace(found[0], logits=torch.cat([run.logits for run in found], dim=1))
    assert_as_good_as_bf16(whole, plain, truth)
