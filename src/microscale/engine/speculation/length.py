"""How many tokens are drafted for each request.

``AutomaticLength`` compares the lengths 0 to ``most`` before every step:

    tokens of a step    each sequence gets one, and a + a^2 + … + a^K more if it has K drafts
    cost of a step      from a table, by the number of tokens to verify (``hardware/draft_costs``), plus the drafter's

It takes the length with the most tokens per cost. ``a``, the probability that a drafted token is accepted after
accepted ones, is a running average of each request's own drafts, and starts from that of all requests. Requests with a
low average may get no drafts: either all requests have drafts of the same length, or the better half does. There are
few numbers of tokens to verify that way, and each needs a CUDA graph.

Nothing here depends on a clock, so the same drafts with the same luck give the same lengths.

Texts change, so requests without drafts get some now and then, as a *trial*: while no length is worth it, a probe of
two tokens for all; while half of the requests have drafts, one step with drafts for all. The first trial comes after 8
steps. Each one of which at most half is accepted doubles that; probes cost at most about 1 % of the time. A draft
head costs time even while nothing is drafted, so it rests then, and is awake for 64 of 1,088 steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from microscale.engine.limits import drafted_sequences
from microscale.engine.request import Request
from microscale.hardware.draft_costs import StepCurve

FIRST_ACCEPTANCE = 0.6
"""Before anything was drafted: between what published heads reach for chat and for code."""
FIRST_WEIGHT = 8
"""Drafted tokens that the initial value of an average counts for."""
REQUEST_MEMORY, SHARED_MEMORY = 32, 256
"""Drafted tokens that an average covers."""
MARGIN = 1.02
"""Drafts begin, and another length replaces the present one, if they promise this many times the tokens per cost."""
PROBE_TOKENS = 2
FIRST_WAIT, PROBE_SHARE = 8, 0.01
"""Steps between two trials at first, and the share of the time that probes may cost in the end."""
AWAKE, REST = 64, 1024
"""Steps in which a draft head is awake, and then rests, while drafts are not worth it."""


@dataclass(frozen=True)
class DraftCosts:
    """The cost of a step with drafts, in milliseconds of the GPU that was measured; only ratios matter."""

    curve: StepCurve
    head_ms: float = 0.0
    """One pass of a draft head."""
    one_pass: bool = False
    """The head drafts all tokens in one pass; otherwise it makes one for each."""
    host_ms: Callable[[int, int], float] | None = None
    """How long the GPU waits for the host, by the number of sequences and of drafts; ``None``: not at all."""
    states_ms: float = 0.0
    """Writing the states after one draft. With states, many sequences get no drafts."""
    head_has_experts: bool = False
    """The head's pass costs more for more sequences, as the target's step does."""

    def ms(self, sequences: int, drafts: int = 0, longest: int = 0) -> float:
        """``drafts``: of all sequences together; ``longest``: of one sequence."""
        verify = self.curve.at(sequences + drafts)
        if not drafts:
            return verify
        if sequences > drafted_sequences(sequences, states=self.states_ms > 0):
            return inf
        wait = 0.0 if self.host_ms is None else self.host_ms(sequences, drafts)
        one = self.head_ms * (self.curve.at(sequences) / self.curve.at(1) if self.head_has_experts else 1.0)
        return verify + self.states_ms * drafts + one * (1 if self.one_pass else longest) + wait

    def ratio(self, sequences: int, drafts: int) -> float:
        """The cost of a step with ``drafts`` drafts for each sequence, relative to a step without."""
        return self.ms(sequences, sequences * drafts, drafts) / self.ms(sequences)


def tokens_of(acceptance: float, drafts: int) -> float:
    """Average number of tokens that a step gives a sequence with ``drafts`` drafts: 1 + a + … + a^K."""
    return sum(acceptance**place for place in range(drafts + 1))


def acceptance_for(tokens: float, drafts: int) -> float | None:
    """The acceptance at which a step with ``drafts`` drafts gives ``tokens`` tokens; ``None`` if it cannot."""
    if tokens > drafts + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_of(middle, drafts) < tokens else (low, middle)
    return high


class Length:
    """A rule for the length of drafts. Methods that a rule does not need do nothing."""

    def choose(self, requests: Sequence[Request], sequences: int) -> Sequence[int]:
        """The maximum number of tokens to draft for each of ``requests``, which decode in a step of ``sequences``
        sequences. It is called several times for one step and gives the same answer."""
        raise NotImplementedError

    def landed(self, request: Request, drafted: int, accepted: int) -> None:
        """A draft was verified."""

    def stepped(self) -> None:
        """A decoding step has ended. Its drafts, if any, land after this."""

    def rests(self, sequences: int) -> bool:
        """Whether a draft head may skip steps of ``sequences`` sequences."""
        return False

    def forget(self, request_id: str) -> None:
        """The request has ended."""


class FixedLength(Length):
    """By the number of sequences alone."""

    def __init__(self, tokens: int, by_sequences: Sequence[tuple[int, int]] = ()) -> None:
        """``by_sequences``: pairs (first number of sequences, tokens of a draft), at most ``tokens``; before the first
        pair, ``tokens``."""
        self._tokens = tokens
        self._by_sequences = sorted(by_sequences)

    def choose(self, requests: Sequence[Request], sequences: int) -> Sequence[int]:
        tokens = self._tokens
        for first, count in self._by_sequences:
            if sequences >= first:
                tokens = min(count, self._tokens)
        return [tokens] * len(requests)


class Average:
    """A running average of outcomes: of all of them at first, then of about the last ``memory``."""

    def __init__(self, value: float, memory: int) -> None:
        self.value = value
        self._seen, self._memory = FIRST_WEIGHT, memory

    def add(self, drafted: int, accepted: int) -> None:
        """The accepted tokens are successes and the first rejected one is a failure; later ones say nothing."""
        for place in range(min(accepted + 1, drafted)):
            self._seen = min(self._seen + 1, self._memory)
            self.value += ((place < accepted) - self.value) / self._seen


class AutomaticLength(Length):
    """The length with the most tokens per cost."""

    def __init__(self, costs: DraftCosts, most: int) -> None:
        """``most``: the maximum length of a draft."""
        self._costs = costs
        self._most = most
        self._shared = Average(FIRST_ACCEPTANCE, SHARED_MEMORY)
        self._own: dict[str, Average] = {}
        self._length = 0
        """The present one. 0 while no length is worth it."""
        self._idle = 0
        """Steps in a row in which no length was worth it."""
        self._undrafted = 0
        """Steps since the last trial."""
        self._trial = False
        """The last choice was a trial: a probe, or drafts for all while some requests had none."""
        self._wait = FIRST_WAIT
        """Steps until the next trial."""
        self._landed = [0, 0]
        """Tokens drafted and accepted in the last step."""

    def choose(self, requests: Sequence[Request], sequences: int) -> Sequence[int]:
        if not requests:
            return []
        chances = [self._acceptance(request.request_id) for request in requests]
        self._length, least = self._best(chances, sequences)
        if not self._length:
            self._trial = True
            return [self._probe(sequences)] * len(requests)
        self._trial = min(chances) < least and self._undrafted >= self._wait
        return [self._length if chance >= least or self._trial else 0 for chance in chances]

    def _acceptance(self, request_id: str) -> float:
        own = self._own.get(request_id)
        return self._shared.value if own is None else own.value

    def _best(self, chances: Sequence[float], sequences: int) -> tuple[int, float]:
        """The best length, or 0, and the least acceptance of requests that get drafts."""
        ranked = sorted(chances, reverse=True)
        none = sequences / self._costs.ms(sequences)
        best, choice = none * MARGIN, (0, 0.0)
        reached, given = [1.0] * len(ranked), [0.0] * len(ranked)
        for length in range(1, self._most + 1):
            reached = [before * chance for before, chance in zip(reached, ranked, strict=True)]
            given = [before + chance for before, chance in zip(given, reached, strict=True)]
            for count in {len(ranked), -(-len(ranked) // 2)}:
                tokens = sequences + sum(given[:count])
                rate = tokens / self._costs.ms(sequences, count * length, length)
                rate *= MARGIN if length == self._length else 1.0
                if rate > best:
                    best, choice = rate, (length, ranked[count - 1])
        return choice

    def _probe(self, sequences: int) -> int:
        """The length of a probe, or 0 while none is due or not even drafts that are always accepted would be worth
        it."""
        length, lengths = min(PROBE_TOKENS, self._most), range(1, self._most + 1)
        wait = min(self._wait, max(FIRST_WAIT, (self._costs.ratio(sequences, length) - 1) / PROBE_SHARE))
        worth = any(1 + drafts > MARGIN * self._costs.ratio(sequences, drafts) for drafts in lengths)
        return length if self._undrafted >= wait and worth else 0

    def landed(self, request: Request, drafted: int, accepted: int) -> None:
        own = self._own.get(request.request_id)
        if own is None:
            own = self._own[request.request_id] = Average(self._shared.value, REQUEST_MEMORY)
        own.add(drafted, accepted)
        self._shared.add(drafted, accepted)
        self._landed[0] += drafted
        self._landed[1] += accepted
        if self._trial:
            self._undrafted = 0

    def stepped(self) -> None:
        drafted, accepted = self._landed
        self._landed = [0, 0]
        self._idle = 0 if self._length else self._idle + 1
        if drafted and not self._undrafted:
            self._wait = FIRST_WAIT if 2 * accepted > drafted else 2 * self._wait
        self._undrafted += 1

    def rests(self, sequences: int) -> bool:
        return self._idle % (AWAKE + REST) >= AWAKE and not self._best([self._shared.value] * sequences, sequences)[0]

    def forget(self, request_id: str) -> None:
        self._own.pop(request_id, None)
