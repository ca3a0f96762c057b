"""Units of length, mass, volume and time: whole numbers, by multiplying or dividing."""

from __future__ import annotations

import random

from demo.data.base import Sample, draw_split, simple

# One of the first is so many of the second.
UNITS = (
    ("kilometre", "metre", 1000), ("metre", "centimetre", 100), ("centimetre", "millimetre", 10),
    ("metre", "millimetre", 1000),
    ("kilogram", "gram", 1000), ("tonne", "kilogram", 1000), ("gram", "milligram", 1000), ("litre", "millilitre", 1000),
    ("hour", "minute", 60), ("minute", "second", 60), ("day", "hour", 24), ("week", "day", 7), ("year", "month", 12),
    ("foot", "inch", 12), ("yard", "foot", 3), ("dozen", "piece", 12), ("euro", "cent", 100), ("dollar", "cent", 100),
    ("century", "year", 100), ("decade", "year", 10),
)  # fmt: skip
PLURALS = {"foot": "feet", "inch": "inches", "century": "centuries", "dozen": "dozen"}


def many(number: int, unit: str) -> str:
    return f"{number} {unit if number == 1 else PLURALS.get(unit, unit + 's')}"


def plural(unit: str) -> str:
    return PLURALS.get(unit, unit + "s")


def make(rng: random.Random, held_out: bool) -> Sample:
    def draw() -> tuple[tuple[str, str, int], int, bool]:
        unit = rng.choice(UNITS)
        # Beyond the tables only by tens, hundreds, thousands and small factors.
        most = 12 if unit[2] in (12, 24, 60) else rng.choice((12, 12, 99))
        return unit, rng.randint(1, most), rng.random() < 0.6

    (large, small, factor), number, down = draw_split(draw, lambda p: p, held_out)
    total = number * factor
    if down:
        question = rng.choice((f"How many {plural(small)} are {many(number, large)}?",
                               f"Convert {many(number, large)} to {plural(small)}.",
                               f"{many(number, large)} in {plural(small)}?"))  # fmt: skip
        thought = f"1 {large} is {many(factor, small)}. {number} * {factor} = {total}."
        return simple(rng, "units", question, thought, f"{many(number, large)} = {many(total, small)}.",
                      kind="contains", value=many(total, small))  # fmt: skip
    question = rng.choice((f"How many {plural(large)} are {many(total, small)}?",
                           f"Convert {many(total, small)} to {plural(large)}.",
                           f"{many(total, small)} in {plural(large)}?"))  # fmt: skip
    thought = f"1 {large} is {many(factor, small)}. {total} / {factor} = {number}."
    return simple(rng, "units", question, thought, f"{many(total, small)} = {many(number, large)}.",
                  kind="contains", value=many(number, large))  # fmt: skip
