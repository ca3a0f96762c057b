"""A draft head that rests while drafts do not pay: what that costs, in simulated time, and that what it missed is never
drafted from."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest

from microscale.engine.engine import Engine
from microscale.engine.limits import Limits
from microscale.engine.loading.build import assemble
from microscale.engine.loading.memory import Workload
from microscale.engine.loading.options import LoadOptions
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.speculation.length import ByArithmetic, FixedLength
from microscale.engine.speculation.resting import BAD_WINDOWS, FIRST_REST, SETTLING, WINDOW, Resting
from microscale.engine.speculation.speculation import Speculation
from microscale.engine.work import Work
from microscale.models.config import LayerKind
from microscale.models.draft_heads.drafting import DraftHead
from microscale.models.families import AnyModel
from support.heads import Anew, RecordingDrafter, random_head
from support.loading import load_model
from support.simulated_drafts import SomeTokens, best_fixed, prior_of
from support.simulated_head import HeadSimulation

AWAKE = SETTLING + WINDOW
# gpt-oss-120b with an EAGLE3 head's shapes on an H200, 2026-11-16; between 1, 3, 5 and 7 drafts along straight lines.
STEPS = {
    1: (1.971, 3.244, 3.965, 4.686, 5.258, 5.829, 6.437, 7.044),
    64: (16.325, 25.600, 27.793, 29.986, 31.889, 33.791, 34.781, 35.771),
}
OBSERVED = {1: 2.073, 64: 18.319}
"""A step without drafts behind which the head runs."""


@pytest.mark.parametrize("sequences", [1, 64])
def test_a_head_without_any_luck_costs_at_most_three_percent(sequences: int) -> None:
    simulation = HeadSimulation(ByArithmetic(prior_of(STEPS), 7), STEPS, OBSERVED, sequences)
    assert simulation.run(3000, 0.0) >= 1e3 * sequences / STEPS[sequences][0] / 1.03
    # It wakes up now and then, for requests that begin then.
    assert 0.02 < simulation.observed / 3000 < 0.2


@pytest.mark.parametrize("sequences", [1, 64])
def test_a_good_head_never_rests(sequences: int) -> None:
    simulation = HeadSimulation(ByArithmetic(prior_of(STEPS), 7), STEPS, OBSERVED, sequences)
    simulation.run(300, 0.8)
    rate = simulation.run(700, 0.8)
    assert simulation.observed == 1000
    assert rate >= 0.95 * best_fixed(STEPS, sequences, 0.8)


def test_rests_grow_and_a_gain_ends_them() -> None:
    resting = Resting()

    def steps_until(rests: bool, gained: float) -> int:
        count = 0
        while resting.rests(4) is not rests:
            resting.stepped(4, 1000.0, gained)
            count += 1
        return count

    assert [steps_until(rests, 0.0) for rests in (True, False) * 3] == [
        AWAKE, FIRST_REST, AWAKE, 2 * FIRST_REST, AWAKE, 4 * FIRST_REST,
    ]  # fmt: skip
    for _ in range(AWAKE):
        resting.stepped(4, 1000.0, 50.0)
    assert not resting.rests(4)
    assert [steps_until(rests, 0.0) for rests in (True, False)] == [AWAKE, FIRST_REST]


def test_wanted_drafts_may_have_bad_luck_for_a_while() -> None:
    resting = Resting()
    for window in range(2 * BAD_WINDOWS):
        for _ in range(AWAKE):
            assert not resting.rests(1)
            resting.stepped(1, 1000.0, 100.0 if window == BAD_WINDOWS - 1 else 0.0, wanted=True)
    assert resting.rests(1)


def test_each_number_of_sequences_rests_by_itself() -> None:
    resting = Resting()
    for _ in range(AWAKE):
        resting.stepped(64, 1000.0, 0.0)
    assert [resting.rests(count) for count in (1, 8, 32, 33, 64, 65)] == [False, False, False, True, True, False]


def test_steps_that_the_host_was_late_for_count_too() -> None:
    """Behind a head of one sequence it was late for most of them, and the head was awake for 270 steps, not 128."""
    now, rule = 0.0, ByArithmetic(prior_of(STEPS), 7)
    speculation = Speculation(SomeTokens(), 7, rule, lambda: now)
    step = [Work(Request("r", [1], SamplingParams()), 0, 1, drafts=())]
    for at in range(AWAKE + 1):  # of the first one nobody knows when it began
        assert not rule.rests(1)
        now += OBSERVED[1] / 1e3
        speculation.ended(step, waited=at % 8 < 3)
    assert rule.rests(1)


# ---- a real head -----------------------------------------------------------------------------------------------------


class Sleepy(FixedLength):
    """Rests for a few steps, and is awake for a few more, again and again."""

    def __init__(self, tokens: int, seed: int) -> None:
        super().__init__(tokens)
        chance = random.Random(seed)
        self._plan: list[bool] = []
        for _ in range(500):
            self._plan += [False] * chance.randint(5, 30) + [True] * chance.randint(1, 3)
        self.steps = 0

    def rests(self, sequences: int) -> bool:
        self.steps += 1
        return self._plan[self.steps]


@cache
def tiny(kind: str, page_size: int) -> tuple[AnyModel, DraftHead]:
    workload = Workload(page_size=page_size)
    model = load_model(LoadOptions("gpt-oss-tiny", load_format="dummy", device="cpu", workload=workload))
    return model, random_head(kind, model)


def prompts_of(vocab: int, count: int) -> list[list[int]]:
    """Half of them begin with the same 32 tokens; all differ after that."""
    shared = [(7 * n * n + 3) % vocab for n in range(32)]
    own = [[(5 * n * n + 11 * at) % vocab for n in range(3 + at % 5)] for at in range(count)]
    return [shared + tail if at % 2 else tail for at, tail in enumerate(own)]


def engine_of(kind: str, page_size: int, pages: int, rule: FixedLength | None) -> tuple[Engine, RecordingDrafter]:
    model, head = tiny(kind, page_size)
    limits = Limits(page_size, model.config.sliding_window, 4, 24, 512)
    drafter = RecordingDrafter(head, 3)
    speculation = None if rule is None else Speculation(drafter, 3, rule)
    return assemble(model, limits, dict.fromkeys(LayerKind, pages), speculation=speculation), drafter


def finish(engine: Engine, prompts: Sequence[Sequence[int]], new: int = 16) -> list[list[int]]:
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    requests = [Request(str(at), prompt, params) for at, prompt in enumerate(prompts)]
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
        engine.check()
    return [request.tokens[request.num_prompt :] for request in requests]


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
@pytest.mark.parametrize(("page_size", "pages"), [(4, 300), (4, 28), (16, 60)], ids=["small", "preempts", "large"])
def test_what_is_drafted_after_a_rest_is_as_if_there_had_been_none(kind: str, page_size: int, pages: int) -> None:
    """Rests come and go while requests share prefixes, are preempted and take over each other's pages."""
    model, head = tiny(kind, page_size)
    prompts = prompts_of(model.config.vocab_size, 18)
    rule = Sleepy(3, seed=page_size)
    engine, drafter = engine_of(kind, page_size, pages, rule)
    assert finish(engine, prompts) == finish(engine_of(kind, page_size, pages, None)[0], prompts)
    anew = Anew(model, head)
    said = {context: draft for context, draft in drafter.said if draft}
    assert len(said) >= 25
    for context, draft in sorted(said.items(), key=lambda pair: -len(pair[0])):
        assert draft == anew.guesses(context, 3)[: len(draft)], f"after {len(context)} tokens"
    stats = engine.stats()
    assert stats.prefix_hits > 0
    assert (stats.num_preemptions > 0) == (pages == 28)


class Once(FixedLength):
    """Rests from one step on up to another."""

    first, last, steps = 0, 0, 0

    def rests(self, sequences: int) -> bool:
        self.steps += 1
        return self.first <= self.steps < self.last


def test_who_ran_in_a_rest_is_drafted_for_no_more_and_who_comes_later_is() -> None:
    model, _ = tiny("eagle3", 16)
    prompts = prompts_of(model.config.vocab_size, 4)
    rule = Once(3)
    rule.first, rule.last = 5, 8
    engine, drafter = engine_of("eagle3", 16, 60, rule)
    finish(engine, prompts[:2], new=30)
    assert rule.steps > 20
    for prompt in prompts[:2]:
        generated = [
            len(context) - len(prompt) for context, _ in drafter.said if list(context[: len(prompt)]) == prompt
        ]
        assert 2 <= max(generated) <= 6, generated  # the random head is never right, so a step is a token
    # The prompt of the second is in the prefix cache, whole; what it generated while the head rested is not.
    drafter.said.clear()
    finish(engine, [prompts[3]], new=30)
    assert len(drafter.said) > 10
