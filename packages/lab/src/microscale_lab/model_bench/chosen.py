"""Which lengths of drafts an engine chose, step by step, so that a figure of ``bench --speculative-acceptance`` with
``auto`` explains itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from microscale.engine.speculation.length import tokens_of
from microscale.engine.speculation.speculation import Speculation
from microscale.engine.work import Work


@dataclass(frozen=True)
class ChosenStep:
    """One call of the engine's ``step``, and the step whose tokens it read."""

    ms: float
    lengths: tuple[int, ...]
    """Of the drafts of each sequence."""
    captured: bool
    """A graph was captured meanwhile."""
    learning: bool
    """It came before those that count."""
    given: int
    """Tokens of all sequences that it gave, by chance."""

    @property
    def counts(self) -> bool:
        return not self.captured and not self.learning

    def tokens(self, acceptance: float) -> float:
        """What it gives on average: with one sequence, what chance makes of 300 steps is 3 % off."""
        return sum(tokens_of(acceptance, length) for length in self.lengths)


class RecordingSpeculation(Speculation):
    """Remembers the step that ended last."""

    last: tuple[int, ...] = ()
    """Lengths of its drafts."""

    def ended(self, schedule: Sequence[Work]) -> None:
        self.last = tuple(len(work.drafts) for work in schedule)
        super().ended(schedule)


def shares(steps: Sequence[ChosenStep]) -> dict[int, float]:
    """Length of a draft → the share of sequences, over all steps, that had it."""
    counts = Counter(length for step in steps for length in step.lengths)
    return {length: count / counts.total() for length, count in sorted(counts.items())}


def shares_line(chosen: dict[int, float]) -> str:
    return f"{'K:':>10} " + ", ".join(f"{length} {share:.0%}" for length, share in chosen.items())


def steps_as_json(steps: Sequence[ChosenStep]) -> list[dict[str, object]]:
    """``drafts``: of all sequences; ``longest``: of one."""
    found = []
    for step in steps:
        told = asdict(step)
        lengths = told.pop("lengths")
        found.append(told | {"drafts": sum(lengths), "longest": max(lengths, default=0)})
    return found
