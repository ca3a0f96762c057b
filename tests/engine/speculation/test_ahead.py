"""Steps with drafts that are launched before the last one is read, on a mock model that notices every wrong page.
Tokens are those without drafts, and after each step nobody holds a page too many."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from microscale.backends.following import NO_TOKEN, follow
from microscale.engine.engine import AheadRunner
from microscale.engine.ranks.leader import LeadingRunner
from microscale.engine.request import Finish, Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.speculation.length import Length
from microscale.engine.speculation.speculation import Speculation
from microscale.engine.step.ahead import MOST_LAYOUTS, Layouts
from microscale.engine.step.limits import Limits
from support.drafters import AheadDrafter, KnowingDrafter, Uneven
from support.mock_engine import VOCAB, System, alone, preemptions

LIMITS = Limits(page_size=4, window=6, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=256)
CPU = torch.device("cpu")


@cache
def told(prompt: tuple[int, ...], count: int, window: int) -> list[int]:
    return alone(prompt, count, window)


def drafter(window: int, luck: float) -> AheadDrafter:
    return AheadDrafter(lambda tokens, count: told(tuple(tokens), count, window), VOCAB, luck)


def system_with(luck: float, most: int = 5, limits: Limits = LIMITS, length: Length | None = None) -> System:
    return System(limits, 80, 60, speculation=Speculation(drafter(limits.window, luck), most, length))


# ---- tokens and pages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("luck", [0.0, 0.5, 1.0])
def test_tokens_are_those_without_drafts(luck: float) -> None:
    system = system_with(luck)
    prompts = {f"r{i}": [(7 * i + j) % VOCAB for j in range(3 + 9 * i)] for i in range(7)}
    for name, prompt in prompts.items():
        system.submit(name, prompt, 41)
    steps = system.run()
    for name, prompt in prompts.items():
        assert system.tokens(name) == alone(prompt, 41, LIMITS.window)
        assert [output.finish for output in system.outputs[name]] == [None] * 40 + [Finish.LENGTH]
    assert system.runner.steps_ahead > 0.3 * steps
    stats = system.engine.stats()
    outputs = [output for each in system.outputs.values() for output in each]
    assert stats.num_drafts == sum(output.drafted > 0 for output in outputs) > 0
    assert stats.num_draft_tokens == sum(output.drafted for output in outputs)
    assert stats.num_accepted_tokens == sum(output.accepted for output in outputs)
    assert (stats.num_accepted_tokens == stats.num_draft_tokens) is (luck == 1.0)
    assert (stats.num_accepted_tokens == 0) is (luck == 0.0)
    assert all(pool.num_free == pool.num_pages for pool in system.scheduler.pools.values())


def test_all_steps_of_one_sequence_run_ahead() -> None:
    """But for its prompt, and the last ones, after which there may be nothing to draft."""
    system = system_with(0.6, most=3)
    system.submit("r", [1, 2, 3], 60)
    steps = system.run()
    assert system.tokens("r") == alone([1, 2, 3], 60, LIMITS.window)
    assert steps - 8 < system.runner.steps_ahead < steps


def test_the_first_draft_runs_ahead_of_a_step_without() -> None:
    system = system_with(1.0, most=3)
    system.submit("r", [1, 2, 3], 30)
    assert [output.token for output in system.step()] == alone([1, 2, 3], 1, LIMITS.window)  # the prompt
    assert system.step() == []  # four tokens with drafts of the host's
    assert system.runner.steps_ahead == 0
    second = system.step()
    assert system.runner.steps_ahead == 1
    assert [output.token for output in second] == alone([1, 2, 3], 5, LIMITS.window)[1:]
    assert [(output.drafted, output.accepted) for output in second] == [(3, 3), (0, 0), (0, 0), (0, 0)]


def test_without_running_ahead_every_step_is_read() -> None:
    speculation = Speculation(drafter(LIMITS.window, 0.7), 3)
    system = System(LIMITS, 80, 60, run_ahead=False, speculation=speculation)
    system.submit("r", [1, 2, 3], 30)
    system.run()
    assert system.tokens("r") == alone([1, 2, 3], 30, LIMITS.window)
    assert system.runner.steps_ahead == 0


def test_drafts_of_the_host_are_read_as_ever() -> None:
    knowing = KnowingDrafter(lambda tokens, count: told(tuple(tokens), count, LIMITS.window), VOCAB, 0.7)
    system = System(LIMITS, 80, 60, speculation=Speculation(knowing, 3))
    system.submit("r", [1, 2, 3], 30)
    system.run()
    assert system.runner.steps_ahead == 0


def test_several_ranks_read_every_step_with_drafts() -> None:
    """The other ranks are told positions and drafts by the host."""
    assert not issubclass(LeadingRunner, AheadRunner)


@pytest.mark.parametrize("place", range(1, 12))
def test_a_stop_token_in_the_midst_of_a_draft_ends_the_request(place: int) -> None:
    """The host does not see such a draft, so it is not cut there: what is accepted behind the stop token is dropped."""
    stop = alone([1, 2, 3], 30, LIMITS.window)[place]
    speculation = Speculation(drafter(LIMITS.window, 1.0), 5)
    system = System(LIMITS, 80, 60, eos=[stop], speculation=speculation)
    system.submit("r", [1, 2, 3], 30)
    system.submit("other", [4, 5], 22)
    system.run()
    assert system.tokens("r") == alone([1, 2, 3], 30, LIMITS.window, [stop])
    assert system.outputs["r"][-1].finish is Finish.STOP
    assert sum(output.accepted for output in system.outputs["r"]) < len(system.outputs["r"])
    assert system.tokens("other") == alone([4, 5], 22, LIMITS.window, [stop])
    assert system.runner.steps_ahead


@pytest.mark.parametrize("luck", [0.0, 0.5, 1.0])
def test_who_leaves_meanwhile_has_no_more_outputs_and_no_pages(luck: float) -> None:
    system = system_with(luck)
    for name in ("a", "b"):
        system.submit(name, [ord(name) % 7, 2, 3], 40)
    while not system.runner.steps_ahead:
        system.step()
    assert system.engine.abort("a")
    system.engine.check()
    # Somebody else comes under the same name, with another prompt.
    system.submit("a", [9, 9, 1, 4], 15)
    system.run()
    assert system.tokens("a") == alone([9, 9, 1, 4], 15, LIMITS.window)
    assert system.tokens("b") == alone([ord("b") % 7, 2, 3], 40, LIMITS.window)
    assert all(pool.num_free == pool.num_pages for pool in system.scheduler.pools.values())


def test_an_engine_that_lost_all_its_requests_serves_the_next() -> None:
    system = system_with(1.0)
    system.submit("a", [1, 2, 3], 40)
    while not system.runner.steps_ahead:
        system.step()
    system.engine.abort("a")
    assert not system.engine.has_work
    system.engine.check()
    system.submit("b", [4, 5], 20)
    system.run()
    assert system.tokens("b") == alone([4, 5], 20, LIMITS.window)


def test_somebody_who_comes_is_admitted_with_the_next_step() -> None:
    system = system_with(0.5)
    system.submit("a", [1, 2, 3], 60)
    while system.runner.steps_ahead < 3:
        system.step()
    ahead = system.runner.steps_ahead
    system.submit("b", [4, 5, 6], 20)
    system.step()
    assert system.runner.steps_ahead == ahead
    assert system.outputs["b"] or system.engine._flight is not None
    system.run()
    assert system.tokens("b") == alone([4, 5, 6], 20, LIMITS.window)
    assert system.tokens("a") == alone([1, 2, 3], 60, LIMITS.window)


@pytest.mark.parametrize("luck", [0.0, 1.0])
def test_drafts_preempt_nobody(luck: float) -> None:
    """Where pages for the case that all drafts are accepted are not there, the last step is read first."""
    assert 0 < preemptions(LIMITS, Speculation(drafter(LIMITS.window, luck), 5)) <= preemptions(LIMITS, None)


def test_one_that_may_end_holds_nobody_up() -> None:
    """Its next step has no drafts. If it has ended, what that step computes for it is dropped."""
    system = system_with(1.0, most=5)
    system.submit("short", [1, 2, 3], 14)  # 1 + 6 + 6 + 1
    system.submit("long", [4, 5], 60)
    ahead = []
    while system.engine.has_work:
        before = system.runner.steps_ahead
        system.step()
        ahead.append(system.runner.steps_ahead > before)
    assert system.tokens("short") == alone([1, 2, 3], 14, LIMITS.window)
    assert system.tokens("long") == alone([4, 5], 60, LIMITS.window)
    assert ahead.count(False) <= 6  # two prompts, the first drafts, where one left, and the end


def test_a_step_has_no_more_tokens_than_it_may() -> None:
    limits = replace(LIMITS, max_num_batched_tokens=10)
    system = system_with(1.0, limits=limits)
    for index in range(3):
        system.submit(f"r{index}", [index, 5], 30)
    system.run()
    assert system.runner.largest_step <= 10


def test_penalties_run_without_drafts_beside_others() -> None:
    system = system_with(1.0)
    system.submit("drafted", [1, 2, 3], 40)
    params = SamplingParams(max_tokens=40, presence_penalty=1e-9)
    system.engine.submit(Request("penalised", (4, 5, 6), params))
    system.outputs["penalised"] = []
    system.run()
    assert system.tokens("penalised") == alone([4, 5, 6], 40, LIMITS.window)
    assert sum(output.drafted for output in system.outputs["penalised"]) == 0
    assert sum(output.drafted for output in system.outputs["drafted"]) > 0
    assert system.runner.steps_ahead


def test_steps_before_the_least_number_of_tokens_are_read() -> None:
    """Until then stop tokens are forbidden, and how long that is depends on what was accepted."""
    whole = alone([1, 2, 3], 60, LIMITS.window)
    stop = next(token for token in whole[30:] if token not in whole[:30])
    system = system_with(0.5, most=3)
    params = SamplingParams(max_tokens=60, min_tokens=20, stop_token_ids=(stop,))
    system.engine.submit(Request("r", (1, 2, 3), params))
    system.outputs["r"] = []
    while len(system.outputs["r"]) < 18:
        assert system.runner.steps_ahead == 0
        system.step()
    system.run()
    assert system.runner.steps_ahead
    assert system.tokens("r") == alone([1, 2, 3], 60, LIMITS.window, [stop])


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("luck", [0.0, 0.6, 1.0])
def test_a_prefix_is_found_again_only_as_far_as_it_was_accepted(luck: float, lookahead: int) -> None:
    limits = replace(LIMITS, key_lookahead=lookahead)
    system = system_with(luck, limits=limits)
    system.submit("first", [1, 2, 3], 30)
    system.run()
    assert system.runner.steps_ahead
    whole = [1, 2, 3, *alone([1, 2, 3], 30, limits.window)]
    again = system.submit("again", whole, 10)
    system.run()
    assert system.tokens("again") == alone(whole, 10, limits.window)
    assert again.num_cached == 32  # of 33 tokens the last was never computed
    other = system.submit("other", [*whole[:8], (whole[8] + 1) % VOCAB, 5, 6], 3)
    system.run()
    assert other.num_cached == 8 - 4 * lookahead
    assert system.tokens("other") == alone(other.prompt, 3, limits.window)


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
    knowing = drafter(window, draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])))
    length = draw(st.sampled_from([None, Uneven(most)]))
    stops = draw(st.lists(st.integers(0, VOCAB - 1), max_size=2))
    system = System(
        limits,
        draw(st.integers(least, 4 * least)),
        draw(st.integers(-(-window // page_size) + 1, 4 * least)),
        eos=stops,
        speculation=Speculation(knowing, most, length),
    )
    chooser = random.Random(draw(st.integers(0, 2**32)))
    shared = [chooser.randrange(VOCAB) for _ in range(40)]
    prompts: dict[str, tuple[list[int], int]] = {}
    aborted: set[str] = set()
    for turn in range(draw(st.integers(5, 40))):
        if chooser.random() < 0.25:
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
    assert all(pool.num_free == pool.num_pages for pool in system.scheduler.pools.values())
    assert not knowing.known


# ---- what the device finds out ---------------------------------------------------------------------------------------


def test_what_was_accepted_and_where_the_next_step_is() -> None:
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


def test_nothing_drafted_nothing_accepted() -> None:
    layouts = Layouts(CPU)
    drawn = torch.tensor([5, 1], dtype=torch.int32)
    last, layout = layouts.of([0, 0]), layouts.of([1, 0])
    ahead = follow(drawn, last, layouts.drafts([(), ()]), layout, torch.tensor([[2], [3]]))
    assert ahead.accepted.tolist() == [0, 0]
    assert ahead.tokens().tolist() == [5, 2, 1]


def test_layouts_are_made_once_and_not_kept_for_ever() -> None:
    layouts = Layouts(CPU)
    first = layouts.of([1, 2])
    assert layouts.of((1, 2)) is first
    for at in range(MOST_LAYOUTS):
        layouts.of([at % 16, at // 16])
    assert len(layouts._known) <= MOST_LAYOUTS
