"""Steps with drafts on a mock model that notices every wrong page: tokens are those without drafts, and pages are as if
there had never been any."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from microscale.engine.limits import Limits
from microscale.engine.request import Finish, Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.speculation.config import SpeculativeConfig
from microscale.engine.speculation.speculation import Speculation
from microscale.engine.work import Work
from microscale.kernels.dense.spec import Logits
from support.drafters import KnowingDrafter, Uneven
from support.mock_engine import VOCAB, System, alone, preemptions
from support.mock_runner import MockRunner

SMALL = Limits(page_size=4, window=6, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=256)


def drafting(limits: Limits, luck: float, most: int = 5) -> Speculation:
    drafter = KnowingDrafter(lambda tokens, count: alone(tokens, count, limits.window), VOCAB, luck)
    return Speculation(drafter, most)


@pytest.mark.parametrize("luck", [0.0, 0.5, 1.0])
def test_tokens_are_those_without_drafts(luck: float) -> None:
    system = System(SMALL, 64, 40, speculation=drafting(SMALL, luck))
    prompts = {f"r{i}": [(7 * i + j) % VOCAB for j in range(3 + 9 * i)] for i in range(7)}
    for name, prompt in prompts.items():
        system.submit(name, prompt, 21)
    steps = system.run()
    for name, prompt in prompts.items():
        assert system.tokens(name) == alone(prompt, 21, SMALL.window)
        assert [output.finish for output in system.outputs[name]] == [None] * 20 + [Finish.LENGTH]
    assert system.runner.largest_step <= SMALL.max_num_batched_tokens
    stats = system.engine.stats()
    told = [output for outputs in system.outputs.values() for output in outputs]
    assert stats.num_drafts == sum(output.drafted > 0 for output in told) > 0
    assert stats.num_draft_tokens == sum(output.drafted for output in told)
    assert stats.num_accepted_tokens == sum(output.accepted for output in told) == sum(stats.accepted_per_pos)
    if luck == 1.0:
        assert stats.num_accepted_tokens == stats.num_draft_tokens
        assert steps < 7 * 21 / 4  # of up to four requests in a step, each six tokens at a time
    if luck == 0.0:
        assert stats.num_accepted_tokens == 0
    # The last page of what was computed is nobody's any more.
    assert all(pool.num_free == pool.num_pages for pool in system.scheduler.pools.values())


def test_all_outputs_of_a_step_come_together_and_the_first_says_how_many() -> None:
    system = System(SMALL, 64, 40, speculation=drafting(SMALL, 1.0, most=3))
    system.submit("r", [1, 2, 3], 10)
    assert [output.token for output in system.step()] == alone([1, 2, 3], 1, SMALL.window)
    assert system.step() == []  # it runs, and is read when the next can be launched
    second = system.step()
    assert [output.token for output in second] == alone([1, 2, 3], 5, SMALL.window)[1:]
    assert [(output.drafted, output.accepted) for output in second] == [(3, 3), (0, 0), (0, 0), (0, 0)]


def test_a_draft_goes_no_further_than_the_last_token() -> None:
    """One token is always drawn, so the last draft is the one before the last token."""
    system = System(SMALL, 64, 40, speculation=drafting(SMALL, 1.0, most=5))
    system.submit("r", [1, 2, 3], 4)
    system.run()
    assert [(output.drafted, output.accepted) for output in system.outputs["r"]] == [(0, 0), (2, 2), (0, 0), (0, 0)]


@pytest.mark.parametrize("place", range(1, 9))
def test_a_stop_token_in_the_midst_of_a_draft_ends_the_request(place: int) -> None:
    stop = alone([1, 2, 3], 30, SMALL.window)[place]
    system = System(SMALL, 64, 40, eos=[stop], speculation=drafting(SMALL, 1.0))
    system.submit("r", [1, 2, 3], 30)
    system.submit("other", [4, 5], 12)
    system.run()
    assert system.tokens("r") == alone([1, 2, 3], 30, SMALL.window, [stop])
    assert system.outputs["r"][-1].finish is Finish.STOP
    assert system.tokens("other") == alone([4, 5], 12, SMALL.window, [stop])


def test_drafts_preempt_nobody() -> None:
    """With as many pages as the tokens need there are no drafts past a page, and no more preemptions."""
    assert 0 < preemptions(SMALL, drafting(SMALL, 0.0)) <= preemptions(SMALL, None)


def test_penalties_run_without_drafts_beside_others() -> None:
    system = System(SMALL, 64, 40, speculation=drafting(SMALL, 1.0))
    system.submit("drafted", [1, 2, 3], 20)
    params = SamplingParams(max_tokens=20, presence_penalty=1e-9)
    system.engine.submit(Request("penalised", (4, 5, 6), params))
    system.outputs["penalised"] = []
    system.run()
    assert system.tokens("penalised") == alone([4, 5, 6], 20, SMALL.window)
    assert sum(output.drafted for output in system.outputs["penalised"]) == 0
    assert sum(output.drafted for output in system.outputs["drafted"]) > 0


def test_a_scored_prompt_is_drafted_after_it() -> None:
    system = System(SMALL, 64, 40, speculation=drafting(SMALL, 1.0))
    prompt = tuple(range(9))
    system.engine.submit(Request("scored", prompt, SamplingParams(max_tokens=10, prompt_logprobs=0)))
    system.outputs["scored"] = []
    system.run()
    told = [token for output in system.outputs["scored"] for token, _, _ in output.prompt_logprobs]
    assert told == list(prompt[1:])
    assert system.tokens("scored") == alone(prompt, 10, SMALL.window)
    assert sum(output.accepted for output in system.outputs["scored"]) > 0


def test_aborts_leave_nothing() -> None:
    drafter = KnowingDrafter(lambda tokens, count: alone(tokens, count, SMALL.window), VOCAB, 0.7)
    system = System(SMALL, 64, 40, speculation=Speculation(drafter, 5))
    for turn, prompt in enumerate(([1, 2, 3], [9, 8, 7, 6, 5], [2])):
        system.submit("r", prompt, 40)
        for _ in range(turn + 2):
            system.step()
        if turn < 2:
            assert system.engine.abort("r")
            assert not drafter.known
            system.engine.check()
    system.run()
    assert system.tokens("r") == alone([2], 40, SMALL.window)
    assert not drafter.known


class Ahead(MockRunner):
    """Counts the steps that were launched before the tokens of the one before were read."""

    steps = 0

    def forward(self, schedule: Sequence[Work], tokens: Tensor | None = None) -> Logits:
        Ahead.steps += tokens is not None
        return super().forward(schedule, tokens)


def test_steps_run_ahead_while_nothing_is_drafted() -> None:
    """The mock model never repeats itself, so ``ngram`` has no idea and steps run ahead as without it."""
    counts = []
    for config in (None, SpeculativeConfig("ngram", 3, prompt_lookup_min=2)):
        Ahead.steps = 0
        speculation = None if config is None else Speculation.of(config)
        system = System(SMALL, 64, 40, speculation=speculation)
        system.runner.__class__ = Ahead
        system.submit("r", [4, 5], 25)
        system.run()
        assert system.tokens("r") == alone([4, 5], 25, SMALL.window)
        counts.append(Ahead.steps)
    assert counts[0] == counts[1] > 20


def test_a_prefix_is_found_again_only_as_far_as_it_was_accepted() -> None:
    """Drafts that were rejected are in no page that others find."""
    limits = Limits(page_size=4, window=6, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=256)
    for luck in (0.0, 0.6, 1.0):
        system = System(limits, 64, 40, speculation=drafting(limits, luck))
        system.submit("first", [1, 2, 3], 22)
        system.run()
        whole = [1, 2, 3, *alone([1, 2, 3], 22, limits.window)]
        again = system.submit("again", whole, 10)
        system.run()
        assert system.tokens("again") == alone(whole, 10, limits.window)
        assert again.num_cached == 24  # of 25 tokens the last was never computed


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_stream_of_requests(data: st.DataObject) -> None:
    """Drafts of any length and luck, arrivals, aborts, priorities, small pools: pages are never lost or mixed up, and
    each request gets the tokens that it would get alone without drafts. ``System.step`` checks pages after each."""
    draw = data.draw
    page_size = draw(st.sampled_from([1, 2, 4, 8]))
    window = draw(st.integers(1, 20))
    limits = Limits(
        page_size=page_size,
        window=window,
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(6, 40)),
        max_model_len=64,
        max_queue=50,
        prefix_caching=draw(st.booleans()),
    )
    least = -(-64 // page_size)
    most = draw(st.integers(1, 15))
    drafter = KnowingDrafter(
        lambda tokens, count: alone(tokens, count, window), VOCAB, draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    )
    system = System(
        limits,
        draw(st.integers(least, 3 * least)),
        draw(st.integers(-(-window // page_size) + 1, 3 * least)),
        speculation=Speculation(drafter, most, Uneven(most)),
    )
    chooser = random.Random(draw(st.integers(0, 2**32)))
    shared = [chooser.randrange(VOCAB) for _ in range(40)]
    prompts: dict[str, tuple[list[int], int]] = {}
    aborted: set[str] = set()
    for turn in range(draw(st.integers(5, 40))):
        if chooser.random() < 0.4:
            name = f"r{turn}"
            prompt = shared[: chooser.randrange(30)] + [
                chooser.randrange(VOCAB) for _ in range(1 + chooser.randrange(20))
            ]
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
        want = alone(prompt, max_tokens, window)
        got = system.tokens(name)
        assert got == want[: len(got)]
        assert name in aborted or len(got) == len(want)
    assert system.runner.largest_step <= limits.max_num_batched_tokens
    assert all(pool.num_free == pool.num_pages for pool in system.scheduler.pools.values())
    assert not drafter.known


@pytest.mark.parametrize("luck", [0.0, 0.6, 1.0])
def test_keys_that_cover_the_token_after_a_page(luck: float) -> None:
    """As with a draft head: a page is found by who goes on with the same token, however drafts fill pages."""
    limits = replace(SMALL, key_lookahead=1)
    system = System(limits, 64, 40, speculation=drafting(limits, luck))
    system.submit("first", [1, 2, 3], 22)
    system.run()
    whole = [1, 2, 3, *alone([1, 2, 3], 22, limits.window)]
    same = system.submit("same", whole, 3)
    system.run()
    assert same.num_cached == 24
    other = system.submit("other", [*whole[:8], whole[8] + 1 % VOCAB, 5, 6], 3)
    system.run()
    assert other.num_cached == 4  # the second page was written before another token
    within = system.submit("within", [*whole[:9], whole[9] + 1 % VOCAB, 5, 6], 3)
    system.run()
    assert within.num_cached == 8
    for request in (same, other, within):
        assert system.tokens(request.request_id) == alone(request.prompt, 3, limits.window)
