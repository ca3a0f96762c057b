"""What steps cost with drafts: predicted before any was seen, and corrected by the times of those that were.

The prior is the prediction that ``explain`` prints, at a few numbers of sequences and of drafts, and between them along
straight lines (of drafts, and of doublings of sequences). Times of real steps say by which factor it is off, by *cell*:
half doublings of sequences, drafts of a sequence. The lower third of the last few times counts, so that a step in which
the machine was busy is no news; without drafts the median, since all others are held against it: the lower of two times
made drafts look dear for 256 steps. Drafts never seem to save time by themselves. A cell that was not seen takes the
factors of those near it. One that looked dear is believed less the longer ago that was, until it is tried again:
otherwise what was wrong once would stay so, since nobody takes drafts that look dear.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from microscale.engine.speculation.arithmetic import Costs

KEPT = 7
"""Times of a cell that are remembered."""
LEAST_SEEN = 2
"""Times after which a cell counts: the lower of two is no step with a capture in it."""
BASELINE_SEEN = 3
"""The same of steps without drafts, which all others are held against."""
NEWS = 0.02
"""A factor's change, as a logarithm, after which costs are reckoned anew."""
STALE = 256
"""Steps with drafts after which steps without are to be timed again."""
HALF_LIFE = 16
"""Steps in which half of what a cell was too dear is forgotten: twice as many for each of its times. Two times may both
have been bad luck, seven were not."""
REVIEW = 16
"""Steps after which costs are reckoned anew for that reason."""
FORGOTTEN = 4096
"""Steps after which a cell that was not seen again counts no more: the machine may have been busy then."""
MOST_TABLES = 16
SIZES = 2
"""Of steps, from K tokens for all to K + 1: with every number there would be a graph for each."""
Cell = tuple[int, int]


@dataclass(frozen=True)
class Prior:
    """Predicted times, in microseconds."""

    sequences: tuple[int, ...]
    drafts: tuple[int, ...]
    """Of each sequence: from 0 on."""
    step: tuple[tuple[float, ...], ...]
    """By sequences, then by drafts: verifying, and what the host adds."""
    draft: tuple[tuple[float, ...], ...]
    """The same of the drafter."""

    def step_us(self, sequences: int, drafts: Sequence[float]) -> list[float]:
        """``drafts``: of a sequence, on average; they do not fall."""
        return self._between(self.step, sequences, drafts)

    def draft_us(self, sequences: int, drafts: Sequence[float]) -> list[float]:
        return self._between(self.draft, sequences, drafts)

    def _between(self, table: Sequence[Sequence[float]], sequences: int, drafts: Sequence[float]) -> list[float]:
        places, place = [math.log2(each) for each in self.sequences], math.log2(sequences)
        row = [_line(places, column, place) for column in zip(*table, strict=True)]
        return [_line(self.drafts, row, count) for count in drafts]


def _line(places: Sequence[float], values: Sequence[float], place: float) -> float:
    """Along straight lines between places; beyond the last as between the last two."""
    if len(places) == 1:
        return values[0]
    right = min(max(bisect_left(places, place), 1), len(places) - 1)
    low, high = places[right - 1], places[right]
    share = (place - low) / (high - low)
    return values[right - 1] + share * (values[right] - values[right - 1])


def _cell(sequences: int, drafts: int) -> Cell:
    """Where a step of so many sequences, with so many drafts in all, belongs."""
    return round(2 * math.log2(sequences)), -(-drafts // sequences)


def _distance(a: Cell, b: Cell) -> float:
    """In doublings. Steps without drafts run ahead of their tokens and are a kind of their own."""
    kind = 1.0 if (a[1] == 0) != (b[1] == 0) else 0.0
    return abs(a[0] - b[0]) / 2 + abs(math.log2((1 + a[1]) / (1 + b[1]))) + kind


class StepCosts:
    """Costs of the next step, for any number of sequences."""

    def __init__(self, prior: Prior, most: int) -> None:
        """``most``: drafts of a sequence."""
        self._prior = prior
        self._most = most
        self._seen: dict[Cell, deque[float]] = {}
        """Logarithms of times over what the prior says."""
        self._factors: dict[Cell, float] = {}
        """What ``_seen`` says, as it was when tables were reckoned."""
        self._last: dict[Cell, int] = {}
        """The step in which a cell was seen last."""
        self._steps = 0
        self._drafted: dict[int, int] = {}
        """``drafted_in_a_row``, by half doublings of sequences."""
        self._tables: dict[int, Costs] = {}
        self._predicted: dict[int, Costs] = {}
        """By the prior alone."""

    def timed(self, sequences: int, drafts: int, longest: int, us: float) -> None:
        """A step took so long, from the end of the one before it: with the drafting, and whatever else there was."""
        predicted = self._predict(sequences)
        expected = predicted.verify[drafts] + predicted.drafting(longest)
        if us <= 0 or expected <= 0:
            return
        cell = _cell(sequences, drafts)
        seen = self._seen.setdefault(cell, deque(maxlen=KEPT))
        seen.append(math.log(us / expected))
        self._steps += 1
        self._last[cell] = self._steps
        if self._steps % FORGOTTEN == 0:
            self._forget()
        if self._steps % REVIEW == 0 and any(self._steps - last >= REVIEW for last in self._last.values()):
            self._tables.clear()
        size = cell[0]
        self._drafted[size] = self._drafted.get(size, 0) + 1 if drafts else 0
        if len(seen) >= (LEAST_SEEN if drafts else BASELINE_SEEN):
            factor = sorted(seen)[(len(seen) - 1) // (3 if drafts else 2)]
            if cell not in self._factors or abs(factor - self._factors[cell]) > NEWS:
                self._factors[cell] = factor
                self._tables.clear()

    def _forget(self) -> None:
        for cell in [cell for cell, last in self._last.items() if self._steps - last >= FORGOTTEN]:
            for kept in (self._last, self._seen, self._factors):
                kept.pop(cell, None)
            self._tables.clear()

    def drafted_in_a_row(self, sequences: int) -> int:
        """Steps with drafts since one without was timed, of about so many sequences."""
        return self._drafted.get(_cell(sequences, 0)[0], 0)

    def wants_baseline(self, sequences: int) -> bool:
        """Whether steps of so many sequences without drafts were not timed yet, or long ago."""
        return _cell(sequences, 0) not in self._factors or self.drafted_in_a_row(sequences) >= STALE

    def table(self, sequences: int) -> Costs:
        """Costs of a step by its drafts."""
        if sequences not in self._tables:
            if len(self._tables) >= MOST_TABLES:
                self._tables.clear()
            self._tables[sequences] = self._correct(sequences)
        return self._tables[sequences]

    def expected(self, sequences: int, drafts: int, longest: int) -> float:
        """What such steps took, however long ago; where there was none, as the table has it at first."""
        predicted = self._predict(sequences)
        return (predicted.verify[drafts] + predicted.drafting(longest)) * math.exp(
            self._factor(_cell(sequences, drafts))
        )

    def _predict(self, sequences: int) -> Costs:
        if sequences not in self._predicted:
            if len(self._predicted) >= MOST_TABLES:
                self._predicted.clear()
            verify = self._prior.step_us(sequences, [n / sequences for n in range(sequences * self._most + 1)])
            draft = [0.0, *self._prior.draft_us(sequences, range(1, self._most + 1))]
            self._predicted[sequences] = Costs(sequences, verify, draft)
        return self._predicted[sequences]

    def _correct(self, sequences: int) -> Costs:
        predicted, size = self._predict(sequences), _cell(sequences, 0)[0]
        alone = self._factor((size, 0))
        faded = [self._faded((size, count), alone) for count in range(1, self._most + 1)]
        factors = [math.exp(factor) for factor in (alone, *faded)]
        verify = [predicted.verify[0] * factors[0]]
        for count in range(1, self._most + 1):
            part = predicted.verify[(count - 1) * sequences + 1 : count * sequences + 1]
            verify += [max(us * factors[count], verify[0]) for us in part]
        draft = [us * factor for us, factor in zip(predicted.draft, factors, strict=True)]
        return Costs(sequences, verify, draft, SIZES)

    def _faded(self, cell: Cell, alone: float) -> float:
        """The factor of a cell with drafts, as a logarithm. ``alone``: that of the same step without."""
        factor = self._factor(cell)
        if factor <= alone:
            return factor
        age = self._steps - self._last.get(cell, self._steps)
        half_life = HALF_LIFE << len(self._seen.get(cell, ()))
        return alone + (factor - alone) * math.exp2(-age / half_life)

    def _factor(self, cell: Cell) -> float:
        """As a logarithm: what the cell's own times say, or those near it."""
        if cell in self._factors:
            return self._factors[cell]
        weights = {other: math.exp(-3 * _distance(cell, other)) for other in self._factors}
        total = sum(weights.values())
        return sum(self._factors[other] * weight for other, weight in weights.items()) / total if total else 0.0
