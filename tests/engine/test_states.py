"""The engine on a model with states (a tiny Qwen3.6 in float32): greedy tokens never depend on the others, on how
prompts are cut or filled up, or on preemption, and a slot that holds another sequence's states shows in them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import Tensor

from microscale.engine.config import EngineConfig
from microscale.engine.engine import Engine
from microscale.engine.generate import Generation
from microscale.engine.limits import Limits
from microscale.engine.loading.build import assemble
from microscale.engine.loading.prepare import prepare
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.speculation.config import SpeculativeConfig
from microscale.engine.speculation.length import Length
from microscale.engine.speculation.speculation import Speculation
from microscale.errors import BadSetting
from microscale.models.config import PAGED, LayerKind
from microscale.models.families import AnyModel
from microscale.planning.ops import StateCache
from support import tiny_qwen3_5
from support.drafters import AheadDrafter, KnowingDrafter, Uneven
from support.loading import load_model

pytestmark = pytest.mark.usefixtures("admits_until_pages_run_out")
NEW = 16
FURTHER = NEW + 8
"""A step that is launched before the drafts of the last are read may go on beyond the end."""


def write(folder: Path) -> Path:
    config = tiny_qwen3_5.CASES["as_published"]
    return tiny_qwen3_5.write_qwen3_5(folder, config, tiny_qwen3_5.random_qwen3_5(config))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, AnyModel]:
    folder = write(tmp_path_factory.mktemp("model"))
    options = {"device": "cpu", "dtype": "float32", "layer_format": ("experts=mxfp8",)}
    return {size: load_model(EngineConfig(str(folder), block_size=size, **options)) for size in (4, 16)}  # type: ignore[arg-type]


def prompts() -> list[list[int]]:
    chooser = random.Random(0)
    return [[chooser.randrange(256) for _ in range(length)] for length in (1, 2, 3, 33, 60, 5, 17)]


def engine_of(
    model: AnyModel, pages: int = 400, *, fill: bool = False, seqs: int = 8, budget: int = 512, slots: int = 0,
    caching: bool = True, drafts: Speculation | None = None,
) -> Engine:  # fmt: skip
    limits = Limits(model.page_size, model.config.sliding_window, seqs, budget, 512, prefix_caching=caching)
    counts = dict.fromkeys(PAGED, pages) | {LayerKind.LINEAR: slots or seqs}
    return assemble(model, limits, counts, fill_up_prompts=fill, speculation=drafts)


def requests(new: int = NEW) -> list[Request]:
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    return [Request(str(index), prompt, params) for index, prompt in enumerate(prompts())]


def finish(engine: Engine, asked: list[Request]) -> list[list[int]]:
    """One arrives in each step."""
    for request in asked:
        engine.submit(request)
        engine.step()
        engine.check()
    while engine.has_work:
        engine.step()
        engine.check()
    return [request.tokens[request.num_prompt :] for request in asked]


@pytest.fixture(scope="module")
def alone(models: dict[int, AnyModel]) -> list[list[int]]:
    return finish(engine_of(models[16], seqs=1, caching=False), requests())


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("budget", [8, 512])
@pytest.mark.parametrize("fill", [True, False], ids=["filled up", "as they are"])
def test_company_changes_nothing(
    models: dict[int, AnyModel], alone: list[list[int]], size: int, budget: int, fill: bool
) -> None:
    assert finish(engine_of(models[size], fill=fill, budget=budget), requests()) == alone


def test_preemption_changes_nothing(models: dict[int, AnyModel], alone: list[list[int]]) -> None:
    """Whoever returns begins with no state, in another slot."""
    engine = engine_of(models[4], pages=30)
    assert finish(engine, requests()) == alone
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_come_and_go(models: dict[int, AnyModel], alone: list[list[int]], seed: int) -> None:
    """Aborts leave slots that others take over, with fewer slots than requests and few pages."""
    chooser = random.Random(seed)
    engine = engine_of(models[4], pages=40, seqs=3, budget=24, fill=bool(seed % 2))
    asked: dict[str, tuple[int, Request]] = {}
    for turn in range(24):
        at = chooser.randrange(7)
        request = Request(f"r{turn}", prompts()[at], SamplingParams(max_tokens=NEW, ignore_eos=True))
        engine.submit(request)
        asked[request.request_id] = at, request
        for _ in range(chooser.randrange(5)):
            engine.step()
            engine.check()
        if chooser.random() < 0.3 and engine.abort(gone := chooser.choice(list(asked))):
            del asked[gone]
    while engine.has_work:
        engine.step()
        engine.check()
    for at, request in asked.values():
        assert request.tokens[request.num_prompt :] == alone[at]


def turns() -> list[list[int]]:
    """Prompts of a conversation: each repeats the one before up to its end, and goes on."""
    chooser = random.Random(7)
    found = [[chooser.randrange(256) for _ in range(90)]]
    for _ in range(3):
        found.append(found[-1][:-5] + [chooser.randrange(256) for _ in range(80)])
    return found


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("budget", [48, 512])
def test_a_conversation_finds_its_states(models: dict[int, AnyModel], size: int, budget: int) -> None:
    """Each turn begins where the one before had its state kept, and says what it says without the cache."""
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    prompts = turns()
    wanted = finish(
        engine_of(models[16], seqs=1, caching=False), [Request(str(n), p, params) for n, p in enumerate(prompts)]
    )
    engine = engine_of(models[size], budget=budget, seqs=3, slots=8)
    found, cached = [], []
    for number, prompt in enumerate(prompts):
        request = Request(str(number), prompt, params)
        found += finish(engine, [request])
        cached.append(request.num_cached)
    assert found == wanted
    if budget == 512:
        assert cached == [0, *((len(prompt) - 8) // size * size for prompt in prompts[:-1])]


@pytest.fixture(scope="module")
def turns_alone(models: dict[int, AnyModel]) -> list[list[int]]:
    """And what follows."""
    params = SamplingParams(max_tokens=FURTHER, ignore_eos=True)
    prompts = [*turns(), *([*turn, 3, 5] for turn in turns()[:3])]
    asked = [Request(str(number), prompt, params) for number, prompt in enumerate(prompts)]
    return finish(engine_of(models[16], seqs=1, caching=False), asked)


@pytest.mark.parametrize("seed", range(4))
def test_shared_states_under_pressure(models: dict[int, AnyModel], turns_alone: list[list[int]], seed: int) -> None:
    """Requests that share prefixes, come together, are preempted and aborted, with as many slots as may run and few
    more: a state that is found may be evicted, written again by its only owner, or read by several in one step."""
    chooser = random.Random(seed)
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    prompts = [*turns(), *([*turn, 3, 5] for turn in turns()[:3])]
    pages, budget = chooser.choice([200, 400]), chooser.choice([70, 512])
    engine = engine_of(models[4], pages=pages, seqs=3, slots=4 + seed, budget=budget)
    asked: dict[str, tuple[int, Request]] = {}
    for turn in range(14):
        at = chooser.randrange(len(prompts))
        request = Request(f"r{turn}", prompts[at], params)
        engine.submit(request)
        asked[request.request_id] = at, request
        for _ in range(chooser.randrange(12)):
            engine.step()
            engine.check()
        if chooser.random() < 0.2 and engine.abort(gone := chooser.choice(list(asked))):
            del asked[gone]
    while engine.has_work:
        engine.step()
        engine.check()
    for at, request in asked.values():
        assert request.tokens[request.num_prompt :] == turns_alone[at][:NEW]
    assert engine.stats().prefix_hits > 0


def test_another_sequences_states_show(models: dict[int, AnyModel], alone: list[list[int]]) -> None:
    """What the tests above rest on: of two sequences whose slots change places in mid-run, both go on otherwise."""
    engine = engine_of(models[16])
    asked = requests()[3:5]
    for request in asked:
        engine.submit(request)
    for _ in range(6):
        engine.step()
    slots = engine._scheduler.pools[LayerKind.LINEAR]._owned
    slots["3"], slots["4"] = slots["4"], slots["3"]
    while engine.has_work:
        engine.step()
    for request, wanted in zip(asked, alone[3:5], strict=True):
        found = request.tokens[request.num_prompt :]
        assert found[:4] == wanted[:4]
        assert found != wanted


# ---- drafts ----------------------------------------------------------------------------------------------------------

DRAFTERS = {"on the host": KnowingDrafter, "on the device": AheadDrafter}


def drafting(kind: str, luck: float, prompts: list[list[int]], said: list[list[int]], most: int = 3) -> Speculation:
    """Drafts of lengths that change, of which ``luck`` are right."""
    known = {tuple(prompt): output for prompt, output in zip(prompts, said, strict=True)}

    def after(tokens: Sequence[int], count: int) -> Sequence[int]:
        for prompt, output in known.items():
            done = len(tokens) - len(prompt)
            if done >= 0 and list(tokens) == [*prompt, *output[:done]]:
                return output[done : done + count]
        return []

    return Speculation(DRAFTERS[kind](after, 256, luck), most, Uneven(most))


@pytest.fixture(scope="module")
def further(models: dict[int, AnyModel]) -> list[list[int]]:
    """What drafters know."""
    return finish(engine_of(models[16], caching=False), requests(FURTHER))


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("luck", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(("size", "budget", "fill"), [(4, 512, True), (16, 24, False)])
def test_drafts_change_nothing(
    models: dict[int, AnyModel], further: list[list[int]], kind: str, luck: float, size: int, budget: int, fill: bool
) -> None:
    """The state after the last accepted draft is the one that goes on."""
    drafts = drafting(kind, luck, prompts(), further)
    engine = engine_of(models[size], budget=budget, fill=fill, slots=32, drafts=drafts)
    assert finish(engine, requests()) == [output[:NEW] for output in further]
    stats = engine.stats()
    assert stats.num_draft_tokens > 30
    assert (stats.num_accepted_tokens > 0) == (luck > 0)


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("seed", range(4))
def test_drafts_under_pressure(models: dict[int, AnyModel], turns_alone: list[list[int]], kind: str, seed: int) -> None:
    """With shared prefixes, preemption and aborts, and too few slots for all drafts."""
    chooser = random.Random(seed)
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    prompts = [*turns(), *([*turn, 3, 5] for turn in turns()[:3])]
    pages, budget = chooser.choice([200, 400]), chooser.choice([70, 512])
    drafts = drafting(kind, 0.7, prompts, turns_alone)
    engine = engine_of(models[4], pages=pages, seqs=3, slots=4 + 2 * seed, budget=budget, drafts=drafts)
    asked: dict[str, tuple[int, Request]] = {}
    for turn in range(14):
        at = chooser.randrange(len(prompts))
        request = Request(f"r{turn}", prompts[at], params)
        engine.submit(request)
        asked[request.request_id] = at, request
        for _ in range(chooser.randrange(12)):
            engine.step()
            engine.check()
        if chooser.random() < 0.2 and engine.abort(gone := chooser.choice(list(asked))):
            del asked[gone]
    while engine.has_work:
        engine.step()
        engine.check()
    for at, request in asked.values():
        assert request.tokens[request.num_prompt :] == turns_alone[at][:NEW]
    assert engine.stats().num_accepted_tokens > 0
    for pool in engine._scheduler.pools.values():
        assert pool.num_free == pool.num_pages


class AtFirst(Length):
    """Drafts until some tokens were drafted."""

    def __init__(self) -> None:
        self.left = 12

    def choose(self, requests: Sequence[object], sequences: int) -> Sequence[int]:
        return [3 if self.left > 0 else 0] * len(requests)

    def landed(self, request: object, drafted: int, accepted: int) -> None:
        self.left -= drafted


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("luck", [0.0, 0.6])
def test_states_after_rejected_drafts(
    models: dict[int, AnyModel], further: list[list[int]], kind: str, luck: float
) -> None:
    """Those of every layer are the ones of a run without drafts, but for the rounding of projections."""

    def states(drafts: Speculation | None) -> list[Tensor]:
        engine, asked = engine_of(models[16], slots=32, drafts=drafts), requests(FURTHER)[3]
        engine.submit(asked)
        while asked.num_computed < asked.num_prompt + NEW - 1:
            engine.step()
        assert drafts is None or (engine.stats().num_accepted_tokens > 0) == (luck > 0)
        slot = engine._scheduler.pools[LayerKind.LINEAR].pages_of("3")[1]
        layers = engine._runner._kv.layers  # type: ignore[attr-defined]
        found = [
            part[slot] for layer in layers if isinstance(layer, StateCache) for part in (layer.state, layer.columns)
        ]
        engine.abort("3")
        return [part.clone() for part in found]

    drafts = drafting(kind, luck, prompts(), further)
    drafts._length = AtFirst()
    wanted, found = states(None), states(drafts)
    assert len(found) == 2 * 3
    for one, other in zip(wanted, found, strict=True):
        assert (one - other).abs().max() <= 1e-5 * one.abs().max()


def test_steps_of_many_sequences_have_no_drafts(models: dict[int, AnyModel]) -> None:
    """There are slots for the drafts of a few."""
    drafts = Speculation(KnowingDrafter(lambda tokens, count: [1, 2, 3][:count], 256, 1.0), 3)
    engine = engine_of(models[16], seqs=17, slots=17 + 16 * 3, drafts=drafts)
    for number in range(17):
        params = SamplingParams(max_tokens=6 if number else 3, ignore_eos=True)
        engine.submit(Request(str(number), [number], params))
    while engine._scheduler.num_running in (0, 17):
        assert engine.stats().num_draft_tokens == 0
        engine.step()
    while engine.has_work:
        engine.step()
    assert engine.stats().num_draft_tokens > 0


def test_a_generation_has_slots_for_all_drafts(models: dict[int, AnyModel], further: list[list[int]]) -> None:
    drafts = drafting("on the host", 1.0, prompts(), further)
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    generation = Generation(models[16], prompts(), params, speculation=drafts)
    assert [each.token_ids for each in generation.run()] == [output[:NEW] for output in further]
    assert generation.engine.stats().drafted_per_pos[2] > 0


def test_too_many_drafts_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    options = {"device": "cpu", "layer_format": ("experts=mxfp8",)}
    with pytest.raises(BadSetting, match="verify up to 3 drafts"):
        prepare(EngineConfig(str(write(tmp_path)), speculative=SpeculativeConfig("ngram", 4), **options))  # type: ignore[arg-type]
