"""Two processes that share a model give the tokens of one, whatever the engine does with the requests."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from microscale.engine.config import EngineConfig
from microscale.engine.grammar import Vocabulary
from microscale.engine.loading.load import load
from microscale.engine.loading.prepare import prepare
from microscale.engine.ranks.team import RankTeam
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.speculation.config import SpeculativeConfig
from microscale.text.tokenizer import Tokenizer
from microscale_lab.quality.tasks import DEMO_FOLDER
from support import tiny_gemma4
from support.demo_prompts import demo_model, demo_prompts
from support.ranks import Run, check_same, ranks, run_engine

DEMO = EngineConfig("demo", device="cpu", tensor_parallel_size=2)
GREEDY = SamplingParams(10, ignore_eos=True, logprobs=5)
SEEDED = SamplingParams(10, 0.9, seed=11, ignore_eos=True, logprobs=5)
MENU = 'start: ("yes" | "no" | /[0-9]{3,5}/) <|return|>'


def vocabulary() -> Vocabulary:
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    return Vocabulary(tokenizer.vocabulary(), sorted(tokenizer.control.values()), tokenizer.split_pattern)


def scenarios() -> dict[str, Run]:
    prompts = demo_prompts(6)
    shared = demo_prompts(2)[1] * 2
    return {
        "greedy, seeded and filtered together": Run(
            prompts[:3], [GREEDY, SEEDED, SamplingParams(10, 1.1, seed=3, top_p=0.8, top_k=40, logprobs=5)]
        ),
        "prompts in chunks of 8": Run(prompts[:2], [GREEDY, SEEDED], step_tokens=8),
        "a prefix that is found again": Run(
            [shared, [*shared, 9, 10], [*shared, 11]], [GREEDY] * 3, sequences=1, step_tokens=32
        ),
        "preemption": Run(prompts[1:4], [GREEDY] * 3, pages=7),
        "grammars beside free text": Run(
            prompts[:2],
            [SamplingParams(8, grammar=MENU, logprobs=5), GREEDY],
            vocabulary=vocabulary(),
        ),
        "drafts by n-gram": Run(
            [[7, 8, 9, 10, 7, 8, 9, 10, 7, 8], prompts[0]],
            [SamplingParams(24, ignore_eos=True, logprobs=5), SEEDED],
            speculative=SpeculativeConfig("ngram", 4, prompt_lookup_max=3, prompt_lookup_min=1),
        ),
        "log-probabilities of prompts": Run(
            prompts[:2], [SamplingParams(2, prompt_logprobs=2, logprobs=5), GREEDY], step_tokens=16
        ),
    }


@contextmanager
def slowed(team: RankTeam) -> Iterator[None]:
    """Rank 1 is stopped for a moment, again and again."""
    process = team.peers[0].process
    assert process is not None
    done = threading.Event()

    def stop_and_go() -> None:
        while not done.wait(0.2):
            process.send_signal(signal.SIGSTOP)
            done.wait(0.3)
            process.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_two_ranks_give_the_tokens_of_one() -> None:
    one = demo_model()
    with ranks(DEMO) as (two, team):
        for name, run in scenarios().items():
            wanted, alone = run_engine(one, run)
            found, engine = run_engine(two, run, team)
            check_same(name, wanted, found)
            stats = engine.stats()
            assert stats == alone.stats(), name
            if name == "preemption":
                assert stats.num_preemptions > 0
            if name == "a prefix that is found again":
                assert stats.prefix_hits > 0
            if name == "drafts by n-gram":
                assert stats.num_accepted_tokens > 0
        # Without log-probabilities of others only the largest logit of each rank travels.
        short = scenarios()["prompts in chunks of 8"]
        greedy = replace(short, params=[GREEDY, GREEDY])
        found, _ = run_engine(two, replace(short, params=[structs.replace(GREEDY, logprobs=None)] * 2), team)
        check_same("the largest logits alone", run_engine(one, greedy)[0], found)
        slow = scenarios()["prompts in chunks of 8"]
        with slowed(team):
            found, _ = run_engine(two, slow, team)
        check_same("a slow rank", run_engine(one, slow)[0], found)
        # A rank holds its part and not the whole, and so says its memory.
        whole = prepare(EngineConfig("demo", device="cpu")).memory.by_kind()
        for memory in team.memory:
            assert memory["experts"] == whole["experts"] // 2
            assert memory["kv_full_per_token"] == whole["kv_full_per_token"] // 2
            assert memory["small"] <= whole["small"]


def test_two_ranks_of_gemma(tmp_path: Path) -> None:
    config = tiny_gemma4.CASES["all_experts"]
    tensors = tiny_gemma4.to_modelopt(tiny_gemma4.random_gemma4(config))
    folder = tiny_gemma4.write_gemma4(tmp_path, config, tensors, ignore=tiny_gemma4.routers(config))
    options = EngineConfig(str(folder), device="cpu", block_size=4, tensor_parallel_size=2)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], [7, 11, 13]]
    run = Run(prompts, [GREEDY, SEEDED], step_tokens=7, window=config.sliding_window, page_size=4)
    one = load(prepare(EngineConfig(str(folder), device="cpu", block_size=4)))
    wanted, _ = run_engine(one, run)
    with ranks(options) as (two, team):
        found, _ = run_engine(two, run, team)
    check_same("Gemma", wanted, found)


@pytest.mark.slow
def test_four_ranks_where_two_share_each_kv_head() -> None:
    prompts = demo_prompts(2)
    run = Run(prompts, [structs.replace(GREEDY, max_tokens=5), structs.replace(SEEDED, max_tokens=5)], step_tokens=48)
    wanted, _ = run_engine(demo_model(), run)
    with ranks(structs.replace(DEMO, tensor_parallel_size=4)) as (four, team):
        found, _ = run_engine(four, run, team)
        kv = [memory["kv_full_per_token"] for memory in team.memory]
    check_same("four ranks", wanted, found)
    whole = prepare(EngineConfig("demo", device="cpu")).memory.by_kind()["kv_full_per_token"]
    assert kv == [whole // 2] * 4  # two KV heads, one on each rank
