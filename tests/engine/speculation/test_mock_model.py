"""Steps with drafts on a mock model that notices every wrong page: tokens are those without drafts, and pages are as if
there had never been any. Each test runs with drafts on the host, as ``ngram`` has them, and on the device, as a draft
head does; the latter run before the step before them is read."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from microscale.engine.ahead import MOST_LAYOUTS, Layouts
from microscale.engine.engine import AheadRunner
from microscale.engine.limits import Limits
from microscale.engine.ranks.leader import LeadingRunner
from microscale.engine.request import Finish, Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.speculation.config import SpeculativeConfig
from microscale.engine.speculation.length import AutomaticLength, DraftCosts, Length
from microscale.engine.speculation.speculation import Speculation
from microscale.hardware.draft_costs import step_curve
from microscale.planning.following import NO_TOKEN, follow
from support.drafters import AheadDrafter, KnowingDrafter, Uneven
from support.mock_engine import VOCAB, System, alone, preemptions

LIMITS = Limits(page_size=4, window=6, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=256)
CPU = torch.device("cpu")
DRAFTERS = {"host": KnowingDrafter, "device": AheadDrafter}
everywhere = pytest.mark.parametrize("where", DRAFTERS)
lucky = pytest.mark.parametrize("luck", [0.0, 0.5, 1.0])


@cache
def tokens_after(prompt: tuple[int, ...], count: int, window: int) -> list[int]:
    return alone(prompt, count, window)


def drafter(where: str, luck: float, window: int = LIMITS.window) -> KnowingDrafter:
    return DRAFTERS[where](lambda tokens, count: tokens_after(tuple(tokens), count, window), VOCAB, luck)


def system_with(
    where: str, luck: float, most: int = 5, limits: Limits = LIMITS, length: Length | None = None,
    eos: Sequence[int] = (),
) -> System:  # fmt: skip
    speculation = Speculation(drafter(where, luck, limits.window), most, length)
    return System(limits, 80, 60, eos, speculation=speculation)


def all_free(system: System) -> bool:
    return all(pool.num_free == pool.num_pages for pool in system.scheduler.pools.values())


def step_until_drafted(system: System) -> None:
    """Until a step with drafts runs that was not read."""
    while system.engine._pending is None or not system.engine._pending.drafted:
        system.step()


# ---- tokens, counts and pages ----------------------------------------------------------------------------------------


@everywhere
@lucky
@pytest.mark.parametrize("automatic", [False, True], ids=["fixed", "automatic"])
def test_tokens_are_those_without_drafts(where: str, luck: float, automatic: bool) -> None:
    length = AutomaticLength(DraftCosts(step_curve(32, 4)), 5) if automatic else None
    system = system_with(where, luck, length=length)
    prompts = {f"r{i}": [(7 * i + j) % VOCAB for j in range(3 + 9 * i)] for i in range(7)}
    for name, prompt in prompts.items():
        system.submit(name, prompt, 41)
    steps = system.run()
    for name, prompt in prompts.items():
        assert system.tokens(name) == alone(prompt, 41, LIMITS.window)
        assert [output.finish for output in system.outputs[name]] == [None] * 40 + [Finish.LENGTH]
    assert system.runner.largest_step <= LIMITS.max_num_batched_tokens
    stats = system.engine.stats()
    outputs = [output for each in system.outputs.values() for output in each]
    assert stats.num_drafts == sum(output.drafted > 0 for output in outputs) > 0
    assert stats.num_draft_tokens == sum(output.drafted for output in outputs) == sum(stats.drafted_per_pos)
    assert stats.num_accepted_tokens == sum(output.accepted for output in outputs) == sum(stats.accepted_per_pos)
    assert (stats.num_accepted_tokens == stats.num_draft_tokens) is (luck == 1.0)
    assert (stats.num_accepted_tokens == 0) is (luck == 0.0)
    assert all_free(system)
    if where == "host":
        assert system.runner.steps_ahead == 0
    elif not automatic:
        assert system.runner.steps_ahead > 0.3 * steps


@everywhere
def test_all_outputs_of_a_step_come_together_and_the_first_has_the_counts(where: str) -> None:
    system = system_with(where, 1.0, most=3)
    system.submit("r", [1, 2, 3], 30)
    assert [output.token for output in system.step()] == alone([1, 2, 3], 1, LIMITS.window)  # the prompt
    assert system.step() == []  # it runs, and is read after the next one is launched
    second = system.step()
    assert system.runner.steps_ahead == (where == "device")
    assert [output.token for output in second] == alone([1, 2, 3], 5, LIMITS.window)[1:]
    assert [(output.drafted, output.accepted) for output in second] == [(3, 3), (0, 0), (0, 0), (0, 0)]


def test_all_steps_of_one_sequence_run_ahead() -> None:
    """Except for its prompt and the last ones, after which there may be nothing to draft."""
    system = system_with("device", 0.6, most=3)
    system.submit("r", [1, 2, 3], 60)
    steps = system.run()
    assert steps - 8 < system.runner.steps_ahead < steps
    # Other ranks get positions and drafts from the host, so their steps are read.
    assert not issubclass(LeadingRunner, AheadRunner)


def test_without_running_ahead_every_step_is_read() -> None:
    system = System(LIMITS, 80, 60, run_ahead=False, speculation=Speculation(drafter("device", 0.7), 3))
    system.submit("r", [1, 2, 3], 30)
    system.run()
    assert system.tokens("r") == alone([1, 2, 3], 30, LIMITS.window)
    assert system.runner.steps_ahead == 0


def test_steps_run_ahead_while_ngram_has_no_draft() -> None:
    """The mock model never repeats itself."""
    counts = []
    for config in (None, SpeculativeConfig("ngram", 3, prompt_lookup_min=2)):
        system = System(LIMITS, 64, 40, speculation=None if config is None else Speculation.of(config))
        system.submit("r", [4, 5], 25)
        counts.append(system.run())
        assert system.tokens("r") == alone([4, 5], 25, LIMITS.window)
    assert counts[0] == counts[1] + 1  # without drafts the prompt's step runs ahead too, and is read with the next


@everywhere
def test_a_draft_ends_before_the_last_token(where: str) -> None:
    """The last token of a request is drawn, and never drafted."""
    system = system_with(where, 1.0)
    system.submit("short", [1, 2, 3], 4)
    system.submit("long", [4, 5], 60)
    system.run()
    assert system.tokens("short") == alone([1, 2, 3], 4, LIMITS.window)
    assert system.tokens("long") == alone([4, 5], 60, LIMITS.window)
    assert sum(output.drafted for output in system.outputs["short"]) <= 2


@everywhere
@pytest.mark.parametrize("place", range(1, 12))
def test_a_stop_token_within_a_draft_ends_the_request(where: str, place: int) -> None:
    """What was accepted after it is dropped."""
    stop = alone([1, 2, 3], 30, LIMITS.window)[place]
    system = system_with(where, 1.0, eos=[stop])
    system.submit("r", [1, 2, 3], 30)
    system.submit("other", [4, 5], 22)
    system.run()
    assert system.tokens("r") == alone([1, 2, 3], 30, LIMITS.window, [stop])
    assert system.outputs["r"][-1].finish is Finish.STOP
    assert sum(output.accepted for output in system.outputs["r"]) < len(system.outputs["r"])
    assert system.tokens("other") == alone([4, 5], 22, LIMITS.window, [stop])


@everywhere
@lucky
def test_an_abort_with_drafts_in_flight(where: str, luck: float) -> None:
    """The request has no more outputs and no pages, and another one by the same name gets its own tokens."""
    system = system_with(where, luck)
    for name in ("a", "b"):
        system.submit(name, [ord(name) % 7, 2, 3], 40)
    step_until_drafted(system)
    assert system.engine.abort("a")
    system.engine.check()
    system.submit("a", [9, 9, 1, 4], 15)
    system.run()
    assert system.tokens("a") == alone([9, 9, 1, 4], 15, LIMITS.window)
    assert system.tokens("b") == alone([ord("b") % 7, 2, 3], 40, LIMITS.window)
    assert all_free(system)
    # The same if no request is left.
    system.submit("c", [1, 2, 3], 40)
    step_until_drafted(system)
    system.engine.abort("c")
    assert not system.engine.has_work
    system.engine.check()
    system.submit("d", [4, 5], 20)
    system.run()
    assert system.tokens("d") == alone([4, 5], 20, LIMITS.window)


@everywhere
def test_a_prompt_next_to_drafts_goes_on_when_their_request_leaves(where: str) -> None:
    system = system_with(where, 1.0, limits=replace(LIMITS, max_num_batched_tokens=16))
    system.submit("short", [1, 2, 3], 40)
    step_until_drafted(system)
    prompt = [at % VOCAB for at in range(8)]
    system.submit("long", prompt, 6)
    system.step()
    system.engine.abort("short")
    system.engine.check()
    system.run()
    assert system.tokens("long") == alone(prompt, 6, LIMITS.window)


@pytest.mark.usefixtures("admits_until_pages_run_out")
@everywhere
@pytest.mark.parametrize("luck", [0.0, 1.0])
def test_drafts_preempt_no_request(where: str, luck: float) -> None:
    """Where there are no pages for accepted drafts, there are no drafts, or the last step is read first."""
    assert 0 < preemptions(LIMITS, Speculation(drafter(where, luck), 5)) <= preemptions(LIMITS, None)


@everywhere
def test_requests_with_penalties_run_without_drafts_next_to_others(where: str) -> None:
    system = system_with(where, 1.0)
    system.submit("drafted", [1, 2, 3], 40)
    params = SamplingParams(max_tokens=40, presence_penalty=1e-9)
    system.engine.submit(Request("penalised", (4, 5, 6), params))
    system.outputs["penalised"] = []
    system.run()
    assert system.tokens("penalised") == alone([4, 5, 6], 40, LIMITS.window)
    assert sum(output.drafted for output in system.outputs["penalised"]) == 0
    assert sum(output.drafted for output in system.outputs["drafted"]) > 0


@everywhere
def test_a_scored_prompt_is_drafted_after_it(where: str) -> None:
    system = system_with(where, 1.0)
    prompt = tuple(range(9))
    system.engine.submit(Request("scored", prompt, SamplingParams(max_tokens=10, prompt_logprobs=0)))
    system.outputs["scored"] = []
    system.run()
    scored = [token for output in system.outputs["scored"] for token, _, _ in output.prompt_logprobs]
    assert scored == list(prompt[1:])
    assert system.tokens("scored") == alone(prompt, 10, LIMITS.window)
    assert sum(output.accepted for output in system.outputs["scored"]) > 0


def test_steps_before_the_minimum_number_of_tokens_are_read() -> None:
    """Until then stop tokens are forbidden, and how long that is depends on what was accepted."""
    whole = alone([1, 2, 3], 60, LIMITS.window)
    stop = next(token for token in whole[30:] if token not in whole[:30])
    system = system_with("device", 0.5, most=3)
    params = SamplingParams(max_tokens=60, min_tokens=20, stop_token_ids=(stop,))
    system.engine.submit(Request("r", (1, 2, 3), params))
    system.outputs["r"] = []
    while len(system.outputs["r"]) < 18:
        assert system.runner.steps_ahead == 0
        system.step()
    system.run()
    assert system.runner.steps_ahead
    assert system.tokens("r") == alone([1, 2, 3], 60, LIMITS.window, [stop])


@everywhere
@lucky
@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_prefix_is_found_again_only_as_far_as_it_was_accepted(where: str, luck: float, lookahead: int) -> None:
    """``lookahead``: as with a draft head, a page is found only by requests that go on with the same token."""
    limits = replace(LIMITS, key_lookahead=lookahead)
    system = system_with(where, luck, limits=limits)
    system.submit("first", [1, 2, 3], 30)
    system.run()
    whole = [1, 2, 3, *alone([1, 2, 3], 30, limits.window)]
    again = system.submit("again", whole, 10)
    system.run()
    assert system.tokens("again") == alone(whole, 10, limits.window)
    assert again.num_cached == 32  # the last of 33 tokens was never computed
    for place, cached in ((8, 8 - 4 * lookahead), (9, 8)):
        name = f"differs at {place}"
        other = system.submit(name, [*whole[:place], (whole[place] + 1) % VOCAB, 5, 6], 3)
        system.run()
        assert other.num_cached == cached
        assert system.tokens(name) == alone(other.prompt, 3, limits.window)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_stream_of_requests(data: st.DataObject) -> None:
    """Drafts of any length and luck, arrivals, aborts, stop tokens, priorities, small pools: ``System.step`` checks
    pages after each step."""
    draw = data.draw
    page_size, window = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(1, 20))
    limits = Limits(
        page_size=page_size,
        window=window,
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(6, 60)),
        max_model_len=64,
        max_queue=50,
        prefix_caching=draw(st.booleans()),
        key_lookahead=draw(st.integers(0, 1)),
    )
    least, most = -(-64 // page_size), draw(st.integers(1, 15))
    knowing = drafter(draw(st.sampled_from(sorted(DRAFTERS))), draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])), window)
    stops = draw(st.lists(st.integers(0, VOCAB - 1), max_size=2))
    system = System(
        limits,
        draw(st.integers(least, 4 * least)),
        draw(st.integers(-(-window // page_size) + 1, 4 * least)),
        eos=stops,
        speculation=Speculation(knowing, most, draw(st.sampled_from([None, Uneven(most)]))),
    )
    chooser = random.Random(draw(st.integers(0, 2**32)))
    shared = [chooser.randrange(VOCAB) for _ in range(40)]
    prompts: dict[str, tuple[list[int], int]] = {}
    aborted: set[str] = set()
    for turn in range(draw(st.integers(5, 40))):
        if chooser.random() < 0.3:
            name, own = f"r{turn}", [chooser.randrange(VOCAB) for _ in range(1 + chooser.randrange(10))]
            prompt = shared[: chooser.randrange(20)] + own
            max_tokens = 1 + chooser.randrange(64 - len(prompt))
            prompts[name] = (prompt, max_tokens)
            system.submit(name, prompt, max_tokens, priority=chooser.randrange(3))
        if prompts and chooser.random() < 0.1:
            name = chooser.choice(list(prompts))
            if system.engine.abort(name):
                aborted.add(name)
        system.step()
    system.run()
    for name, (prompt, max_tokens) in prompts.items():
        want, got = alone(prompt, max_tokens, window, stops), system.tokens(name)
        assert got == want[: len(got)]
        assert name in aborted or len(got) == len(want)
    assert system.runner.largest_step <= limits.max_num_batched_tokens
    assert all_free(system)
    assert not knowing.known


# ---- what the device computes between two steps ----------------------------------------------------------------------


def test_what_was_accepted_and_where_the_next_step_begins() -> None:
    layouts = Layouts(CPU)
    last, layout = layouts.of([2, 0, 3]), layouts.of([1, 2, 0])
    drafts = layouts.drafts([(5, 6), (), (7, 8, 9)])
    assert drafts.tolist() == [[5, 6, NO_TOKEN], [NO_TOKEN] * 3, [7, 8, 9]]
    drawn = torch.tensor([5, 1, 6, 4, 7, 8, 9, 3], dtype=torch.int32)
    ahead = follow(drawn, last, drafts, layout, torch.tensor([[10, 9, 8], [11, 12, 13], [14, 15, 16]]))
    assert ahead.accepted.tolist() == [1, 0, 3]
    assert ahead.own.tolist() == [1, 4, 3]
    assert ahead.drafts.tolist() == [[10, NO_TOKEN], [11, 12], [NO_TOKEN, NO_TOKEN]]
    assert ahead.tokens().tolist() == [1, 10, 4, 11, 12, 3]
    assert ahead.moved.tolist() == [1, 1, 0, 0, 0, 3]


def test_layouts_are_made_once_and_not_kept_for_ever() -> None:
    layouts = Layouts(CPU)
    first = layouts.of([1, 2])
    assert layouts.of((1, 2)) is first
    for at in range(MOST_LAYOUTS):
        layouts.of([at % 16, at // 16])
    assert len(layouts._known) <= MOST_LAYOUTS
