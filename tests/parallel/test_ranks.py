"""Several ranks give the tokens of one, whatever the engine does with the requests."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TypeAlias

import pytest
from msgspec import structs

from microscale.engine.config import EngineConfig
from microscale.engine.grammar import Vocabulary
from microscale.engine.loading.drafting import load_head
from microscale.engine.loading.load import load
from microscale.engine.loading.prepare import Prepared, prepare
from microscale.engine.ranks import processes
from microscale.engine.ranks.__main__ import follow
from microscale.engine.ranks.leader import RankTeam
from microscale.engine.ranks.messages import RankLink
from microscale.engine.ranks.processes import spawn
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.speculation.config import SpeculativeConfig
from microscale.errors import RankFailed
from microscale.models.families import AnyModel
from microscale.parallel.handshake import Nodes, connect, listen, read_secret
from microscale.text.tokenizer import Tokenizer
from microscale_lab.quality.tasks import DEMO_FOLDER
from support import tiny_checkpoints, tiny_gemma4, tiny_qwen3_5, tiny_qwen3_moe
from support.demo_prompts import demo_model, demo_prompts
from support.ranks import Run, check_same, ranks, run_engine

DEMO = EngineConfig("demo", device="cpu", threads=1, tensor_parallel_size=2)
GREEDY = SamplingParams(6, ignore_eos=True, logprobs=5)
SEEDED = SamplingParams(6, 0.9, seed=11, ignore_eos=True, logprobs=5)
NGRAM = SpeculativeConfig("ngram", 4, prompt_lookup_max=3, prompt_lookup_min=1)
EAGLE3 = SpeculativeConfig("eagle3", 3)
REPEATING = [7, 8, 9, 10, 7, 8, 9, 10, 7, 8]
HERE = "127.0.0.1"
MENU = 'start: ("yes" | "no" | /[0-9]{3,5}/) <|return|>'

Pair: TypeAlias = tuple[Prepared, AnyModel]


def vocabulary() -> Vocabulary:
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    return Vocabulary(tokenizer.vocabulary(), sorted(tokenizer.control.values()), tokenizer.split_pattern)


@cache
def prompts() -> list[list[int]]:
    return [prompt[:20] for prompt in demo_prompts(3)]


def chunks() -> Run:
    return Run(prompts()[:2], [GREEDY, SEEDED], step_tokens=8)


def prefixes() -> Run:
    shared = prompts()[1] * 2
    return Run([shared, [*shared, 9, 10]], [structs.replace(GREEDY, max_tokens=4)] * 2, sequences=1, step_tokens=32)


SCENARIOS: dict[str, Callable[[], Run]] = {
    "greedy, seeded and filtered": lambda: Run(
        prompts(), [GREEDY, SEEDED, SamplingParams(6, 1.1, seed=3, top_p=0.8, top_k=40, logprobs=5)]
    ),
    "prompts in chunks": chunks,
    "prefix cache": prefixes,
    "preemption": lambda: Run(prompts(), [structs.replace(GREEDY, max_tokens=16)] * 3, pages=6),
    "grammar": lambda: Run(
        prompts()[:2], [SamplingParams(8, grammar=MENU, logprobs=5), GREEDY], vocabulary=vocabulary()
    ),
    "drafts by n-gram": lambda: Run(
        [REPEATING, prompts()[0]], [structs.replace(GREEDY, max_tokens=16), SEEDED], speculative=NGRAM
    ),
    "log-probabilities of prompts": lambda: Run(
        prompts()[:2], [SamplingParams(2, prompt_logprobs=2, logprobs=5), GREEDY], step_tokens=16
    ),
}


@pytest.fixture(scope="module")
def two() -> Iterator[Pair]:
    with ranks(DEMO) as pair:
        yield pair


@pytest.mark.usefixtures("admits_until_pages_run_out")
@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks_give_the_tokens_of_one(name: str, two: Pair) -> None:
    prepared, model = two
    run = SCENARIOS[name]()
    wanted, alone = run_engine(demo_model(), run)
    found, engine = run_engine(model, run, prepared.team)
    check_same(name, wanted, found)
    stats = engine.stats()
    assert stats == alone.stats()
    counted = {
        "preemption": stats.num_preemptions,
        "prefix cache": stats.prefix_hits,
        "drafts by n-gram": stats.num_accepted_tokens,
    }
    assert counted.get(name, 1) > 0


def test_largest_logits_suffice_for_greedy_requests(two: Pair) -> None:
    """Without log-probabilities only the largest logits of each rank are sent."""
    prepared, model = two
    run = replace(chunks(), params=[GREEDY] * 2)
    found, _ = run_engine(model, replace(run, params=[structs.replace(GREEDY, logprobs=None)] * 2), prepared.team)
    check_same("largest logits", run_engine(demo_model(), run)[0], found)


def test_a_rank_holds_its_part(two: Pair) -> None:
    team = two[0].team
    assert team is not None
    whole = prepare(structs.replace(DEMO, tensor_parallel_size=1)).memory.by_kind()
    for memory in team.memory:
        assert memory["experts"] == whole["experts"] // 2
        assert memory["kv_full_per_token"] == whole["kv_full_per_token"] // 2


def gpt_oss(folder: Path) -> Path:
    return tiny_checkpoints.write_hf(folder, tiny_checkpoints.CASES["heads_4_2"], shards=2)


def gemma4(folder: Path) -> Path:
    config = tiny_gemma4.CASES["all_experts"]
    tensors = tiny_gemma4.to_modelopt(tiny_gemma4.random_gemma4(config))
    return tiny_gemma4.write_gemma4(folder, config, tensors, ignore=tiny_gemma4.routers(config))


def qwen3_moe(folder: Path) -> Path:
    config = tiny_qwen3_moe.CASES["as_published"]
    return tiny_qwen3_moe.write_qwen3_moe(folder, config, tiny_qwen3_moe.random_qwen3_moe(config))


def qwen3_5(folder: Path) -> Path:
    config = tiny_qwen3_5.CASES["as_published"]
    return tiny_qwen3_5.write_qwen3_5(folder, config, tiny_qwen3_5.random_qwen3_5(config))


@pytest.mark.parametrize("write", [gpt_oss, gemma4, qwen3_moe, qwen3_5])
def test_two_ranks_of_each_family(write: Callable[[Path], Path], tmp_path: Path) -> None:
    # The reference reads no BF16 experts, which the tiny Qwens have.
    layer_format = ("experts=mxfp8",) if write in (qwen3_moe, qwen3_5) else ()
    options = EngineConfig(str(write(tmp_path)), device="cpu", threads=1, layer_format=layer_format, block_size=4)
    tokens = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], [7, 11, 13]]
    one = load(prepare(options))
    window = one.config.sliding_window
    run = Run(tokens, [GREEDY, SEEDED], step_tokens=7, window=window, page_size=4)
    if write is qwen3_5:  # whose states follow the accepted drafts
        drafts = replace(NGRAM, num_speculative_tokens=3)
        run = replace(run, params=[structs.replace(GREEDY, max_tokens=40)] * 2, speculative=drafts)
    wanted, _ = run_engine(one, run)
    with ranks(structs.replace(options, tensor_parallel_size=2)) as (prepared, two):
        found, engine = run_engine(two, run, prepared.team)
    check_same(write.__name__, wanted, found)
    assert engine.stats().num_drafts > 0 or write is not qwen3_5


@pytest.fixture(scope="module")
def drafting() -> Iterator[Pair]:
    with ranks(structs.replace(DEMO, speculative=EAGLE3)) as pair:
        yield pair


HEAD_RUNS: dict[str, Callable[[], Run]] = {
    # After each chunk of a prompt the head reads the next token, which rank 0 must send.
    "chunks, scored prompts": lambda: Run(
        prompts()[:2], [structs.replace(GREEDY, prompt_logprobs=0), SEEDED], step_tokens=8, speculative=EAGLE3
    ),
    "prefix cache": lambda: replace(prefixes(), speculative=EAGLE3),
    "n-gram next to an idle head": lambda: Run(
        [REPEATING], [structs.replace(GREEDY, max_tokens=16)], speculative=NGRAM
    ),
}


@pytest.mark.parametrize("name", HEAD_RUNS)
def test_two_ranks_with_a_draft_head(name: str, drafting: Pair) -> None:
    prepared, two = drafting
    alone = prepare(structs.replace(DEMO, tensor_parallel_size=1, speculative=EAGLE3))
    one = load(alone)
    assert alone.head is not None
    assert prepared.head is not None
    assert prepared.team is not None
    run = HEAD_RUNS[name]()
    heads = [load_head(alone.head, one), load_head(prepared.head, two)] if run.speculative is EAGLE3 else [None] * 2
    wanted, engine = run_engine(one, run, head=heads[0], read_drafts=True)
    found, both = run_engine(two, run, prepared.team, heads[1])
    check_same(name, wanted, found)
    assert both.stats() == engine.stats()  # the same drafts, and the same of them accepted
    assert both.stats().num_accepted_tokens > 0
    # A rank holds its rows of lm_head, and everything else of the head.
    whole, each = alone.memory.by_kind(), [memory["draft_head"] for memory in prepared.team.memory]
    config = prepared.head.config
    lm_head = 2 * config.layer.hidden * config.reads.vocab_size
    assert each == [whole["draft_head"] - lm_head // 2] * 2


def test_four_ranks_on_two_machines(tmp_path: Path) -> None:
    """Both machines are this one. Two ranks hold the same KV head."""
    secret = tmp_path / "secret"
    secret.write_text("a secret of some length")
    with listen(HERE, 0) as server:
        port = server.getsockname()[1]
    for rank in (2, 3):
        threading.Thread(
            target=lambda rank=rank: follow(RankLink(connect(HERE, port, rank, read_secret(secret)))), daemon=True
        ).start()
    run = Run(prompts()[:2], [structs.replace(GREEDY, max_tokens=4), structs.replace(SEEDED, max_tokens=4)])
    wanted, _ = run_engine(demo_model(), run)
    nodes = Nodes(2, HERE, port, str(secret))
    with ranks(structs.replace(DEMO, tensor_parallel_size=4, nodes=nodes)) as (prepared, four):
        found, _ = run_engine(four, run, prepared.team)
        assert isinstance(prepared.team, RankTeam)
        assert [str(peer) for peer in prepared.team.peers] == [
            "Rank 1 (thread)",
            f"Rank 2 ({HERE})",
            f"Rank 3 ({HERE})",
        ]
        kv = [memory["kv_full_per_token"] for memory in prepared.team.memory]
    check_same("four ranks", wanted, found)
    whole = prepare(structs.replace(DEMO, tensor_parallel_size=1)).memory.by_kind()["kv_full_per_token"]
    assert kv == [whole // 2] * 4


def test_a_machine_ends_with_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "COMMAND", (sys.executable, "-c", "import sys; sys.exit(3)"))
    assert processes.run_node("demo", 4, Nodes(2, HERE, 1, "secret"), 1) == 3


@pytest.mark.nightly
def test_a_process_gives_the_same_tokens_and_its_death_is_reported() -> None:
    """A real rank process, which is killed in the middle of a request."""
    run = chunks()
    wanted, _ = run_engine(demo_model(), run)
    with ranks(DEMO, spawn) as (prepared, two):
        found, _ = run_engine(two, run, prepared.team)
        check_same("a process", wanted, found)
        assert isinstance(prepared.team, RankTeam)
        [peer] = prepared.team.peers
        assert peer.process is not None
        os.kill(peer.process.pid, signal.SIGKILL)
        forever = Run([[5, 6, 7, 8]], [SamplingParams(4000, ignore_eos=True)], pages=600)
        with pytest.raises(RankFailed) as caught:
            run_engine(two, forever, prepared.team)
    assert str(caught.value) == (
        f"Rank 1 (process {peer.process.pid}) was killed by signal 9 (SIGKILL); the engine ends with it."
    )
