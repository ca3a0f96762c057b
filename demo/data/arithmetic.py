"""Sums, differences, products and quotients, worked column by column as on paper."""

from __future__ import annotations

import random
import re
from typing import NamedTuple

from demo.data.base import Sample, by_effort, draw_split, simple
from microscale.text.conversation import Effort

COLUMNS = ("Ones", "Tens", "Hundreds", "Thousands", "Ten thousands")
SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
NAMES = ("Anna", "Ben", "Clara", "David", "Eva", "Finn", "Grace", "Hugo", "Iris", "Jack", "Lena", "Max", "Nora", "Omar",
         "Paula", "Rosa", "Sam", "Tom")  # fmt: skip
THINGS = ("apples", "books", "coins", "stamps", "marbles", "pencils", "shells", "cards", "eggs", "stones", "tickets",
          "oranges", "buttons", "flowers")  # fmt: skip
ASKED = ("What is {q}?", "{q}", "{q} = ?", "Calculate {q}.", "How much is {q}?", "Please work out {q}.", "Compute {q}",
         "Can you tell me what {q} is?", "{q}=", "Solve {q}.", "I need {q}.", "What does {q} give?")  # fmt: skip
WORDED = {
    "add": ("the sum of {a} and {b}", "{a} plus {b}", "{a} + {b}", "{a}+{b}"),
    "sub": ("the difference of {a} and {b}", "{a} minus {b}", "{a} - {b}", "{a}-{b}"),
    "mul": ("the product of {a} and {b}", "{a} times {b}", "{a} * {b}", "{a} x {b}", "{a} multiplied by {b}"),
    "div": ("{a} divided by {b}", "{a} / {b}", "{a} over {b}"),
}


class Problem(NamedTuple):
    op: str
    a: int
    b: int

    @property
    def result(self) -> int:
        return {"add": self.a + self.b, "sub": self.a - self.b, "mul": self.a * self.b}.get(
            self.op, self.a // max(self.b, 1)
        )


def draw(rng: random.Random) -> Problem:
    op = rng.choices(("add", "sub", "mul", "div"), (8, 8, 3, 2))[0]
    if op in ("add", "sub"):
        top = rng.choices((20, 100, 1000, 10000), (1, 2, 8, 1))[0]
        return Problem(op, rng.randrange(top), rng.randrange(top))
    if op == "mul":
        big = rng.choice((13, 13, 100, 100, 1000))
        return Problem(op, rng.randrange(big), rng.randrange(2, 100 if big == 100 and rng.random() < 0.4 else 13))
    b = rng.randrange(2, 13)
    return Problem(op, b * rng.randrange(1, 13 if rng.random() < 0.5 else 100), b)


def make(rng: random.Random, held_out: bool) -> Sample:
    if rng.random() < 0.06:
        return _three(rng, held_out)
    problem = draw_split(lambda: draw(rng), lambda p: p, held_out)
    op, a, b = problem
    if op in ("add", "sub") and a >= b and rng.random() < 0.2:
        question, final = _story(rng, problem)
    else:
        question = rng.choice(ASKED).format(q=rng.choice(WORDED[op]).format(a=a, b=b))
        final = rng.choice(("{e} = {r}.", "{e} = {r}.", "The answer is {r}.")).format(
            e=f"{a} {SIGNS[op]} {b}", r=problem.result
        )
    return simple(
        rng, "arithmetic", question, lambda effort: work(problem, effort), final, kind="number", value=problem.result
    )


def make_basic(rng: random.Random, held_out: bool) -> Sample:
    """Two operands up to 999, sum or difference: the bar that the model must clear."""
    while True:
        sample = make(rng, held_out)
        a, op, b = _operands(sample.turn[0].reasoning)
        if op in "+-" and max(a, b) <= 999 and " Then " not in sample.turn[0].reasoning:
            return Sample(**{**vars(sample), "task": "addition"})


def _three(rng: random.Random, held_out: bool) -> Sample:
    """Three terms, two at a time."""
    a, b, c = draw_split(
        lambda: tuple(rng.randrange(rng.choice((20, 100, 300))) for _ in range(3)), lambda p: p, held_out
    )
    first, second = Problem("add", a, b), Problem("add", a + b, c)
    question = rng.choice(ASKED).format(q=f"{a} + {b} + {c}")
    thought = lambda effort: f"{work(first, effort)} Then {work(second, effort)}"
    final = f"{a} + {b} + {c} = {second.result}."
    return simple(rng, "arithmetic", question, thought, final, kind="number", value=second.result)


def _operands(thought: str) -> tuple[int, str, int]:
    found = re.match(r"(\d+) (.) (\d+)", thought)
    assert found is not None  # every working begins with its problem
    return int(found[1]), found[2], int(found[3])


def work(problem: Problem, effort: Effort) -> str:
    """The working, which begins with the problem and ends with its result."""
    op, a, b = problem
    head = f"{a} {SIGNS[op]} {b}"
    if op == "add":
        return by_effort(effort, *_wrapped(head, _add(a, b), problem.result))
    if op == "sub" and a < b:
        low, medium, high = _wrapped(f"{b} - {a}", _subtract(b, a), b - a)
        swapped = f"{head} = -({b} - {a}). "
        return by_effort(effort, f"{swapped}{low}.", swapped + medium, swapped + high) + f" So {problem.result}."
    if op == "sub":
        return by_effort(effort, *_wrapped(head, _subtract(a, b), problem.result))
    if op == "mul":
        return _multiply(a, b, effort)
    return f"{head} = {problem.result} because {problem.result} * {b} = {a}."


def _wrapped(head: str, steps: list[str], result: int) -> tuple[str, str, str]:
    low = f"{head}: {', '.join(steps)}, so {result}"
    named = ". ".join(f"{COLUMNS[at]}: {step}" for at, step in enumerate(steps))
    medium = f"{head}: {named}. So {result}."
    return low, medium, f"{head}: column by column, from the right. {named}. Together that is {result}."


def _digits(number: int, width: int) -> list[int]:
    return [number // 10**place % 10 for place in range(width)]


def _add(a: int, b: int) -> list[str]:
    """Each column's sum from the ones on, the carry from the column before as the last term."""
    steps, carry = [], 0
    width = max(len(str(a)), len(str(b)))
    for x, y in zip(_digits(a, width), _digits(b, width), strict=True):
        total = x + y + carry
        steps.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        carry = total // 10
    return steps


def _subtract(a: int, b: int) -> list[str]:
    """Each column's difference; ``1`` before the digit where ten is borrowed, ``-1`` at the end where it was lent."""
    steps, borrow = [], 0
    width = len(str(a))
    for x, y in zip(_digits(a, width), _digits(b, width), strict=True):
        lent = "-1" if borrow else ""
        short = x - y - borrow < 0
        steps.append(f"{'1' if short else ''}{x}-{y}{lent}={x - y - borrow + 10 * short}")
        borrow = int(short)
    return steps


def _multiply(a: int, b: int, effort: Effort) -> str:
    if max(a, b) < 13:
        return f"{a} * {b} = {a * b}."
    # The digits of one factor, with their places: 47 * 23 = 47 * 20 + 47 * 3, 47 * 3 = 40 * 3 + 7 * 3.
    parts = [digit * 10**place for place, digit in enumerate(_digits(a, len(str(a)))) if digit][::-1] or [0]
    if b > 12:
        tens, ones = b // 10 * 10, b % 10
        steps = [f"{part} * {m} = {part * m}" for m in (tens, ones) if m for part in parts]
        terms = [part * m for m in (tens, ones) if m for part in parts]
    else:
        steps = [f"{part} * {b} = {part * b}" for part in parts]
        terms = [part * b for part in parts]
    sums, total = [], terms[0]
    for term in terms[1:]:
        sums.append(f"{total} + {term} = {total + term}")
        total += term
    joined = ", ".join(steps + sums)
    return f"{a} * {b}: {joined}{', so' if effort is Effort.LOW else '. So'} {a * b}."


def _story(rng: random.Random, problem: Problem) -> tuple[str, str]:
    _, a, b = problem
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    if problem.op == "add":
        other = rng.choice([n for n in NAMES if n != name])
        question = rng.choice((
            f"{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
            f"{name} has {a} {things}. {other} has {b} {things}. How many do they have together?",
        ))  # fmt: skip
        return question, (f"Together they have {problem.result} {things}." if "together" in question else
                          f"{name} has {problem.result} {things}.")  # fmt: skip
    question = rng.choice((
        f"{name} has {a} {things} and gives away {b}. How many {things} are left?",
        f"There are {a} {things} in a box. {name} takes {b} of them. How many {things} are left?",
    ))  # fmt: skip
    return question, f"{problem.result} {things} are left."
