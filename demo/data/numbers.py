"""Comparing, ordering and counting."""

from __future__ import annotations

import random

from demo.data.arithmetic import THINGS
from demo.data.base import Sample, draw_split, listed, simple

FRUIT = ("apple", "pear", "plum", "cherry", "peach", "grape", "lemon", "melon", "banana", "orange", "fig", "kiwi")
COLOURS = ("red", "green", "blue", "yellow", "black", "white", "brown", "pink", "grey", "purple")
ANIMALS = ("cat", "dog", "cow", "horse", "sheep", "goat", "duck", "hen", "fox", "bear", "wolf", "mouse", "owl", "frog")


def make(rng: random.Random, held_out: bool) -> Sample:
    return rng.choice((_larger, _larger, _order, _extreme, _parity, _count_items, _count_list, _sequence))(
        rng, held_out
    )


def _number(rng: random.Random) -> int:
    return rng.randrange(rng.choice((20, 100, 1000, 10000)))


def _numbers(rng: random.Random, count: int, held_out: bool) -> list[int]:
    def draw() -> list[int]:
        top = rng.choice((20, 100, 1000))
        return rng.sample(range(top), count)

    return draw_split(draw, lambda n: tuple(sorted(n)), held_out)


def _larger(rng: random.Random, held_out: bool) -> Sample:
    a, b = draw_split(
        lambda: (_number(rng), _number(rng)), lambda p: p if p[0] != p[1] else ("same", *p), held_out
    )  # fmt: skip
    if a == b:
        b = a + 1
    larger = rng.random() < 0.6
    word = rng.choice(("larger", "bigger", "greater") if larger else ("smaller", "less"))
    question = rng.choice((f"Which is {word}, {a} or {b}?", f"Which number is {word}: {a} or {b}?",
                           f"{a} or {b}: which one is {word}?"))  # fmt: skip
    answer = max(a, b) if larger else min(a, b)
    if len(str(a)) != len(str(b)):
        why = f"{a} has {len(str(a))} digits, {b} has {len(str(b))}."
    else:
        at = next(i for i, (x, y) in enumerate(zip(str(a), str(b), strict=True)) if x != y)
        why = f"Same length; digit {at + 1}: {str(a)[at]} and {str(b)[at]}."
    thought = f"{why} {max(a, b)} > {min(a, b)}."
    return simple(rng, "comparing", question, thought, f"{answer} is {word}.", kind="number", value=answer)


def _order(rng: random.Random, held_out: bool) -> Sample:
    numbers = _numbers(rng, rng.randint(3, 5), held_out)
    down = rng.random() < 0.3
    asked = rng.choice(("from largest to smallest", "in descending order") if down else
                       ("from smallest to largest", "in ascending order"))  # fmt: skip
    question = rng.choice((f"Sort {listed(numbers)} {asked}.", f"Put these numbers {asked}: {listed(numbers)}."))
    left, picks = list(numbers), []
    while left:
        pick = max(left) if down else min(left)
        left.remove(pick)
        picks.append(pick)
    answer = ", ".join(map(str, picks))
    thought = " ".join(f"{'Largest' if down else 'Smallest'} of the rest: {pick}." for pick in picks)
    return simple(rng, "comparing", question, thought, f"{answer}.", kind="contains", value=answer)


def _extreme(rng: random.Random, held_out: bool) -> Sample:
    numbers = _numbers(rng, rng.randint(3, 6), held_out)
    largest = rng.random() < 0.5
    word = rng.choice(("largest", "biggest") if largest else ("smallest", "lowest"))
    best, steps = numbers[0], [f"{numbers[0]}"]
    for number in numbers[1:]:
        best = max(best, number) if largest else min(best, number)
        steps.append(f"then {number}: {best}")
    question = rng.choice(
        (f"What is the {word} of {listed(numbers)}?", f"Which is the {word} number: {listed(numbers)}?")
    )
    return simple(
        rng, "comparing", question, f"{', '.join(steps)}.", f"The {word} is {best}.", kind="number", value=best
    )


def _parity(rng: random.Random, held_out: bool) -> Sample:
    n = draw_split(lambda: _number(rng), lambda p: ("parity", p), held_out)
    word = "odd" if n % 2 else "even"
    question = rng.choice((f"Is {n} even or odd?", f"Is {n} odd or even?", f"Even or odd: {n}?"))
    thought = f"The last digit of {n} is {n % 10}, which is {word}."
    return simple(rng, "comparing", question, thought, f"{n} is {word}.", kind="contains", value=word)


def _count_items(rng: random.Random, held_out: bool) -> Sample:
    words = rng.choice((FRUIT, COLOURS, ANIMALS))
    few = rng.sample(words, 3)
    items = draw_split(
        lambda: [rng.choice(few) for _ in range(rng.randint(3, 10))], lambda p: ("items", tuple(p)), held_out
    )
    target = rng.choice(items)
    steps, seen = [], 0
    for item in items:
        seen += item == target
        steps.append(f"{item} {seen}")
    question = rng.choice((f"How many times does {target} occur in this list: {', '.join(items)}?",
                           f"Count the word {target}: {' '.join(items)}"))  # fmt: skip
    final = f"The word {target} occurs {seen} {'time' if seen == 1 else 'times'}."
    return simple(rng, "counting", question, ", ".join(steps) + ".", final, kind="number", value=seen)


def _count_list(rng: random.Random, held_out: bool) -> Sample:
    words = rng.choice((FRUIT, COLOURS, ANIMALS, THINGS))
    items = draw_split(lambda: rng.sample(words, rng.randint(2, 9)), lambda p: ("list", tuple(p)), held_out)
    question = rng.choice((f"How many items are in this list: {', '.join(items)}?", f"Count these: {', '.join(items)}.",
                           f"How many words are here: {' '.join(items)}?"))  # fmt: skip
    thought = ", ".join(f"{at} {item}" for at, item in enumerate(items, 1)) + "."
    final = f"There are {len(items)}."
    return simple(rng, "counting", question, thought, final, kind="number", value=len(items))


def _sequence(rng: random.Random, held_out: bool) -> Sample:
    start, step = draw_split(lambda: (rng.randrange(50), rng.randint(1, 12)), lambda p: ("sequence", p), held_out)
    shown = [start + step * at for at in range(4)]
    answer = start + step * 4
    question = rng.choice(
        (f"What comes next: {', '.join(map(str, shown))}?", f"Continue: {', '.join(map(str, shown))}, …")
    )
    thought = f"{shown[1]} - {shown[0]} = {step}. {shown[3]} + {step} = {answer}."
    return simple(rng, "counting", question, thought, f"The next number is {answer}.", kind="number", value=answer)
