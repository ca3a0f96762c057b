"""Steps with drafts on a real GPU: graphs and single launches give the same bits, and greedy output parts from that
without drafts only where two tokens nearly tie. ``-s`` prints how often it does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from msgspec.structs import replace

from microscale.engine.config import EngineConfig
from microscale.engine.limits import SHORT_CONTEXT, Limits
from microscale.engine.loading.build import assemble
from microscale.engine.output import Stats
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.speculation.config import SpeculativeConfig
from microscale.engine.speculation.speculation import Speculation
from microscale.models.config import LayerKind
from microscale.models.families import AnyModel
from support.drafters import Uneven, replaying
from support.forward import all_logits
from support.greedy import near_tie
from support.loading import load_model

SHAPE = {"num_hidden_layers": 4, "num_local_experts": 4, "vocab_size": 4096}
pytestmark = [pytest.mark.starts("gpt-oss-20b", SHAPE), pytest.mark.usefixtures("admits_until_pages_run_out")]
NEW = 48
Tokens = list[list[tuple[int, float, float]]]
"""For each prompt: tokens, their log-probabilities, and those of the next likeliest."""


@cache
def load(page_size: int = 16, dtype: str = "auto", backend: str | None = None) -> AnyModel:
    return load_model(
        EngineConfig(
            "gpt-oss-20b",
            load_format="dummy",
            device="cuda",
            dtype=dtype,
            backend=backend,
            hf_overrides=dict(SHAPE),
            block_size=page_size,
        )
    )


def prompts(longest: int = 400) -> list[list[int]]:
    chooser = random.Random(0)
    shared = [chooser.randrange(4096) for _ in range(200)]
    own = [[chooser.randrange(4096) for _ in range(length)] for length in (1, 7, 33, 150, longest)]
    return [*own, shared + own[0], shared + own[1], shared]


@pytest.fixture(scope="module")
def near() -> float:
    """Log-probability between two tokens where outputs may part."""
    exact, plain = (
        torch.cat(all_logits(load(dtype=dtype, backend="reference"), prompts(), 512))
        for dtype in ("float32", "bfloat16")
    )
    return near_tie(plain, exact)


def run(
    asked: Sequence[Sequence[int]],
    speculation: Speculation | None,
    *,
    eager: bool = False,
    seqs: int = 8,
    page_size: int = 16,
    pages: int = 4096,
    temperature: float = 0.0,
) -> tuple[Tokens, Stats, int]:
    """Tokens, counts, and how many graphs of steps with drafts were captured."""
    model = load(page_size)
    longest = max(map(len, asked)) + NEW
    limits = Limits(page_size, model.config.sliding_window, seqs, 512, longest)
    engine = assemble(
        model, limits, dict.fromkeys(LayerKind, pages // page_size), enforce_eager=eager, speculation=speculation
    )
    found: Tokens = [[] for _ in asked]
    for at, prompt in enumerate(asked):
        options = SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=2, temperature=temperature, seed=at)
        engine.submit(Request(str(at), prompt, options))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            assert output.token is not None
            assert output.logprob is not None
            found[int(output.request_id)].append((output.token, output.logprob, output.top_logprobs[1][1]))
        engine.check()
    captured = sum(key.verify for key in engine._runner._graphs._graphs)  # type: ignore[attr-defined]
    return found, engine.stats(), captured


def ids(found: Tokens) -> list[list[int]]:
    return [[token for token, _, _ in one] for one in found]


def knowing(
    asked: Sequence[Sequence[int]], said: Tokens, most: int, luck: float, *, uneven: bool = False
) -> Speculation:
    speculation = replaying(list(zip(asked, ids(said), strict=True)), 4096, most, luck)
    if uneven:
        speculation._length = Uneven(most)
    return speculation


def parted(found: Tokens, alone: Tokens) -> tuple[int, float]:
    """How many outputs part from those without drafts, and the widest tie at which one does."""
    count, widest = 0, 0.0
    for mine, other in zip(found, alone, strict=True):
        place = next((at for at, (a, b) in enumerate(zip(mine, other, strict=True)) if a[0] != b[0]), None)
        if place is not None:
            count += 1
            widest = max(widest, other[place][1] - other[place][2])
    return count, widest


@pytest.mark.parametrize("most", [1, 3, 7, 15])
def test_graphs_change_no_bit(most: int) -> None:
    """The same drafts, as graphs and launch by launch: the same tokens and log-probabilities, bit for bit."""
    asked = prompts()
    alone, _, _ = run(asked, None)
    results = [run(asked, knowing(asked, alone, most, 0.8, uneven=True), eager=eager) for eager in (False, True)]
    (graphs, stats, captured), (eager, eager_stats, none) = results
    assert graphs == eager
    assert replace(stats, graphs=0, graphs_waited_for=0) == eager_stats
    assert captured > 0
    assert none == 0
    assert 0 < stats.num_accepted_tokens <= stats.num_draft_tokens


@pytest.mark.parametrize("luck", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("most", [1, 3, 7])
@pytest.mark.parametrize("seqs", [1, 8])
def test_greedy_output_parts_only_at_near_ties(near: float, luck: float, most: int, seqs: int) -> None:
    asked = prompts()
    alone, _, _ = run(asked, None, seqs=seqs)
    found, stats, _ = run(asked, knowing(asked, alone, most, luck), seqs=seqs)
    count, widest = parted(found, alone)
    print(
        f"\n{seqs} sequences, {most} drafts, luck {luck}: {count} of {len(asked)} part, at ties of up to {widest:.4f}"
    )
    assert widest <= near
    if luck == 0.0:
        assert stats.num_accepted_tokens < 0.05 * stats.num_draft_tokens  # a wrong draft may be the tie's other token


def test_ngram_on_prompts_that_hold_a_third_of_all_tokens(near: float) -> None:
    """Random weights repeat no phrase; every third token that they say was in the prompt."""
    chooser = random.Random(1)
    asked = [[chooser.randrange(4096) for _ in range(1600)] for _ in range(6)]
    alone, _, _ = run(asked, None, pages=16384)
    ngram = SpeculativeConfig("ngram", 4, prompt_lookup_min=1, prompt_lookup_max=4)
    found, stats, _ = run(asked, Speculation.of(ngram), pages=16384)
    count, widest = parted(found, alone)
    accepted = f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} drafted tokens accepted"
    print(f"\n{count} of {len(asked)} part, at ties up to {widest:.4f}; {accepted}")
    assert stats.num_drafts > 20
    assert widest <= near


def test_contexts_of_all_lengths(near: float) -> None:
    """Wide page tables: splits that a kernel of their own adds up."""
    chooser = random.Random(2)
    asked = [[chooser.randrange(4096) for _ in range(length)] for length in (SHORT_CONTEXT + 300, 5000, 60)]
    alone, _, _ = run(asked, None, pages=16384)
    found, _, _ = run(asked, knowing(asked, alone, 7, 0.9), pages=16384)
    assert parted(found, alone)[1] <= near


def test_many_sequences_with_drafts_of_every_length(near: float) -> None:
    """64 sequences, up to 512 tokens a step: more than the small-batch kernels take."""
    chooser = random.Random(3)
    asked = [[chooser.randrange(4096) for _ in range(5 + at)] for at in range(64)]
    alone, _, _ = run(asked, None, seqs=64, pages=32768)
    found, stats, _ = run(asked, knowing(asked, alone, 7, 0.9, uneven=True), seqs=64, pages=32768)
    count, widest = parted(found, alone)
    print(f"\n{count} of 64 part, at ties of up to {widest:.4f}")
    assert stats.num_accepted_tokens > 0
    assert widest <= near


def test_preemption_and_small_pages(near: float) -> None:
    asked = prompts()
    alone, _, _ = run(asked, None)
    found, stats, _ = run(asked, knowing(asked, alone, 7, 0.8), pages=1088)
    assert stats.num_preemptions > 0
    assert parted(found, alone)[1] <= near


def test_the_same_seed_gives_the_same_tokens_twice() -> None:
    """Sampled tokens may differ from those without drafts where kernels round differently; from run to run they do
    not."""
    asked = prompts()
    alone, _, _ = run(asked, None, temperature=1.0)
    first, second = (run(asked, knowing(asked, alone, 3, 0.8), temperature=1.0)[0] for _ in range(2))
    assert first == second
