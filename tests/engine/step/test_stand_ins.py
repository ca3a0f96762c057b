"""Stand-ins: which graph a step runs in, that it gives the same logits there, and when its own is captured."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from itertools import pairwise, takewhile

import pytest
import torch

from microscale.backends.ops import Activations, Ops, Preference
from microscale.engine.config import EngineConfig
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.step.buckets import PROMPT_GRAPH_TOKENS, buckets, coarse, kernel_ends
from microscale.engine.step.capture_order import FIRST_TOKENS, CaptureOrder
from microscale.engine.step.decode import GraphKey
from microscale.engine.step.graphs import GraphCounts, whole
from microscale.engine.step.inputs import build_batch
from microscale.engine.step.limits import Limits
from microscale.engine.step.pages import PagePool
from microscale.engine.step.prompt import PromptInputs, PromptKey, TailKey
from microscale.engine.step.runner import ModelRunner
from microscale.engine.step.stand_ins import OFTEN, Key
from microscale.engine.step.verify import VerifyKey
from microscale.engine.step.work import Work
from microscale.hardware import known
from microscale.models.config import LayerKind
from microscale.models.families import PRESETS, AnyModel
from microscale.models.recorded import SHORT_CONTEXT, kernels_by_tokens
from support.forward import poison
from support.loading import load_model
from support.paper_graphs import enable, on_paper

CPU = torch.device("cpu")
PAGE = 4
GARBAGE = 2**62 + 12345
LONG = 2 * SHORT_CONTEXT
NARROW, WIDE = SHORT_CONTEXT // PAGE, LONG // PAGE


@pytest.fixture(scope="module", params=["gpt-oss-tiny", "gemma-4-tiny", "qwen3-moe-tiny"])
def model(request: pytest.FixtureRequest) -> AnyModel:
    return load_model(EngineConfig(request.param, load_format="dummy", device="cpu", block_size=PAGE))


def pools_of(pages: int = WIDE + 100) -> dict[LayerKind, PagePool]:
    return {kind: PagePool(pages + place) for place, kind in enumerate(LayerKind)}


def started(model: AnyModel, pools: dict[LayerKind, PagePool], drafts: int = 0) -> ModelRunner:
    limits = Limits(PAGE, model.config.sliding_window, 20, 64, LONG)
    runner = ModelRunner(model, pools, limits, fill_up_prompts=True, draft_tokens=drafts)
    poison(runner._kv)
    return runner


def only(runner: ModelRunner, keys: Iterable[Key]) -> None:
    """Steps run in these, launch by launch: as on a rank whose captures were all refused."""
    runner._graphs._waits = True
    runner._graphs._tried = dict.fromkeys(keys)
    runner._stand_ins.enabled = True


def make(pools: Mapping[LayerKind, PagePool], name: str, first: int, count: int = 1, drafts: int = 0) -> Work:
    chooser = random.Random(name)
    request = Request(name, [chooser.randrange(90) for _ in range(first + count)], SamplingParams())
    for pool in pools.values():
        pool.grow(name, -(-(first + count + drafts) // PAGE))
    return Work(request, first, count + drafts, drafts=tuple(chooser.randrange(90) for _ in range(drafts)))


def spoil(runner: ModelRunner) -> None:
    """Whatever standing inputs hold that a step does not lay out."""
    runner._decode._wide.fill_(GARBAGE)
    if runner._verify is not None:
        runner._verify._there.fill_(GARBAGE)
        runner._verify._host.fill_(GARBAGE)
    assert runner._prompts is not None
    for buffer in (*runner._prompts.inputs._host, runner._prompts.inputs._there):
        buffer.fill_(GARBAGE)


SCHEDULES: dict[str, tuple[list[tuple[int, int, int]], list[Key]]] = {
    "decoding": ([(9, 1, 0), (5, 1, 0), (14, 1, 0)], [GraphKey(11, NARROW)]),
    "decoding, wide": ([(9, 1, 0)], [GraphKey(4, WIDE)]),
    "a prompt": ([(0, 19, 0)], [PromptKey(56, 2, NARROW), TailKey(8, NARROW)]),
    "a prompt behind others of its own": ([(13, 16, 0)], [PromptKey(38, 2, WIDE), TailKey(3, WIDE)]),
    "prompts and company": (
        [(9, 1, 0), (0, 7, 0), (6, 1, 0), (3, 5, 0)],
        [PromptKey(64, 21, NARROW), TailKey(19, NARROW)],
    ),
    "two that fill a bucket": ([(9, 1, 0), (0, 15, 0)], [PromptKey(29, 17, WIDE), TailKey(4, WIDE)]),
    "drafts": ([(9, 1, 4), (5, 1, 0), (14, 1, 2)], [VerifyKey(16, 40, 8, NARROW)]),
    "drafts of one": ([(9, 1, 2)], [VerifyKey(4, 9, 4, WIDE)]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_in_a_stand_in_gives_its_own_logits(model: AnyModel, name: str) -> None:
    """Over KV pages that hold NaN where nobody has written, and inputs that hold garbage. The cache is the same too."""
    rows, keys = SCHEDULES[name]
    pools = pools_of()
    schedule = [make(pools, str(row), *each) for row, each in enumerate(rows)]
    stands_in, own = (started(model, pools, drafts=4 if "drafts" in name else 0) for _ in range(2))
    for runner in (stands_in, own):  # what came before in each sequence
        for work in schedule:
            if work.first:
                runner._forward(build_batch([runner._chunk(Work(work.request, 0, work.first))], PAGE, CPU))
        spoil(runner)
    only(stands_in, keys)
    logits, expected = stands_in.forward(schedule).values, own.forward(schedule).values
    assert stands_in.graphs() == GraphCounts(0, 0, len(keys))
    assert own.graphs() == GraphCounts(0, 0, 0)
    assert logits.shape == expected.shape
    # Products of other numbers of rows add up in another order.
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits.argmax(1), expected.argmax(1))
    for layer, ours, theirs in zip(model.layers, stands_in._kv.layers, own._kv.layers, strict=True):
        held = pools[layer.kind].num_pages
        torch.testing.assert_close(ours.k[:held], theirs.k[:held], rtol=1e-4, atol=1e-4, equal_nan=True)
        torch.testing.assert_close(ours.v[:held], theirs.v[:held], rtol=1e-4, atol=1e-4, equal_nan=True)


def test_rows_of_a_stand_in_are_nobodys_again(model: AnyModel) -> None:
    """After a step of its own size that had other sequences there."""
    pools = pools_of()
    many = [make(pools, f"many {row}", 0) for row in range(6)]
    one = make(pools, "one", 0)
    stands_in, own = (started(model, pools) for _ in range(2))
    only(stands_in, [GraphKey(6, NARROW)])
    stands_in.forward(many)
    poison(stands_in._kv)
    assert torch.allclose(stands_in.forward([one]).values, own.forward([one]).values, atol=1e-4)
    assert stands_in.graphs().stand_ins == 1


@pytest.fixture
def runner(model: AnyModel, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    """With a net that is captured on paper."""
    on_paper(monkeypatch)
    runner = started(model, pools_of(), drafts=3)
    enable(runner._graphs)
    runner.prepare(stand_ins=True)
    return runner


def stand_in(runner: ModelRunner, key: GraphKey | PromptKey | TailKey) -> Key:
    match key:
        case GraphKey():
            return runner._stand_ins.of(key, key.fits)
        case PromptKey():
            return runner._stand_ins.of(key, key.fits)
        case TailKey():
            return runner._stand_ins.of(key, key.fits)


def test_the_cheapest_graph_that_holds_a_step_stands_in(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of long contexts decoding has one from the start, prompts when there was time."""
    stand_ins = runner._stand_ins
    assert stand_in(runner, TailKey(3, WIDE)) == TailKey(3, WIDE)
    assert stand_in(runner, PromptKey(50, 17, WIDE)) == PromptKey(50, 17, WIDE)
    assert (stand_ins.steps, stand_ins.most_wanted()) == (0, None)
    # A capture runs nothing, whatever the inputs hold. On paper it would.
    monkeypatch.setattr(runner, "_task", lambda key: (1, whole(lambda: None)))
    while runner._later[0].pages == WIDE:
        runner.idle()
    for wanted, found in (
        (GraphKey(3, NARROW), GraphKey(3, NARROW)),
        (GraphKey(9, NARROW), GraphKey(16, NARROW)),
        (GraphKey(2, WIDE), GraphKey(8, WIDE)),
        (TailKey(3, NARROW), TailKey(4, NARROW)),
        (TailKey(3, WIDE), TailKey(4, WIDE)),
        (PromptKey(16, 2, NARROW), PromptKey(22, 2, NARROW)),
        (PromptKey(1, 2, NARROW), PromptKey(22, 2, NARROW)),
        (PromptKey(63, 2, NARROW), PromptKey(64, 2, NARROW)),
        (PromptKey(24, 2, NARROW), PromptKey(33, 2, NARROW)),  # alone, though 25 tokens in company are fewer
        (PromptKey(25, 17, NARROW), PromptKey(25, 17, NARROW)),
        (PromptKey(24, 17, NARROW), PromptKey(25, 17, NARROW)),
        (PromptKey(50, 21, NARROW), PromptKey(64, 21, NARROW)),
        (PromptKey(50, 17, WIDE), PromptKey(64, 21, WIDE)),
    ):
        before = stand_ins.steps
        assert stand_in(runner, wanted) == found
        assert stand_ins.steps - before == (wanted != found)
    # More tokens than any; and off.
    assert stand_ins.of(PromptKey(65, 2, NARROW), PromptKey(65, 2, NARROW).fits) == PromptKey(65, 2, NARROW)
    stand_ins.enabled = False
    assert stand_ins.of(GraphKey(9, NARROW), GraphKey(9, NARROW).fits) == GraphKey(9, NARROW)


def test_drafts_need_room_for_nobodys_sequences() -> None:
    key = VerifyKey(rows=4, tokens=16, longest=4, pages=NARROW)
    assert key.holds([4, 4, 4, 4], NARROW)
    assert key.holds([4, 4], NARROW)
    assert key.holds([3, 4, 1], NARROW) is False  # eight tokens of nobody's, in one row that is left
    assert not key.holds([5, 4, 4, 3], NARROW)
    assert not key.holds([4, 4, 4, 4, 1], NARROW)
    assert not key.holds([4, 4, 4, 4], WIDE)


def test_what_is_wanted_most_is_captured_first_when_there_is_time(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = runner._pools
    for step, rows in enumerate((9, 11, 11, 10, 11, 10)):
        runner.forward([make(pools, f"{step} {row}", 0) for row in range(rows)])
    before = [*runner._graphs._graphs]
    assert runner.graphs() == GraphCounts(len(before), 0, 6)
    waiting = runner._later[0]
    # A capture runs nothing, whatever the inputs hold. On paper it would.
    monkeypatch.setattr(runner, "_task", lambda key: (1, whole(lambda: None)))
    for _ in range(4):
        assert runner.idle()
    wanted = [GraphKey(rows, NARROW) for rows in (11, 10, 9)]
    assert [*runner._graphs._graphs] == [*before, *wanted, waiting]
    assert [runner._stand_ins.of(key, key.fits) for key in wanted] == wanted
    assert runner.graphs() == GraphCounts(len(before) + 4, 0, 6)


def test_a_server_that_is_never_idle_captures_what_it_wants_often(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few layers behind every 64th step. No step waits for a whole capture, and then all run in their own graph."""
    monkeypatch.setattr("microscale.engine.step.runner.PART_LAYERS", 1)
    schedule = [make(runner._pools, str(row), 0) for row in range(9)]
    before, layers = len(runner._graphs), len(runner._model.layers)
    for step in range(OFTEN * layers + 5):
        assert len(runner._graphs) == before + (step >= OFTEN * layers)
        runner.forward(schedule)
    assert runner.graphs() == GraphCounts(before + 1, 0, OFTEN * layers)
    assert len(runner._graphs._graphs[GraphKey(9, NARROW)].parts) == layers
    assert runner._stand_ins.most_wanted() is None


def test_prompts_and_drafts_have_stand_ins(runner: ModelRunner) -> None:
    """Body and tail of a prompt, each for itself; and nobody waits."""
    pools, before = runner._pools, len(runner._graphs)
    runner.forward([make(pools, "alone", 0, 35)])
    assert runner.graphs() == GraphCounts(before, 0, 1)
    runner.forward([make(pools, f"company {row}", 0, 9) for row in range(3)])
    assert runner.graphs() == GraphCounts(before, 0, 3)
    # No graph holds the drafts of three; then theirs holds those of two, and two sequences of nobody's.
    for drafts, counts in (((3, 3, 3), (1, 1, 3)), ((3, 2), (1, 1, 4))):
        first_runs = runner.first_runs()
        runner.forward([make(pools, f"{drafts} {row}", 3, drafts=each) for row, each in enumerate(drafts)])
        captured, waited_for, stand_ins = counts
        assert runner.graphs() == GraphCounts(before + captured, waited_for, stand_ins)
        assert runner.first_runs() == first_runs + 1


def test_a_large_step_without_a_graph_is_launched_and_captured_later(
    model: AnyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it. A smaller one with a long context is captured when it comes up."""
    for module in ("stand_ins", "capture_order"):
        monkeypatch.setattr(f"microscale.engine.step.{module}.LARGE", 30)
    on_paper(monkeypatch)
    pools = pools_of()
    runner = started(model, pools)
    enable(runner._graphs)
    runner.prepare(stand_ins=True)
    assert max(key.tokens for key in runner._graphs.sizes(PromptKey) if key.sequences == 2) < 64
    captured = len(runner._graphs)
    schedule = [make(pools, "large", 0, 64)]
    key = PromptKey(64, 2, NARROW)
    for step in range(1, 3):
        first_runs = runner.first_runs()
        runner.forward(schedule)
        assert runner.graphs() == GraphCounts(captured, 0, 0), step
        assert runner.first_runs() == first_runs + 1
    assert runner._stand_ins.most_wanted() == key
    assert runner.idle()
    assert key in runner._graphs
    assert runner.graphs() == GraphCounts(captured + 1, 0, 0)
    first_runs = runner.first_runs()
    runner.forward(schedule)
    assert runner.first_runs() == first_runs
    runner.forward([make(pools, "wide", 2 * SHORT_CONTEXT - 30, 20)])
    assert runner.graphs().waited_for == 2, "body and tail"


def test_a_large_step_that_is_launched_gives_its_own_logits(model: AnyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("microscale.engine.step.stand_ins.LARGE", 30)
    pools = pools_of()
    launched, own = (started(model, pools) for _ in range(2))
    spoil(launched)
    only(launched, [PromptKey(33, 2, NARROW), TailKey(1, NARROW)])
    launched._graphs.enabled, launched._graphs._failed = True, True
    schedule = [make(pools, "large", 0, 64)]
    logits = launched.forward(schedule).values
    assert launched._stand_ins.most_wanted() == PromptKey(64, 2, NARROW)
    torch.testing.assert_close(logits, own.forward(schedule).values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "card"), [("gpt-oss-20b", "h200"), ("gemma-4-26b-a4b", "gb10")])
@pytest.mark.parametrize("max_rows", [1, 20, 64, 256])
def test_every_step_fits_into_the_net(name: str, card: str, max_rows: int) -> None:
    """With so much padding at most; one prompt runs the kernels of its own size. Steps of up to 1024 tokens and short
    contexts from the start, the others after the first captures behind it."""
    kernels = kernels_by_tokens(PRESETS[name], Ops(known(card), Activations.BF16, Preference()))
    ends = buckets(PROMPT_GRAPH_TOKENS, kernels)
    limits = Limits(16, 128, max_num_seqs=max_rows)
    inputs = PromptInputs({kind: PagePool(9) for kind in LayerKind}, limits, 8192, ends, CPU)
    order = CaptureOrder(16, max_rows, 8192, 0, None, inputs, kernel_ends(ends, kernels))
    net, later = [key for kind in order.first() for key in kind], order.later()
    assert len(net) == len(set(net))
    assert len([key for key in net if not isinstance(key, TailKey)]) <= 46
    assert not set(net) & set(later)
    assert {key.pages for key in net if isinstance(key, GraphKey)} == {128, 8192}
    assert {key.pages for key in net if not isinstance(key, GraphKey)} == {128}
    rest = list(takewhile(lambda key: key.pages == 8192 or (isinstance(key, PromptKey) and key.tokens > 1024), later))
    assert len(rest) <= 25
    for key in later:
        soon = isinstance(key, GraphKey) or (key.pages == 128 and (isinstance(key, TailKey) or key.tokens <= 1024))
        there = net if soon else [*net, *rest]
        if isinstance(key, GraphKey | TailKey):
            alike = [each.rows for each in there if type(each) is type(key) and each.pages == key.pages]
            found = min(size for size in alike if size >= key.rows)
            assert key.pages == 8192 or found <= 2 * key.rows
            continue
        assert isinstance(key, PromptKey)
        bodies = [each for each in there if isinstance(each, PromptKey)]
        body = min((each for each in bodies if key.fits(each)), key=lambda each: each.cost)
        if key.pages == 128 and key.tokens >= FIRST_TOKENS and key.sequences == 2:
            assert kernels(body.tokens) == kernels(key.tokens)
            assert body.tokens < 1.5 * key.tokens
        elif key.pages == 128 and key.tokens > 2 * FIRST_TOKENS:
            assert body.tokens < 2.2 * key.tokens


def test_a_net_is_as_fine_as_it_should_be() -> None:
    """Every size from 17 on runs in one at most so many times as large; of kernels that change, the last is there."""
    ends = buckets(1024, lambda tokens: ())
    for ratio in (1.5, 1.7, 2.0, 4.0):
        net = coarse(ends, [1024], ratio, 16)
        assert net[0] == 1024
        smallest_first = [16, *reversed(net)]
        assert all(high <= 1.1 * ratio * (low + 1) for low, high in pairwise(smallest_first))
    assert {64, 360, 1024} <= set(coarse([*ends, 360], [1, 64, 360, 1024], 1.5, 15))
    assert coarse([1, 2, 3], [3], 1.5, 15) == []
