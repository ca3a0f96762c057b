"""How much of each kind of task there is, and where samples come from: a seed and a number give the same ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from demo.data import (
    answers,
    arithmetic,
    capitals,
    days,
    followups,
    letters,
    numbers,
    smalltalk,
    stories,
    tools,
    units,
    words,
)
from demo.data.base import NothingHeldOut, Sample

Maker = Callable[[random.Random, bool], Sample]

SHARES: dict[Maker, float] = {
    arithmetic.make: 17,
    numbers.make: 8,
    letters.make: 9,
    days.make: 5,
    units.make: 4,
    capitals.make: 8,
    words.make: 9,
    stories.make: 3,
    smalltalk.make: 5,
    tools.make: 18,
    answers.make: 8,
    followups.make: 6,
}
TASKS: dict[str, Maker] = {
    "addition": arithmetic.make_basic,
    "arithmetic": arithmetic.make,
    "capitals": capitals.make_capital,
    "geography": capitals.make,
    "numbers": numbers.make,
    "letters": letters.make,
    "dates": days.make,
    "units": units.make,
    "words": words.make,
    "stories": stories.make,
    "smalltalk": smalltalk.make,
    "tools": tools.make_call,
    "tool use": tools.make,
    "json": answers.make,
    "follow-ups": followups.make,
}
"""What evaluation asks, by name."""


def draw(rng: random.Random, maker: Maker, held_out: bool) -> Sample:
    """One sample; kinds that have nothing in the wanted part are drawn anew."""
    while True:
        try:
            return maker(rng, held_out)
        except NothingHeldOut:
            continue


def training(seed: int, shard: int, only: tuple[str, ...] = ()) -> Iterator[Sample]:
    """Samples of one shard, without end: of everything, or of these tasks alone (for trials)."""
    rng = random.Random(f"train {seed} {shard}")
    mixed = {TASKS[task]: 1.0 for task in only} or SHARES
    makers, shares = list(mixed), list(mixed.values())
    while True:
        yield draw(rng, rng.choices(makers, shares)[0], False)


def held_out(task: str, count: int, seed: int = 0) -> list[Sample]:
    """So many samples of a task that training never draws."""
    rng = random.Random(f"held out {seed} {task}")
    return [draw(rng, TASKS[task], True) for _ in range(count)]
