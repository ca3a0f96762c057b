"""How many tokens are drafted for each request.

``ByArithmetic`` chooses anew for every step (``arithmetic``) from what steps cost (``costs``) and what becomes of
drafts (``acceptance``). Both are guesses, so it keeps an *account*: how much time drafts have given more than they
cost.

    at first              ``ADVANCE`` steps: two drafts without luck say little, and shall not be the last for long
    every step            + ``SHARE`` of its time, once that has made up for the advance
    a step with drafts    + what its tokens would have taken without drafts - what it took; its tokens are those that
                          such drafts have given on average so far (``Acceptance.shown``)
    the one after them,   + what such a step takes - what it took: it is launched when the last is read, so the GPU
      if without          waits for the host
    never above           ``MOST_KEPT`` steps, nor as far below zero: one step that hung does not end drafts for good

Drafts stop while the account is below zero: whatever the drafter is worth, a server is at most ``SHARE`` slower than
without one, and a few steps. (Reckoned by the tokens that each step happened to give, it fell below zero by chance in
the first steps of one sequence, and was there for 100 steps and more.) While no drafts pay, the account pays for a
short one now and then, a *probe*, so that acceptance can be learned anew. After ``PROBES`` of them steps without are
timed: the first after prompts are slower, and held against those a probe in every step seems to cost nothing. A draft
head costs time even while nothing is drafted, so it rests (``resting``).
"""

from __future__ import annotations

from collections.abc import Sequence

from microscale.engine.request import Request
from microscale.engine.speculation.acceptance import Acceptance
from microscale.engine.speculation.arithmetic import Costs, best_lengths
from microscale.engine.speculation.costs import Prior, StepCosts
from microscale.engine.speculation.resting import Resting

SHARE = 0.02
ADVANCE = 2
MOST_KEPT = 8
LEAST_GAIN = 1.02
"""Drafts that gain less are none: costs are not known better than that."""
PROBE_TOKENS = 2
PROBES = 8
"""In a row."""
OUTLIER = 2.0
"""A step that takes so many times what was expected was not slow for its drafts: the machine was busy. They are charged
what was expected. Where all such steps do, the next are expected to."""


class Length:
    """A rule. What a rule does not need to know it does not listen to."""

    def choose(self, requests: Sequence[Request], sequences: int) -> Sequence[int]:
        """For requests that decode together with others, ``sequences`` in all: the most tokens to draft for each. 0:
        none. It is asked several times about one step, and answers the same."""
        raise NotImplementedError

    def landed(self, request: Request, drafted: int, accepted: int) -> None:
        """What became of a draft."""

    def timed(self, requests: Sequence[Request], lengths: Sequence[int], us: float) -> None:
        """A step in which these decoded, some with drafts of these lengths, ended so long after the one before it."""

    def passed(self, sequences: int) -> None:
        """A step in which so many decoded ended, and its time says nothing."""

    def rests(self, sequences: int) -> bool:
        """Whether a drafter that is a model need not follow steps of so many sequences: no drafts pay there."""
        return False

    def forget(self, request_id: str) -> None:
        """The request has ended."""


class FixedLength(Length):
    """By the number of sequences alone, whatever becomes of it."""

    def __init__(self, tokens: int, by_sequences: Sequence[tuple[int, int]] = ()) -> None:
        """``by_sequences``: from so many sequences on, drafts of so many tokens, at most ``tokens``; before the first
        entry, and without any, ``tokens``."""
        self._tokens = tokens
        self._by_sequences = sorted(by_sequences)

    def choose(self, requests: Sequence[Request], sequences: int) -> Sequence[int]:
        tokens = self._tokens
        for first, count in self._by_sequences:
            if sequences >= first:
                tokens = min(count, self._tokens)
        return [tokens] * len(requests)


class ByArithmetic(Length):
    """As long as pays."""

    def __init__(self, prior: Prior, most: int) -> None:
        self._most = most
        self._costs = StepCosts(prior, most)
        self._acceptance = Acceptance(most)
        self._account = 0.0
        """In microseconds."""
        self._advance: float | None = None
        """What is left to make up for."""
        self._last_drafts = 0
        """Of the step before."""
        self._wanted = False
        """Drafts pay, as far as is known, whether there is time for them or not."""
        self._resting = Resting()

    def choose(self, requests: Sequence[Request], sequences: int) -> Sequence[int]:
        none = [0] * len(requests)
        if not requests or self._costs.wants_baseline(sequences):
            return none
        costs = self._costs.table(sequences)
        found = best_lengths([self._acceptance.chances(r.request_id) for r in requests], costs, LEAST_GAIN)
        self._wanted = any(found)
        if self._account < 0 or (not self._wanted and self._costs.drafted_in_a_row(sequences) >= PROBES):
            return none
        return self._afforded(found, costs) if self._wanted else self._probe(requests, costs)

    def _afforded(self, lengths: list[int], costs: Costs) -> list[int]:
        """No longer than the account can pay for if all of them fail, but for one token: a few long drafts without luck
        took what 300 steps of one sequence put in."""
        longest = max(lengths)
        while longest > 1 and costs.verify[sum(lengths)] + costs.drafting(longest) > costs.verify[0] + self._account:
            longest -= 1
            lengths = [min(length, longest) for length in lengths]
        return lengths

    def _probe(self, requests: Sequence[Request], costs: Costs) -> list[int]:
        """A short draft for the request of which least is known, where the account has the time for it and drafts could
        pay at all."""
        lengths = [0] * len(requests)
        count = min(PROBE_TOKENS, self._most)
        price = costs.verify[count] + costs.drafting(count) - costs.verify[0]
        if self._account >= price and costs.most_gain > LEAST_GAIN:
            tries = [self._acceptance.tries(request.request_id) for request in requests]
            lengths[tries.index(min(tries))] = count
        return lengths

    def landed(self, request: Request, drafted: int, accepted: int) -> None:
        self._acceptance.landed(request.request_id, drafted, accepted)

    def timed(self, requests: Sequence[Request], lengths: Sequence[int], us: float) -> None:
        sequences, drafts, longest = len(requests), sum(lengths), max(lengths, default=0)
        alone, expected = self._costs.expected(sequences, 0, 0), self._costs.expected(sequences, drafts, longest)
        turns = not drafts and self._last_drafts > 0
        self._last_drafts = drafts
        if not turns:
            self._costs.timed(sequences, drafts, longest, us)
        if self._advance is None:
            self._account = self._advance = ADVANCE * alone
        counted = us if us <= OUTLIER * expected else expected
        repaid = min(SHARE * counted, self._advance)
        self._advance -= repaid
        self._account += SHARE * counted - repaid
        gained = alone * (1 + self._given(requests, lengths) / sequences) - counted if drafts or turns else 0.0
        self._account += gained
        self._resting.stepped(sequences, counted, gained, self._wanted)
        self._account = max(-MOST_KEPT * alone, min(self._account, MOST_KEPT * alone))

    def passed(self, sequences: int) -> None:
        self._resting.stepped(sequences, 0.0, 0.0, self._wanted)

    def _given(self, requests: Sequence[Request], lengths: Sequence[int]) -> float:
        """Tokens that drafts of these lengths have given on average."""
        drafted = ((request.request_id, length) for request, length in zip(requests, lengths, strict=True) if length)
        return sum(self._acceptance.shown(request_id, length) for request_id, length in drafted)

    def rests(self, sequences: int) -> bool:
        return self._resting.rests(sequences)

    def forget(self, request_id: str) -> None:
        self._acceptance.forget(request_id)
