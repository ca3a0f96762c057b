"""Drafts change no distribution, no seeded token and no log-probability: the sampler alone, over tiny vocabularies."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from microscale.engine.sampling_params import SamplingParams
from microscale.engine.sampling_state import Sampler
from microscale.engine.token_readback import NextToken
from microscale.errors import BadLogits, BadRequest
from support.draws import (
    EVERY,
    GRAMMAR,
    LENGTH,
    STOP,
    UNREAD,
    VOCAB,
    Options,
    check_distribution,
    new_sampler,
    run,
    run_ahead,
)


@pytest.mark.parametrize("options", EVERY, ids=lambda options: options.name)
def test_all_rows_at_once_are_the_reference(options: Options) -> None:
    drafts = [(), (1,), (4, 0)]
    assert run(options.params, 200, drafts, fast=True) == run(options.params, 200, drafts)


@pytest.mark.parametrize("options", EVERY, ids=lambda options: options.name)
def test_draws_have_the_exact_distribution(options: Options) -> None:
    """20,000 of each; ``at_length`` makes 200,000."""
    check_distribution(options, 20_000)


@pytest.mark.parametrize("options", EVERY, ids=lambda options: options.name)
def test_seeded_tokens_are_those_without_drafts(options: Options) -> None:
    plain = run(options.params, 100, [()])
    for drafts in ([(1,), (2, 0), (4, 4, 4)], [tokens[:1] for tokens in plain]):
        drafted = run(options.params, 100, drafts)
        assert [tokens[:LENGTH] for tokens in drafted] == [tokens[:LENGTH] for tokens in plain]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(each, id=each.name, marks=() if each.name in ("plain", "all") else pytest.mark.nightly)
        for each in UNREAD
    ],
)
def test_drafts_on_the_device_change_no_distribution_and_no_seeded_token(options: Options) -> None:
    """Each step is drawn before the one before it is read."""
    check_distribution(options, 20_000, ahead=True)
    plain = run(options.params, 100, [()], length=12)
    accepted = 0
    for drafts in ([(1,), (2, 0), (), (4, 4, 4)], [tuple(tokens[1:3]) for tokens in plain]):
        found = run_ahead(options.params, 100, drafts, 3)
        accepted += sum(map(len, found)) - 4 * len(found)
        for tokens, want in zip(found, plain, strict=True):
            assert tokens[:12] == want[: len(tokens)]
    assert accepted > 100


def test_who_must_be_read_before_it_draws_again() -> None:
    sampler = new_sampler()
    free, bound = (sampler.add(SamplingParams(grammar=grammar)) for grammar in (None, GRAMMAR))
    late = sampler.add(SamplingParams(min_tokens=2))
    assert [sampler.needs_host(number) for number in (free, bound, late)] == [False, True, False]
    assert [sampler.needs_host(number, 3) for number in (free, bound, late)] == [False, True, True]
    for _ in range(2):
        sampler.read(sampler.draw(favouring(1), [late]))
    assert not sampler.needs_host(late, 3)


# ---- one step --------------------------------------------------------------------------------------------------------


def step(sampler: Sampler, number: int, draft: Sequence[int], rows: Tensor) -> list[NextToken]:
    return sampler.read(sampler.draw(rows, [number], None, [draft]))[0]


def favouring(*tokens: int) -> Tensor:
    rows = torch.zeros(len(tokens), VOCAB)
    rows[range(len(tokens)), list(tokens)] = 3.0
    return rows


@pytest.mark.parametrize(
    ("draft", "want"), [((1, 2, 3), [1, 2, 3, 4]), ((1, 2, 0), [1, 2, 3]), ((0, 2, 3), [1]), ((1, 0, 3), [1, 2])]
)
def test_drafts_are_accepted_up_to_the_first_that_was_not_drawn(draft: tuple[int, ...], want: list[int]) -> None:
    sampler = new_sampler()
    number = sampler.add(SamplingParams(logprobs=2))
    choices = step(sampler, number, draft, favouring(1, 2, 3, 4))
    assert [choice.token for choice in choices] == want
    # Log-probabilities are the model's own, wherever a token came from.
    own = float(torch.log_softmax(favouring(1)[0], 0)[1])
    assert [choice.logprob for choice in choices] == pytest.approx([own] * len(want))
    assert all(len(choice.top) == 2 for choice in choices)


def test_requests_of_a_step_have_drafts_of_their_own() -> None:
    sampler = new_sampler()
    numbers = [sampler.add(SamplingParams()) for _ in range(3)]
    rows = torch.cat((favouring(1, 2), favouring(3), favouring(0, 4, 2)))
    found = sampler.read(sampler.draw(rows, numbers, None, [(1,), (), (0, 1)]))
    assert [[choice.token for choice in choices] for choices in found] == [[1, 2], [3], [0, 4]]


def test_broken_logits_after_a_draft_end_what_comes_after_it() -> None:
    sampler = new_sampler()
    rows = favouring(1, 2, 3)
    rows[1] = math.nan
    good, broken = step(sampler, sampler.add(SamplingParams()), (1, 2), rows)
    good.check()
    with pytest.raises(BadLogits):
        broken.check()


def test_a_draft_is_cut_at_a_stop_token_and_where_the_grammar_forbids_it() -> None:
    sampler = new_sampler()
    free = sampler.add(SamplingParams())
    bound = sampler.add(SamplingParams(grammar=GRAMMAR))
    assert list(sampler.cut(free, (1, 2, STOP, 3))) == [1, 2]
    assert list(sampler.cut(free, (STOP,))) == []
    assert list(sampler.cut(bound, (0, 3, 3))) == [0, 3]
    assert list(sampler.cut(bound, (0, 0))) == [0]
    assert list(sampler.cut(bound, (3, 0))) == [3, 0]
    # Only looked at: the request still stands at its beginning.
    assert [choice.token for choice in step(sampler, bound, (), favouring(4))] == [4]
    assert list(sampler.cut(bound, (2, 2))) == []


def test_every_drafted_place_has_its_own_mask() -> None:
    sampler = new_sampler()
    number = sampler.add(SamplingParams(grammar=GRAMMAR))
    # The model would like "e" everywhere. After "d" only "a" and "b" may come, then the end.
    rows = favouring(3, 4, 4)
    rows[1, 1] = 1.0
    choices = step(sampler, number, sampler.cut(number, (3, 1)), rows)
    assert [choice.token for choice in choices] == [3, 1, STOP]
    # The grammar has gone along: it is complete now.
    [after] = step(sampler, number, (), favouring(0))
    with pytest.raises(BadRequest, match="complete"):
        after.check()


def test_rejected_drafts_do_not_move_the_grammar() -> None:
    sampler = new_sampler()
    number = sampler.add(SamplingParams(grammar=GRAMMAR))
    [first] = step(sampler, number, sampler.cut(number, (3, 1)), favouring(0, 4, 4))
    assert first.token == 0
    assert list(sampler.cut(number, (1,))) == []
    assert list(sampler.cut(number, (2,))) == [2]
