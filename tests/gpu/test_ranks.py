"""Two processes on one GPU, over gloo and without graphs, give the tokens of one."""

from __future__ import annotations

import pytest

pytest.importorskip("msgspec", reason="ranks talk through msgspec")

from microscale.engine.config import EngineConfig
from microscale.engine.loading.load import load
from microscale.engine.loading.prepare import prepare
from microscale.engine.ranks.processes import spawn
from microscale.engine.sampling_params import SamplingParams
from support.demo_prompts import demo_prompts
from support.ranks import Run, check_same, ranks, run_engine

pytestmark = [pytest.mark.odd_shapes, pytest.mark.own("starts processes of its own")]


def test_two_ranks_on_one_gpu_give_the_tokens_of_one() -> None:
    # In float32: what differs is the order of sums alone.
    params = [SamplingParams(12, ignore_eos=True, logprobs=5), SamplingParams(12, 0.9, seed=4, logprobs=5)]
    run = Run(demo_prompts(2), params, step_tokens=48)
    wanted, _ = run_engine(load(prepare(EngineConfig("demo", device="cuda:0", dtype="float32"))), run)
    options = EngineConfig("demo", device="cuda:0", dtype="float32", tensor_parallel_size=2)
    with ranks(options, spawn) as (prepared, two):
        found, _ = run_engine(two, run, prepared.team)
    check_same("two ranks on one GPU", wanted, found)
