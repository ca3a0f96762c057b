"""Dates: today's, from the system message; week days, months, leap years, days before and after."""

from __future__ import annotations

import calendar
import datetime
import random

from demo.data.base import Sample, assistant, is_held_out, some_date, some_effort, user

MONTHS = tuple(calendar.month_name)[1:]
WEEK = tuple(calendar.day_name)
TASK = "dates"


def make(rng: random.Random, held_out: bool) -> Sample:
    kind = rng.choice((_today, _today, _weekday_after, _weekday_after, _month_days, _next_month, _leap, _shift, _order))
    while True:
        today = some_date(rng)
        question, thought, final, check = kind(rng, today)
        if is_held_out(question, today.isoformat() if kind is _today else "") == held_out:
            break
    return Sample(
        TASK, (user(question),), (assistant(final, thought),), check, effort=some_effort(rng), date=today.isoformat()
    )


Made = tuple[str, str, str, dict[str, object]]


def written(day: datetime.date) -> str:
    return f"{MONTHS[day.month - 1]} {day.day}, {day.year}"


def _today(rng: random.Random, today: datetime.date) -> Made:
    thought = f"The current date is {today.isoformat()}."
    kind = rng.randrange(4)
    if kind == 0:
        question, final, value = "What year is it?", f"It is {today.year}.", str(today.year)
    elif kind == 1:
        month = MONTHS[today.month - 1]
        question, final, value = "Which month is it?", f"It is {month}.", month
        thought += f" Month {today.month} is {month}."
    else:
        question = rng.choice(
            ("What is the date today?", "What day is it today?", "What's today's date?", "Which date is it?")
        )
        final, value = f"Today is {written(today)}.", written(today)
        thought += f" Month {today.month} is {MONTHS[today.month - 1]}."
    return question, thought, final, {"kind": "contains", "value": value}


def _weekday_after(rng: random.Random, today: datetime.date) -> Made:
    at, num = rng.randrange(7), rng.randint(1, 20)
    back = rng.random() < 0.3
    left = num % 7
    steps = [WEEK[(at + (-step if back else step)) % 7] for step in range(1, left + 1)]
    day = steps[-1] if steps else WEEK[at]
    word = "before" if back else "after"
    question = f"What day of the week is {num} {'day' if num == 1 else 'days'} {word} {WEEK[at]}?"
    if num == 1 and rng.random() < 0.5:
        question = f"Which day comes {word} {WEEK[at]}?"
    weeks = f"{num} days are {num // 7} {'week' if num < 14 else 'weeks'} and {left} {'day' if left == 1 else 'days'}. "
    thought = (weeks if num >= 7 else "") + ", ".join([WEEK[at], *steps]) + "."
    return question, thought, f"It is {day}.", {"kind": "contains", "value": day}


def _is_leap(year: int) -> tuple[bool, str]:
    if year % 4:
        return False, f"{year} is not divisible by 4."
    if year % 100:
        return True, f"{year} is divisible by 4 and not by 100."
    if year % 400:
        return False, f"{year} is divisible by 100 and not by 400."
    return True, f"{year} is divisible by 400."


def _leap(rng: random.Random, today: datetime.date) -> Made:
    year = rng.randrange(1900, 2101)
    leap, why = _is_leap(year)
    final = f"{'Yes' if leap else 'No'}, {year} is {'' if leap else 'not '}a leap year."
    question = rng.choice((f"Is {year} a leap year?", f"Was {year} a leap year?"))
    return question, why, final, {"kind": "contains", "value": f"{'Yes' if leap else 'No'},"}


def _month_days(rng: random.Random, today: datetime.date) -> Made:
    month, year = rng.randrange(1, 13), rng.randrange(2000, 2051)
    days = calendar.monthrange(year, month)[1]
    question = f"How many days does {MONTHS[month - 1]} {year} have?"
    thought = f"{MONTHS[month - 1]} has {days} days."
    if month == 2:
        leap, why = _is_leap(year)
        thought = f"{why} {'A' if leap else 'Not a'} leap year: {days} days."
    return question, thought, f"{MONTHS[month - 1]} {year} has {days} days.", {"kind": "number", "value": days}


def _next_month(rng: random.Random, today: datetime.date) -> Made:
    at, num = rng.randrange(12), rng.randint(1, 11)
    steps = [MONTHS[(at + step) % 12] for step in range(num + 1)]
    question = f"Which month is {num} {'month' if num == 1 else 'months'} after {MONTHS[at]}?"
    return question, ", ".join(steps) + ".", f"It is {steps[-1]}.", {"kind": "contains", "value": steps[-1]}


def _shift(rng: random.Random, today: datetime.date) -> Made:
    day, num = some_date(rng), rng.randint(1, 30)
    length = calendar.monthrange(day.year, day.month)[1]
    after = day + datetime.timedelta(days=num)
    month = MONTHS[day.month - 1]
    thought = f"{day.day} + {num} = {day.day + num}. {month} has {length} days. "
    if after.month == day.month:
        thought += f"Still {month}."
    else:
        thought += f"{day.day + num} - {length} = {after.day} in {MONTHS[after.month - 1]}."
    question = rng.choice((f"What date is {num} days after {written(day)}?", f"Add {num} days to {written(day)}."))
    return question, thought, f"It is {written(after)}.", {"kind": "contains", "value": written(after)}


def _order(rng: random.Random, today: datetime.date) -> Made:
    a = some_date(rng)
    b = a + datetime.timedelta(days=rng.choice((-1, 1)) * rng.randint(1, 900))
    first = min(a, b)
    thought = f"{a.isoformat()} and {b.isoformat()}: {first.isoformat()} is earlier."
    question = f"Which date is earlier, {written(a)} or {written(b)}?"
    return question, thought, f"{written(first)} is earlier.", {"kind": "contains", "value": written(first)}
