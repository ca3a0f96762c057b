"""Drafts on real models on a CPU, with every kind of drafter: greedy and seeded tokens are those without drafts, in any
company. What a draft head drafts is what it drafts when everything is computed again from the beginning, whatever
happened to its pages in between: equal tokens alone would not show a stale page."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from microscale import hardware
from microscale.engine.config import EngineConfig
from microscale.engine.engine import Engine
from microscale.engine.grammar import Vocabulary
from microscale.engine.limits import Limits
from microscale.engine.loading.build import assemble
from microscale.engine.loading.drafting import load_head, open_head, prepare_head
from microscale.engine.output import Stats
from microscale.engine.pages import PagePool
from microscale.engine.request import Finish, Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.speculation.config import SpeculativeConfig
from microscale.engine.speculation.drafter import Context, DraftTarget, LaunchedStep
from microscale.engine.speculation.head import GRAPH_ROWS, HeadDrafter, in_one_piece
from microscale.engine.speculation.length import AutomaticLength, DraftCosts, FixedLength, Length
from microscale.engine.speculation.speculation import Speculation
from microscale.engine.work import Work
from microscale.hardware.draft_costs import step_curve
from microscale.models.config import LayerKind
from microscale.models.draft_heads.drafting import DraftHead
from microscale.models.families import AnyModel
from microscale.models.recorded import Step
from microscale.models.taps import Taps
from microscale.planning.ops import Activations
from microscale.planning.plan import Setup
from microscale.text.formats import chat_format_for
from microscale.text.grammar import Schema, Turn
from microscale.text.tokenizer import Tokenizer
from microscale_lab.quality.tasks import DEMO_FOLDER
from support import tiny_qwen3_5
from support.demo_prompts import demo_model, demo_prompts
from support.drafters import Uneven, replaying
from support.heads import Anew, PaddedDrafter, RecordingDrafter, random_head, trained_head
from support.loading import load_model

pytestmark = pytest.mark.usefixtures("admits_until_pages_run_out")
CPU = torch.device("cpu")
Tokens = list[list[int]]
NEW = 20
HEADS = ["eagle3", "dflash"]
ONE_HEAD = ["eagle3", pytest.param("dflash", marks=pytest.mark.nightly)]
"""Where both kinds of head take the same way through the engine, one is enough by day."""
DRAFTERS = [pytest.param("ngram", marks=pytest.mark.nightly), "replayed", *ONE_HEAD]
"""As do both kinds that draft on the host."""
TINY = "gpt-oss-tiny"


def limits_for(model: AnyModel, **changes: Any) -> Limits:
    numbers = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 512} | changes
    return Limits(page_size=model.page_size, window=model.config.sliding_window, **numbers)


def finish(engine: Engine, requests: Sequence[Request]) -> tuple[Tokens, Stats]:
    """Requests arrive one per step, and pages are checked after each step."""
    for request in requests:
        engine.submit(request)
        engine.step()
        engine.check()
    while engine.has_work:
        engine.step()
        engine.check()
    return [request.tokens[request.num_prompt :] for request in requests], engine.stats()


def generate(
    model: AnyModel, prompts: Sequence[Sequence[int]], speculation: Speculation | None, limits: Limits | None = None,
    pages: int = 400, *, fill: bool = False, **options: Any,
) -> tuple[Tokens, Stats]:  # fmt: skip
    limits = limits_for(model) if limits is None else limits
    engine = assemble(model, limits, dict.fromkeys(LayerKind, pages), fill_up_prompts=fill, speculation=speculation)
    asked = {"max_tokens": NEW} | options
    return finish(engine, [Request(str(n), p, SamplingParams(**asked, seed=n)) for n, p in enumerate(prompts)])


@cache
def tiny_model(name: str, page_size: int) -> AnyModel:
    return load_model(EngineConfig(name, load_format="dummy", device="cpu", block_size=page_size))


@cache
def tiny_head(kind: str, name: str, page_size: int) -> DraftHead:
    return random_head(kind, tiny_model(name, page_size))


def tiny_prompts(vocab: int) -> list[list[int]]:
    """Some begin with the same 48 tokens, a whole number of pages, and differ from its end on, after it or before."""
    shared = [(7 * n * n + 3) % vocab for n in range(48)]
    own = [[(5 * n * n + length) % vocab for n in range(length)] for length in (1, 7, 33)]
    return [*own, shared + own[0], shared + own[1], shared, shared + own[2], shared[:45] + own[1]]


@cache
def tiny_alone(name: str = TINY, **options: Any) -> Tokens:
    """One request at a time, without prefix cache or drafts."""
    model = tiny_model(name, 16)
    limits = limits_for(model, max_num_seqs=1, prefix_caching=False)
    return generate(model, tiny_prompts(model.config.vocab_size), None, limits, ignore_eos=True, **options)[0]


class Drafting:
    """A drafter of a kind for a tiny model, and what must be true of its drafts afterwards."""

    def __init__(self, kind: str, name: str, page_size: int, most: int, length: Length | None = None, **options: Any):
        self.model = tiny_model(name, page_size)
        self.prompts, self.want = tiny_prompts(self.model.config.vocab_size), tiny_alone(name, **options)
        self._head = tiny_head(kind, name, page_size) if kind in HEADS else None
        if self._head is not None:
            self.drafter = RecordingDrafter(self._head, most)
            self.speculation = Speculation(self.drafter, most, length)
        elif kind == "ngram":
            config = SpeculativeConfig("ngram", most, prompt_lookup_min=1, prompt_lookup_max=4)
            self.speculation = Speculation.of(config)
        else:
            pairs = list(zip(self.prompts, self.want, strict=True))
            self.speculation = replaying(pairs, self.model.config.vocab_size, most, 0.7)
        if length is not None:
            self.speculation._length = length

    def check(self, least: int = 20) -> None:
        if self._head is not None:
            check_drafts(self.model, self._head, self.drafter, least)


def check_drafts(model: AnyModel, head: DraftHead, drafter: RecordingDrafter, least: int = 20) -> None:
    """Every draft is the head's own after the tokens that it was asked for."""
    anew = Anew(model, head)
    said = {context: draft for context, draft in drafter.said if draft}
    assert len(said) >= least
    for context, draft in sorted(said.items(), key=lambda pair: -len(pair[0])):  # the longest teach the others' taps
        assert draft == anew.guesses(context, drafter._most)[: len(draft)], f"after {len(context)} tokens"


# ---- the embedded model ----------------------------------------------------------------------------------------------


@cache
def undrafted() -> tuple[list[list[int]], Tokens]:
    prompts = demo_prompts(6)
    return prompts, generate(demo_model(), prompts, None)[0]


@pytest.mark.parametrize("name", ["ngram", pytest.param("uneven", marks=pytest.mark.nightly), "trained", "random head"])
def test_the_embedded_model_says_the_same(name: str) -> None:
    prompts, want = undrafted()
    model = demo_model()
    drafter = RecordingDrafter(trained_head(), 3)
    uneven = replaying(list(zip(prompts, want, strict=True)), model.config.vocab_size, 4, luck=0.7)
    uneven._length = Uneven(4)
    speculation = {
        "ngram": Speculation.of(SpeculativeConfig("ngram", 4, prompt_lookup_min=2, prompt_lookup_max=4)),
        "uneven": uneven,
        "trained": Speculation(drafter, 3),
        "random head": Speculation(HeadDrafter(random_head("eagle3", model), 2), 2),
    }[name]
    found, stats = generate(model, prompts, speculation)
    assert found == want
    assert stats.num_drafts > 0
    share = stats.num_accepted_tokens / stats.num_draft_tokens
    assert share < 0.02 if name == "random head" else share > (0.4 if name == "trained" else 0.05)
    if name == "trained":
        assert drafter.num_ahead > 0.3 * stats.num_drafts  # not while requests arrive, nor near their ends
        check_drafts(model, trained_head(), drafter)


def test_a_turn_that_follows_a_schema_is_the_one_without_drafts() -> None:
    chat_format = chat_format_for(Tokenizer.load(DEMO_FOLDER))
    tokenizer = chat_format.tokenizer
    vocabulary = Vocabulary(tokenizer.vocabulary(), sorted(tokenizer.control.values()), tokenizer.split_pattern)
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
    grammar = chat_format.turn_grammar(Turn(answer=Schema({**schema, "additionalProperties": False})))
    stops = tuple(sorted(chat_format.stops))

    def run(speculation: Speculation | None) -> tuple[Tokens, Stats]:
        model, pages = demo_model(), dict.fromkeys(LayerKind, 400)
        engine = assemble(model, limits_for(model), pages, vocabulary=vocabulary, speculation=speculation)
        params = [
            SamplingParams(max_tokens=60, stop_token_ids=stops, grammar=grammar, temperature=float(n % 2), seed=n)
            for n in range(4)
        ]
        return finish(engine, [Request(str(n), undrafted()[0][n], each) for n, each in enumerate(params)])

    want, _ = run(None)
    found, stats = run(Speculation(HeadDrafter(trained_head(), 4), 4))
    assert found == want
    assert all(tokens[-1] in stops for tokens in want)
    assert stats.num_accepted_tokens > 0


# ---- tiny models in every situation ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((TINY, kind) for kind in ("replayed", *HEADS)),
        *((name, "eagle3") for name in ("gemma-4-tiny", "qwen3-moe-tiny")),
        *(
            pytest.param(name, kind, marks=pytest.mark.nightly)
            for name in ("gemma-4-tiny", "qwen3-moe-tiny")
            for kind in ("replayed", "dflash")
        ),
    ],
)
def test_every_family(name: str, kind: str) -> None:
    case = Drafting(kind, name, 16, 4)
    found, stats = generate(case.model, case.prompts, case.speculation, ignore_eos=True)
    assert found == case.want
    assert stats.prefix_hits > 0
    case.check()


@pytest.mark.parametrize(("size", "budget", "pages"), [(16, 512, 400), (4, 24, 75)])
def test_an_mtp_layer_behind_layers_with_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, budget: int, pages: int
) -> None:
    """Next to others, with prompts in chunks, prefixes that are found, preemption, and drafts that are accepted."""
    config = tiny_qwen3_5.CASES["as_published"]
    folder = str(tiny_qwen3_5.write_qwen3_5(tmp_path, config, *tiny_qwen3_5.often_right(config)))
    options = {"device": "cpu", "dtype": "float32", "layer_format": ("experts=mxfp8",), "block_size": size}
    model = load_model(EngineConfig(folder, **options))  # type: ignore[arg-type]
    weights = open_head(SpeculativeConfig("mtp", 3), folder, model.config, offline=True)
    head = load_head(prepare_head(weights, Setup(hardware.cpu(), Activations.FLOAT32), size), model)
    chooser = random.Random(1)
    shared, *own = ([chooser.randrange(256) for _ in range(length)] for length in (100, 1, 9, 30, 9, 10, 12, 14))
    prompts = [*own[:3], *(shared + rest for rest in own[3:]), shared[:90] + [7] * 9, shared + [5] * 20]
    alone = limits_for(model, max_num_seqs=1, prefix_caching=False)
    wanted = generate(model, prompts, None, alone, ignore_eos=True)[0]
    drafter = RecordingDrafter(head, 3)
    observe, seen = drafter.observe, list[tuple[bool, int]]()

    def look(step: LaunchedStep, most: int) -> None:
        seen.append((len(step.first_rows) < len(step.schedule), most))
        observe(step, most)

    monkeypatch.setattr(drafter, "observe", look)
    limits = limits_for(model, max_num_batched_tokens=budget)
    found, stats = generate(model, prompts, Speculation(drafter, 3), limits, pages, ignore_eos=True)
    assert found == wanted
    assert stats.prefix_hits > 0
    assert stats.num_accepted_tokens > 30
    assert (stats.num_preemptions > 0) == (pages == 75)
    # Nothing is drafted for a step in which a prompt goes on: it would run without these drafts.
    assert True in dict(seen)
    assert not any(most for prompt_goes_on, most in seen if prompt_goes_on)
    check_drafts(model, head, drafter)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_seeded_tokens_are_those_without_drafts(kind: str) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "top_p": 0.9, "top_k": 50}
    case = Drafting(kind, TINY, 16, 4, **options)
    assert case.want != tiny_alone()
    assert generate(case.model, case.prompts, case.speculation, ignore_eos=True, **options)[0] == case.want
    case.check()


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize(
    ("size", "budget", "fill"), [(4, 12, True), pytest.param(16, 64, False, marks=pytest.mark.nightly)]
)
def test_page_sizes_budgets_and_prompts_next_to_drafts(kind: str, size: int, budget: int, fill: bool) -> None:
    """Prompts in chunks, next to decoding, found in the prefix cache; drafts cut short by the budget."""
    case = Drafting(kind, TINY, size, 5)
    limits = limits_for(case.model, max_num_batched_tokens=budget)
    found, stats = generate(
        case.model, case.prompts, case.speculation, limits, 1600 // size, fill=fill, ignore_eos=True
    )
    assert found == case.want
    assert stats.prefix_hits > 0
    case.check()


@pytest.mark.parametrize("kind", DRAFTERS)
def test_preemption(kind: str) -> None:
    case = Drafting(kind, TINY, 4, 5)
    found, stats = generate(case.model, case.prompts, case.speculation, limits_for(case.model), 32, ignore_eos=True)
    assert stats.num_preemptions > 0
    assert found == case.want
    case.check()


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("automatic", [False, True], ids=["uneven", "automatic"])
def test_lengths_that_change_and_requests_without_drafts(kind: str, automatic: bool) -> None:
    """Some steps have no drafts, and penalised requests never do: a head keeps up meanwhile."""
    length = AutomaticLength(DraftCosts(step_curve(32, 4)), 4) if automatic else Uneven(4)
    case = Drafting(kind, TINY, 16, 4, length)
    engine = assemble(case.model, limits_for(case.model), dict.fromkeys(LayerKind, 400), speculation=case.speculation)
    params = [SamplingParams(max_tokens=NEW, ignore_eos=True, presence_penalty=float(n == 2)) for n in range(8)]
    requests = [Request(str(n), p, q) for n, (p, q) in enumerate(zip(case.prompts, params, strict=True))]
    found, stats = finish(engine, requests)
    assert [tokens for n, tokens in enumerate(found) if n != 2] == [t for n, t in enumerate(case.want) if n != 2]
    assert stats.num_drafts > 0
    if kind == "eagle3":  # what a DFlash head drafts depends on the length
        case.check(3)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_stream_of_requests_that_come_and_go(kind: str) -> None:
    """Arrivals, aborts, stop tokens within drafts, scored prompts, prompts without output, few pages."""
    case = Drafting(kind, TINY, 4, 5)
    chooser = random.Random(3)
    limits = limits_for(case.model, max_num_seqs=5, max_num_batched_tokens=48)
    engine = assemble(case.model, limits, dict.fromkeys(LayerKind, 40), speculation=case.speculation)
    asked: dict[str, tuple[int, Request]] = {}
    for turn in range(40):
        at = chooser.randrange(len(case.prompts))
        stop = case.want[at][chooser.randrange(NEW)]
        ways: list[dict[str, Any]] = [{}, {}, {"stop_token_ids": (stop,)}, {"prompt_logprobs": 1}]
        ways.append({"prompt_logprobs": 0, "max_tokens": 0})
        options = {"max_tokens": NEW, "ignore_eos": True} | chooser.choice(ways)
        request = Request(f"r{turn}", case.prompts[at], SamplingParams(**options))
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
        assert tokens == case.want[at][: len(tokens)]
        assert len(tokens) == request.params.max_tokens or tokens[-1] in stops
    assert engine.stats().num_preemptions > 0
    case.check(40)


@pytest.mark.parametrize("kind", ["replayed", "eagle3"])
def test_log_probabilities_are_the_models_own(kind: str) -> None:
    case = Drafting(kind, TINY, 16, 5)

    def outputs_with(speculation: Speculation | None) -> list[tuple[int | None, float, list[int]]]:
        pages = dict.fromkeys(LayerKind, 400)
        engine = assemble(case.model, limits_for(case.model), pages, speculation=speculation)
        engine.submit(Request("r", case.prompts[2], SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=3)))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        assert outputs[-1].finish is Finish.LENGTH
        return [(o.token, o.logprob or 0.0, [token for token, _ in o.top_logprobs]) for o in outputs]

    plain, drafted = outputs_with(None), outputs_with(case.speculation)
    assert [(token, top) for token, _, top in drafted] == [(token, top) for token, _, top in plain]
    assert [logprob for _, logprob, _ in drafted] == pytest.approx([logprob for _, logprob, _ in plain], abs=1e-4)


# ---- draft heads alone -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ONE_HEAD)
def test_padding_changes_no_draft(kind: str) -> None:
    """Padded rows and sequences, as captured steps have them."""
    model, head = tiny_model(TINY, 16), tiny_head(kind, TINY, 16)
    drafter = PaddedDrafter(head, 3)
    limits = limits_for(model, max_num_seqs=5)
    prompts = tiny_prompts(model.config.vocab_size)
    assert generate(model, prompts, Speculation(drafter, 3), limits, ignore_eos=True)[0] == tiny_alone()
    check_drafts(model, head, drafter)


def test_a_page_is_found_only_by_requests_that_go_on_as_it_was_written() -> None:
    """The head's last row of a page depends on the token after it. Two prompts that differ exactly from a page's end on
    do not share that page, and a third that goes on as the second finds the second's."""
    model, head = tiny_model(TINY, 16), tiny_head("eagle3", TINY, 16)
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


class Resting(FixedLength):
    """Rests in the steps that ``plan`` says."""

    def __init__(self, tokens: int, plan: Sequence[bool]) -> None:
        super().__init__(tokens)
        self._plan = plan
        self.steps = 0

    def rests(self, sequences: int) -> bool:
        self.steps += 1
        return self.steps < len(self._plan) and self._plan[self.steps]


@pytest.mark.parametrize("kind", ONE_HEAD)
@pytest.mark.parametrize(
    ("size", "pages"), [(4, 28), pytest.param(16, 60, marks=pytest.mark.nightly)], ids=["preempts", "room"]
)
def test_drafts_after_a_rest_are_as_if_there_had_been_none(kind: str, size: int, pages: int) -> None:
    """The head rests now and then while requests share prefixes, are preempted and reuse each other's pages."""
    model, head = tiny_model(TINY, size), tiny_head(kind, TINY, size)
    vocab, chance = model.config.vocab_size, random.Random(size)
    shared = [(7 * n * n + 3) % vocab for n in range(32)]
    own = [[(5 * n * n + 11 * at) % vocab for n in range(3 + at % 5)] for at in range(18)]
    prompts = [shared + tail if at % 2 else tail for at, tail in enumerate(own)]
    plan = [rests for _ in range(500) for rests in [False] * chance.randint(5, 30) + [True] * chance.randint(1, 3)]
    drafter = RecordingDrafter(head, 3)
    limits = limits_for(model, max_num_seqs=4, max_num_batched_tokens=24)
    speculation = Speculation(drafter, 3, Resting(3, plan))
    found, stats = generate(model, prompts, speculation, limits, pages, ignore_eos=True)
    assert found == generate(model, prompts, None, limits, pages, ignore_eos=True)[0]
    assert (stats.num_preemptions > 0) == (pages == 28)
    check_drafts(model, head, drafter)


def test_requests_that_ran_during_a_rest_get_no_drafts_and_later_ones_do() -> None:
    model, head = tiny_model(TINY, 16), tiny_head("eagle3", TINY, 16)
    first, second = [[(5 * n * n + 11 * at) % model.config.vocab_size for n in range(4)] for at in (1, 2)]
    drafter, rule = RecordingDrafter(head, 3), Resting(3, [5 <= step < 8 for step in range(8)])
    engine = assemble(model, limits_for(model), dict.fromkeys(LayerKind, 60), speculation=Speculation(drafter, 3, rule))
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    finish(engine, [Request("first", first, params)])
    generated = [len(context) - len(first) for context, _ in drafter.said]
    assert 2 <= max(generated) <= 6, generated  # the random head is never right, so a step is a token
    before = len(drafter.said)
    finish(engine, [Request("second", second, params)])
    assert len(drafter.said) > before + 10


def test_a_rest_leaves_holes_in_all_pages_that_a_step_ahead_may_write_to() -> None:
    drafter, pool = HeadDrafter(tiny_head("eagle3", TINY, 4), 3), PagePool(9)
    taps = Taps.empty(drafter.taps, 8, 64, torch.float32, CPU)
    drafter.attach(DraftTarget(dict.fromkeys(LayerKind, pool), limits_for(tiny_model(TINY, 4)), taps))
    request = Request("r", range(5), SamplingParams())
    pool.grow("r", 5)
    drafter.rest(LaunchedStep([Work(request, 5, 4, ahead=True, drafts=(0, 0, 0), slack=3)]))
    assert drafter._holes == set(pool.pages_of("r")[1:3])
    drafter.rest(LaunchedStep([Work(request, 5, 4, ahead=True, drafts=(0, 0, 0), slack=4)]))
    assert drafter._holes == set(pool.pages_of("r")[1:4])


def test_drafts_on_the_device_are_those_of_the_last_step_in_its_order() -> None:
    drafter = HeadDrafter(tiny_head("eagle3", TINY, 16), 3)
    a, b = (Request(name, [1], SamplingParams()) for name in "ab")
    assert drafter.drafts_ahead([a, b], 2) is None
    assert not drafter.expects(Context(a, 3))  # a step is not read for drafts that do not exist
    drafter._host = None
    drafter._guesses = drafter._to_host(torch.tensor([[1, 2, 3], [4, 5, 6]]), LaunchedStep((), None, {"a": 0, "b": 1}))
    assert drafter.expects(Context(a, 3))
    found = drafter.drafts_ahead([a, b], 2)
    assert found is not None
    assert found.tolist() == [[1, 2], [4, 5]]
    for others in ([b, a], [a], [b], [a, b, Request("c", [1], SamplingParams())]):
        assert drafter.drafts_ahead(others, 2) is None
    drafter.forget("a")
    assert drafter.drafts_ahead([b], 2) is None


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 5), (64, 7)])
def test_drafts_are_copied_to_memory_in_one_piece(rows: int, columns: int) -> None:
    """A copy to a part of each line waits for the device."""
    room = torch.zeros(64 * 7, dtype=torch.int64)
    part = in_one_piece(room, rows, columns)
    assert part.is_contiguous()
    part.copy_(torch.arange(rows * columns).view(rows, columns))
    assert room[: rows * columns].tolist() == list(range(rows * columns))


def test_long_prompts_leave_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each length would have one of its own, of hundreds of megabytes."""
    asked: list[int] = []
    model = tiny_model(TINY, 16)
    prompt = [token % model.config.vocab_size for token in range(GRAPH_ROWS + 50)]
    limits = limits_for(model, max_num_batched_tokens=2048, max_model_len=2048)
    drafter = HeadDrafter(tiny_head("eagle3", TINY, 16), 2)
    pages = dict.fromkeys(LayerKind, 2 * 2048 // 16)
    engine = assemble(model, limits, pages, speculation=Speculation(drafter, 2))
    run = drafter._graphs.run

    def listed(key: Step, work: Callable[[], Any]) -> Any:
        asked.append(key.tokens)
        return run(key, work)

    monkeypatch.setattr(drafter._graphs, "run", listed)
    finish(engine, [Request("r", prompt, SamplingParams(max_tokens=4, ignore_eos=True))])
    assert asked
    assert max(asked) < 8
