"""What ``bench MODEL`` measures: the rows that its options mean. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from microscale.errors import BadSetting

DEFAULT_TESTS = "pp512,pp2048,pp8192,tg32,tg128"


@dataclass(frozen=True)
class BenchCase:
    """One row to measure."""

    kind: str
    """``pp`` or ``tg``."""
    tokens: int
    batch: int
    depth: int

    @property
    def name(self) -> str:
        return f"{self.kind}{self.tokens}"

    @property
    def longest(self) -> int:
        """Maximum number of positions of one sequence."""
        return self.tokens + self.depth + 1


def make_cases(tests: Sequence[str], batches: Sequence[int], depths: Sequence[int]) -> list[BenchCase]:
    """Prompts run alone from an empty cache; decoding runs at every batch and depth."""
    cases = []
    for test in tests:
        match = re.fullmatch(r"(pp|tg)([1-9][0-9]{0,6})", test)
        if match is None:
            raise BadSetting(f"Unknown test {test!r}; use pp512 (a prompt of 512 tokens), tg128 (128 new tokens) ….")
        kind, tokens = match[1], int(match[2])
        if kind == "pp":
            cases.append(BenchCase(kind, tokens, 1, 0))
        else:
            cases += [BenchCase(kind, tokens, batch, depth) for batch in batches for depth in depths]
    return cases


def check_lengths(cases: Sequence[BenchCase], max_context: int) -> None:
    """Refuse a case that is longer than the model's context."""
    for case in cases:
        if case.longest > max_context:
            needs = f"{case.name} after {case.depth} tokens needs {case.longest} positions"
            raise BadSetting(f"{needs}; the model has {max_context}.")
