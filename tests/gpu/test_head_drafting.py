"""Draft heads at work behind an engine on a real GPU: steps of the head as graphs and launch by launch give the same
drafts, and the embedded model's trained head is worth there what it is on a CPU."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest

from microscale.engine.config import EngineConfig
from microscale.engine.limits import Limits
from microscale.engine.loading.build import assemble
from microscale.engine.output import Stats
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.speculation.head import HeadDrafter
from microscale.engine.speculation.speculation import Speculation
from microscale.models import embedded
from microscale.models.config import LayerKind
from microscale.models.draft_heads.drafting import DraftHead
from microscale.models.draft_heads.heads import open_head_weights
from microscale.models.families import AnyModel
from support.demo_prompts import demo_prompts
from support.heads import PaddedDrafter, RecordingDrafter, bound, random_head
from support.loading import load_model

SHAPE = {"num_hidden_layers": 4, "num_local_experts": 4, "vocab_size": 4096}
# Heads of any width beside models of few layers: their sizes are in no list.
pytestmark = [pytest.mark.odd_shapes, pytest.mark.usefixtures("admits_until_pages_run_out")]
NEW = 40


@cache
def load(name: str, page_size: int = 16) -> AnyModel:
    dummy = name != embedded.NAME
    return load_model(
        EngineConfig(
            name,
            load_format="dummy" if dummy else "auto",
            device="cuda",
            hf_overrides=dict(SHAPE) if dummy else {},
            block_size=page_size,
        )
    )


def prompts(vocab: int) -> list[list[int]]:
    chooser = random.Random(0)
    shared = [chooser.randrange(vocab) for _ in range(96)]
    own = [[chooser.randrange(vocab) for _ in range(length)] for length in (1, 7, 33, 150, 1500)]
    return [*own, shared + own[0], shared + own[1], shared, shared + own[2]]


def run(
    model: AnyModel,
    asked: Sequence[Sequence[int]],
    drafter: HeadDrafter | None,
    *,
    ahead: bool = True,
    eager: bool = False,
    pages: int = 4096,
    seqs: int = 8,
    ignore_eos: bool = False,
) -> tuple[list[list[int]], Stats]:
    speculation = None if drafter is None else Speculation(drafter, drafter._most)
    limits = Limits(model.page_size, model.config.sliding_window, seqs, 512, max(map(len, asked)) + NEW)
    engine = assemble(
        model,
        limits,
        dict.fromkeys(LayerKind, pages // model.page_size),
        enforce_eager=eager,
        speculation=speculation,
    )
    if not ahead:
        engine._ahead = None
    engine.prepare()
    requests = [Request(str(n), p, SamplingParams(max_tokens=NEW, ignore_eos=ignore_eos)) for n, p in enumerate(asked)]
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
        engine.check()
    return [request.tokens for request in requests], engine.stats()


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
@pytest.mark.parametrize("most", [1, 3, 7])
def test_graphs_change_no_draft(kind: str, most: int) -> None:
    """Steps of the same sizes, captured and launch by launch: the same drafts and tokens."""
    model = load("gpt-oss-20b")
    head = random_head(kind, model)
    asked = prompts(4096)
    graphs, eager = RecordingDrafter(head, most), PaddedDrafter(head, most)
    found, _ = run(model, asked, graphs, ignore_eos=True)
    plain, _ = run(model, asked, eager, eager=True, ignore_eos=True)
    assert found == plain
    assert graphs.said == eager.said
    assert sum(bool(draft) for _, draft in graphs.said) > 100
    assert graphs._graphs._graphs
    assert not eager._graphs._graphs


@pytest.mark.parametrize("most", [1, 3, 5])
@pytest.mark.parametrize("eager", [False, True])
def test_steps_that_run_ahead_change_no_token(most: int, eager: bool) -> None:
    """Nothing here waits for the device but the engine itself, so a buffer that is written too soon would show. Near
    its end a request has shorter drafts, and so other kernels, if steps run ahead."""
    model, head = trained(16)
    for prompt in demo_prompts(8):
        pairs = [
            run(model, [prompt], HeadDrafter(head, most), ahead=ahead, eager=eager, ignore_eos=True)
            for ahead in (True, False)
        ]
        (found, stats), (read, _) = pairs
        alike = len(prompt) + NEW - 2 * (1 + most)
        assert found[0][:alike] == read[0][:alike]
        assert stats.num_accepted_tokens > 0


@cache
def trained(page_size: int) -> tuple[AnyModel, DraftHead]:
    model = load(embedded.NAME, page_size)
    return model, bound(open_head_weights(str(embedded.DRAFT_HEAD), model.config), model)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("pages", [8192, 1024], ids=["room", "preemption"])
def test_the_trained_head_is_worth_what_it_was_trained_for(page_size: int, pages: int) -> None:
    """Acceptance does not fall with preemption, pages and graphs: stale rows of the head would show here."""
    model, head = trained(page_size)
    asked = demo_prompts(24)
    drafter = RecordingDrafter(head, 3)
    _, stats = run(model, asked, drafter, pages=pages)
    share = stats.num_accepted_tokens / stats.num_draft_tokens
    print(f"\npages of {page_size}: {share:.3f} of drafted tokens accepted, {stats.num_preemptions} preemptions")
    assert share > 0.4


def test_one_sequence_and_many() -> None:
    model, head = trained(16)
    for seqs, count in ((1, 4), (64, 64)):
        _, stats = run(model, demo_prompts(count), RecordingDrafter(head, 4), seqs=seqs, pages=32768)
        assert stats.num_accepted_tokens > 0.35 * stats.num_draft_tokens
