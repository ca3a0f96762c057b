"""Draft heads at work in an engine on a CPU. Tokens are those without drafts, whatever the head is worth; and what it
drafts is what it guesses when everything is computed anew, whatever became of its pages in between: equal tokens alone
would not show a stale one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from microscale.engine.engine import Engine
from microscale.engine.grammar import Vocabulary
from microscale.engine.limits import Limits
from microscale.engine.loading.build import assemble
from microscale.engine.loading.memory import Workload
from microscale.engine.loading.options import LoadOptions
from microscale.engine.output import Stats
from microscale.engine.pages import PagePool
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.speculation.drafter import Context, Launched, Target
from microscale.engine.speculation.head import GRAPH_ROWS, HeadDrafter, in_one_piece
from microscale.engine.speculation.length import FixedLength
from microscale.engine.speculation.speculation import Speculation
from microscale.engine.work import Work
from microscale.models.config import LayerKind
from microscale.models.draft_heads.drafting import DraftHead
from microscale.models.families import AnyModel
from microscale.models.recorded import Step
from microscale.models.taps import Taps
from microscale.quality.tasks import DEMO_FOLDER
from microscale.text.formats import chat_format_for
from microscale.text.grammar import Schema, Turn
from microscale.text.tokenizer import Tokenizer
from support.demo_prompts import demo_model, demo_prompts
from support.drafters import Uneven
from support.heads import Anew, PaddedDrafter, RecordingDrafter, random_head, trained_head
from support.loading import load_model

CPU = torch.device("cpu")
Tokens = list[list[int]]
NEW = 20
FAMILIES = ["gpt-oss-tiny", "gemma-4-tiny", "qwen3-moe-tiny"]
KINDS = ["eagle3", "dflash"]


def limits_for(model: AnyModel, **changes: Any) -> Limits:
    numbers = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 512} | changes
    return Limits(page_size=model.page_size, window=model.config.sliding_window, **numbers)


def finish(engine: Engine, requests: Sequence[Request]) -> tuple[Tokens, Stats]:
    """They come one a step, and pages are checked after each."""
    for request in requests:
        engine.submit(request)
        engine.step()
        engine.check()
    while engine.has_work:
        engine.step()
        engine.check()
    return [request.tokens[request.num_prompt :] for request in requests], engine.stats()


def generate(
    model: AnyModel,
    prompts: Sequence[Sequence[int]],
    drafter: HeadDrafter | None,
    limits: Limits | None = None,
    pages: int = 400,
    *,
    fill: bool = False,
    **options: Any,
) -> tuple[Tokens, Stats]:
    speculation = None if drafter is None else Speculation(drafter, drafter._most)
    limits = limits_for(model) if limits is None else limits
    engine = assemble(model, limits, dict.fromkeys(LayerKind, pages), fill_up_prompts=fill, speculation=speculation)
    asked = {"max_tokens": NEW} | options
    return finish(engine, [Request(str(n), p, SamplingParams(**asked, seed=n)) for n, p in enumerate(prompts)])


def check_drafts(model: AnyModel, head: DraftHead, drafter: RecordingDrafter, least: int = 20) -> None:
    """Every draft is the head's own guess after the tokens that it was asked for."""
    anew = Anew(model, head)
    said = {context: draft for context, draft in drafter.said if draft}
    assert len(said) >= least
    for context, draft in sorted(said.items(), key=lambda pair: -len(pair[0])):  # the longest teach the others' taps
        assert draft == anew.guesses(context, drafter._most)[: len(draft)], f"after {len(context)} tokens"


# ---- the embedded model and its trained head -------------------------------------------------------------------------


@cache
def undrafted() -> tuple[list[list[int]], Tokens]:
    prompts = demo_prompts(6)
    return prompts, generate(demo_model(), prompts, None)[0]


def test_the_trained_head_drafts_well_and_changes_nothing() -> None:
    prompts, want = undrafted()
    drafter = RecordingDrafter(trained_head(), 3)
    found, stats = generate(demo_model(), prompts, drafter)
    assert found == want
    assert stats.num_accepted_tokens > 0.4 * stats.num_draft_tokens
    assert drafter.num_ahead > 0.3 * stats.num_drafts  # not while requests come, nor near their ends
    check_drafts(demo_model(), trained_head(), drafter)


def test_small_pages_and_long_drafts_that_come_together() -> None:
    """Guesses of several sequences go beyond the pages that these hold."""
    model, head = demo_model(4), trained_head(4)
    prompts, want = undrafted()
    drafter = RecordingDrafter(head, 6)
    engine = assemble(model, limits_for(model), dict.fromkeys(LayerKind, 400), speculation=Speculation(drafter, 6))
    requests = [Request(str(n), p, SamplingParams(max_tokens=NEW)) for n, p in enumerate(prompts)]
    for request in requests[1:]:
        engine.submit(request)
    assert finish(engine, requests[:1])[1].num_accepted_tokens > 0
    assert [request.tokens[request.num_prompt :] for request in requests] == want
    check_drafts(model, head, drafter)


def test_a_random_head_is_only_slow() -> None:
    prompts, want = undrafted()
    found, stats = generate(demo_model(), prompts, HeadDrafter(random_head("eagle3", demo_model()), 2))
    assert found == want
    assert stats.num_draft_tokens > 100
    assert stats.num_accepted_tokens < 0.02 * stats.num_draft_tokens


def test_a_turn_that_follows_a_schema_is_the_one_without_drafts() -> None:
    chat_format = chat_format_for(Tokenizer.load(DEMO_FOLDER))
    tokenizer = chat_format.tokenizer
    vocabulary = Vocabulary(tokenizer.vocabulary(), sorted(tokenizer.control.values()), tokenizer.split_pattern)
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
    grammar = chat_format.turn_grammar(Turn(answer=Schema({**schema, "additionalProperties": False})))
    stops = tuple(sorted(chat_format.stops))

    def run(speculation: Speculation | None) -> tuple[Tokens, Stats]:
        model = demo_model()
        engine = assemble(
            model, limits_for(model), dict.fromkeys(LayerKind, 400), vocabulary=vocabulary, speculation=speculation
        )
        params = [
            SamplingParams(max_tokens=60, stop_token_ids=stops, grammar=grammar, temperature=float(n % 2), seed=n)
            for n in range(4)
        ]
        return finish(engine, [Request(str(n), p, q) for n, (p, q) in enumerate(zip(undrafted()[0], params))])  # noqa: B905

    want, _ = run(None)
    found, stats = run(Speculation(HeadDrafter(trained_head(), 4), 4))
    assert found == want
    assert all(tokens[-1] in stops for tokens in want)
    assert stats.num_accepted_tokens > 0


# ---- random heads on tiny models in every situation ------------------------------------------------------------------


@cache
def tiny_model(name: str, page_size: int) -> AnyModel:
    return load_model(LoadOptions(name, load_format="dummy", device="cpu", workload=Workload(page_size=page_size)))


@cache
def tiny_head(kind: str, name: str, page_size: int) -> DraftHead:
    return random_head(kind, tiny_model(name, page_size))


def tiny_prompts(vocab: int) -> list[list[int]]:
    """Some begin with the same 48 tokens, a whole number of pages, and part at its end, behind it or before it."""
    shared = [(7 * n * n + 3) % vocab for n in range(48)]
    own = [[(5 * n * n + length) % vocab for n in range(length)] for length in (1, 7, 33)]
    return [*own, shared + own[0], shared + own[1], shared, shared + own[2], shared[:45] + own[1]]


@cache
def tiny_alone(name: str, **options: Any) -> Tokens:
    """One request at a time, without prefix cache or drafts."""
    model = tiny_model(name, 16)
    limits = limits_for(model, max_num_seqs=1, prefix_caching=False)
    return generate(model, tiny_prompts(model.config.vocab_size), None, limits, ignore_eos=True, **options)[0]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_family(name: str, kind: str) -> None:
    model, head = tiny_model(name, 16), tiny_head(kind, name, 16)
    drafter = RecordingDrafter(head, 4)
    found, stats = generate(model, tiny_prompts(model.config.vocab_size), drafter, ignore_eos=True)
    assert found == tiny_alone(name)
    assert stats.prefix_hits > 0
    check_drafts(model, head, drafter)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize(("budget", "fill"), [(12, False), (12, True), (64, True), (512, False)])
def test_pages_budgets_and_prompts_beside_drafts(kind: str, size: int, budget: int, fill: bool) -> None:
    """Prompts in chunks, beside decoding, found in the prefix cache; drafts cut short by the budget."""
    model, head = tiny_model("gpt-oss-tiny", size), tiny_head(kind, "gpt-oss-tiny", size)
    drafter = RecordingDrafter(head, 5)
    limits = limits_for(model, max_num_batched_tokens=budget)
    prompts = tiny_prompts(model.config.vocab_size)
    found, stats = generate(model, prompts, drafter, limits, 1600 // size, fill=fill, ignore_eos=True)
    assert found == tiny_alone("gpt-oss-tiny")
    assert stats.prefix_hits > 0
    check_drafts(model, head, drafter)


@pytest.mark.parametrize("kind", KINDS)
def test_preemption(kind: str) -> None:
    model, head = tiny_model("gpt-oss-tiny", 4), tiny_head(kind, "gpt-oss-tiny", 4)
    drafter = RecordingDrafter(head, 5)
    prompts = tiny_prompts(model.config.vocab_size)
    found, stats = generate(model, prompts, drafter, limits_for(model), 44, ignore_eos=True)
    assert stats.num_preemptions > 0
    assert found == tiny_alone("gpt-oss-tiny")
    check_drafts(model, head, drafter)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_filled_up_as_for_a_graph(kind: str) -> None:
    """Rows and sequences of nobody's, as captured steps have them, change no draft."""
    model, head = tiny_model("gpt-oss-tiny", 16), tiny_head(kind, "gpt-oss-tiny", 16)
    drafter = PaddedDrafter(head, 3)
    found, _ = generate(
        model, tiny_prompts(model.config.vocab_size), drafter, limits_for(model, max_num_seqs=5), ignore_eos=True
    )
    assert found == tiny_alone("gpt-oss-tiny")
    check_drafts(model, head, drafter)


def test_a_page_is_found_only_by_who_goes_on_as_it_was_written() -> None:
    """The head's last row of a page holds the token after it. Two that part exactly at a page's end do not share that
    page, and a third that goes on as the second finds the second's."""
    model, head = tiny_model("gpt-oss-tiny", 16), tiny_head("eagle3", "gpt-oss-tiny", 16)
    vocab = model.config.vocab_size
    shared = [(11 * n * n + 5) % vocab for n in range(32)]
    tails = [[at] * 20 for at in (7, 8)]
    prompts = [shared + tails[0], shared + tails[1], shared + tails[1] + [9], shared + tails[0] + [9]]
    drafter = RecordingDrafter(head, 3)
    engine = assemble(model, limits_for(model), dict.fromkeys(LayerKind, 100), speculation=Speculation(drafter, 3))
    cached = []
    for at, prompt in enumerate(prompts):
        request = Request(str(at), prompt, SamplingParams(max_tokens=8, ignore_eos=True))
        finish(engine, [request])
        cached.append(request.num_cached)
    assert cached == [0, 16, 48, 48]
    check_drafts(model, head, drafter, 12)


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_that_differ_and_requests_without_drafts(kind: str) -> None:
    """Nothing for some steps, for penalised requests ever: the head keeps up meanwhile."""
    model, head = tiny_model("gpt-oss-tiny", 16), tiny_head(kind, "gpt-oss-tiny", 16)
    prompts = tiny_prompts(model.config.vocab_size)
    drafter = RecordingDrafter(head, 4)
    engine = assemble(
        model, limits_for(model), dict.fromkeys(LayerKind, 400), speculation=Speculation(drafter, 4, Uneven(4))
    )
    params = [SamplingParams(max_tokens=NEW, ignore_eos=True, presence_penalty=float(n == 2)) for n in range(8)]
    found, stats = finish(engine, [Request(str(n), p, q) for n, (p, q) in enumerate(zip(prompts, params, strict=True))])
    want = tiny_alone("gpt-oss-tiny")
    assert [tokens for n, tokens in enumerate(found) if n != 2] == [tokens for n, tokens in enumerate(want) if n != 2]
    assert stats.num_drafts > 0
    if kind == "eagle3":
        check_drafts(model, head, drafter)


def test_steps_run_ahead_while_nothing_is_wanted() -> None:
    """With a length of 0 nothing is guessed, but the rows are kept: drafts that are wanted later are the head's own."""

    class Later(FixedLength):
        def choose(self, requests: Sequence[Request], sequences: int) -> Sequence[int]:
            return [3 if request.num_generated >= 9 else 0 for request in requests]

    model, head = tiny_model("gpt-oss-tiny", 16), tiny_head("eagle3", "gpt-oss-tiny", 16)
    drafter = RecordingDrafter(head, 3)
    engine = assemble(
        model, limits_for(model), dict.fromkeys(LayerKind, 400), speculation=Speculation(drafter, 3, Later(3))
    )
    prompts = tiny_prompts(model.config.vocab_size)[:3]
    asked = [Request(str(n), p, SamplingParams(max_tokens=NEW, ignore_eos=True)) for n, p in enumerate(prompts)]
    assert finish(engine, asked)[0] == tiny_alone("gpt-oss-tiny")[:3]
    check_drafts(model, head, drafter, 12)


def test_a_step_is_not_read_for_drafts_that_nobody_guessed() -> None:
    drafter = HeadDrafter(tiny_head("eagle3", "gpt-oss-tiny", 16), 3)
    context = Context(Request("a", [1], SamplingParams()), 3)
    assert not drafter.expects(context)
    drafter._host = None
    drafter._guesses = drafter._to_host(torch.tensor([[1, 2, 3]]), Launched((), None, {"a": 0}))
    assert drafter.expects(context)
    assert not drafter.expects(Context(Request("b", [1], SamplingParams()), 3))


def test_guesses_on_the_device_are_those_of_the_last_step_in_its_order() -> None:
    drafter = HeadDrafter(tiny_head("eagle3", "gpt-oss-tiny", 16), 3)
    a, b = (Request(name, [1], SamplingParams()) for name in "ab")
    guessed = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert drafter.drafts_ahead([a, b], 2) is None
    drafter._host = None
    drafter._guesses = drafter._to_host(guessed, Launched((), None, {"a": 0, "b": 1}))
    found = drafter.drafts_ahead([a, b], 2)
    assert found is not None
    assert found.tolist() == [[1, 2], [4, 5]]
    for others in ([b, a], [a], [b], [a, b, Request("c", [1], SamplingParams())]):
        assert drafter.drafts_ahead(others, 2) is None
    drafter.forget("a")
    assert drafter.drafts_ahead([b], 2) is None


def test_a_rest_leaves_holes_in_all_pages_that_a_step_ahead_may_write_to() -> None:
    drafter, pool = HeadDrafter(tiny_head("eagle3", "gpt-oss-tiny", 4), 3), PagePool(9)
    limits = limits_for(tiny_model("gpt-oss-tiny", 4))
    taps = Taps.empty(drafter.taps, 8, 64, torch.float32, CPU)
    drafter.attach(Target(dict.fromkeys(LayerKind, pool), limits, taps))
    request = Request("r", range(5), SamplingParams())
    pool.grow("r", 5)
    drafter.rest(Launched([Work(request, 5, 4, ahead=True, drafts=(0, 0, 0), slack=3)]))
    assert drafter._holes == set(pool.pages_of("r")[1:3])
    drafter.rest(Launched([Work(request, 5, 4, ahead=True, drafts=(0, 0, 0), slack=4)]))
    assert drafter._holes == set(pool.pages_of("r")[1:4])


def test_seeded_tokens_are_those_without_drafts() -> None:
    model, head = tiny_model("gpt-oss-tiny", 16), tiny_head("eagle3", "gpt-oss-tiny", 16)
    options: dict[str, Any] = {"temperature": 1.5, "top_p": 0.9, "top_k": 50}
    drafter = RecordingDrafter(head, 4)
    found, _ = generate(model, tiny_prompts(model.config.vocab_size), drafter, ignore_eos=True, **options)
    assert found == tiny_alone("gpt-oss-tiny", **options)
    assert drafter.num_ahead
    check_drafts(model, head, drafter)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_of_requests_that_come_and_go(kind: str) -> None:
    """Arrivals, aborts, stop tokens in the midst of drafts, scored prompts, prompts without output, few pages."""
    model, head = tiny_model("gpt-oss-tiny", 4), tiny_head(kind, "gpt-oss-tiny", 4)
    chooser = random.Random(3)
    prompts, want = tiny_prompts(model.config.vocab_size), tiny_alone("gpt-oss-tiny")
    drafter = RecordingDrafter(head, 5)
    limits = limits_for(model, max_num_seqs=5, max_num_batched_tokens=48)
    engine = assemble(model, limits, dict.fromkeys(LayerKind, 60), speculation=Speculation(drafter, 5))
    asked: dict[str, tuple[int, Request]] = {}
    for turn in range(40):
        at = chooser.randrange(len(prompts))
        stop = want[at][chooser.randrange(NEW)]
        ways: list[dict[str, Any]] = [{}, {}, {"stop_token_ids": (stop,)}, {"prompt_logprobs": 1}]
        ways.append({"prompt_logprobs": 0, "max_tokens": 0})
        options = {"max_tokens": NEW, "ignore_eos": True} | chooser.choice(ways)
        request = Request(f"r{turn}", prompts[at], SamplingParams(**options))
        engine.submit(request)
        asked[request.request_id] = at, request
        for _ in range(chooser.randrange(6)):
            engine.step()
            engine.check()
        if chooser.random() < 0.2 and engine.abort(gone := chooser.choice(list(asked))):
            del asked[gone]
    while engine.has_work:
        engine.step()
        engine.check()
    for at, request in asked.values():
        tokens, stops = request.tokens[request.num_prompt :], request.params.stop_token_ids
        assert tokens == want[at][: len(tokens)]
        assert len(tokens) == request.params.max_tokens or tokens[-1] in stops
    assert engine.stats().num_preemptions > 0
    check_drafts(model, head, drafter, 40)


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("columns", [1, 5, 7])
def test_guesses_are_copied_to_memory_in_one_piece(rows: int, columns: int) -> None:
    """Drafts that are shorter than the longest: a copy to every other part of a line waits for the device."""
    room = torch.zeros(64 * 7, dtype=torch.int64)
    part = in_one_piece(room, rows, columns)
    assert part.is_contiguous()
    part.copy_(torch.arange(rows * columns).view(rows, columns))
    assert room[: rows * columns].tolist() == list(range(rows * columns))


def test_long_prompts_leave_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each length would have one of its own, of hundreds of megabytes."""
    asked: list[int] = []
    model = tiny_model("gpt-oss-tiny", 16)
    prompt = [token % model.config.vocab_size for token in range(GRAPH_ROWS + 50)]
    limits = limits_for(model, max_num_batched_tokens=2048, max_model_len=2048)
    drafter = HeadDrafter(tiny_head("eagle3", "gpt-oss-tiny", 16), 2)
    pages = dict.fromkeys(LayerKind, 2 * 2048 // 16)
    engine = assemble(model, limits, pages, speculation=Speculation(drafter, 2))
    run = drafter._graphs.run

    def listed(key: Step, work: Callable[[], Any]) -> Any:
        asked.append(key.tokens)
        return run(key, work)

    monkeypatch.setattr(drafter._graphs, "run", listed)
    engine.submit(Request("r", prompt, SamplingParams(max_tokens=4, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    assert asked
    assert max(asked) < 8
