"""Conversations of several turns: the last one leans on what was said before."""

from __future__ import annotations

import random
from dataclasses import replace

from demo.data import arithmetic, capitals, letters, numbers, smalltalk, tools, units, values, words
from demo.data.arithmetic import Problem
from demo.data.base import Sample, assistant, by_effort, draw_split, some_date, some_effort, user
from demo.data.capitals import COUNTRIES
from microscale.text.conversation import Message

OTHERS = (arithmetic, capitals, letters, numbers, smalltalk, units, words)


def make(rng: random.Random, held_out: bool) -> Sample:
    return rng.choice((_after, _after, _capital, _sum, _name, _again, _tools_again))(rng, held_out)


def _past(rng: random.Random, turns: int) -> tuple[Message, ...]:
    """Turns that are over: a question and its answer, with no thought left."""
    past: list[Message] = []
    for _ in range(turns):
        sample = rng.choice(OTHERS).make(rng, False)
        past += [message for message in (*sample.history, *sample.turn) if message.role.value in ("user", "assistant")]
    return tuple(past)


def _after(rng: random.Random, held_out: bool) -> Sample:
    """Another matter: nothing of what came before is needed."""
    sample = rng.choice(OTHERS).make(rng, held_out)
    own = [message for message in sample.history if message.role.value == "developer"]
    rest = [message for message in sample.history if message.role.value != "developer"]
    return Sample(
        **{
            **vars(sample),
            "history": (*own, *_past(rng, rng.choice((1, 1, 2, 2, 3, 3, 6, 10))), *rest),
            "task": "follow-ups",
        }
    )


def _sample(
    rng: random.Random, history: tuple[Message, ...], thought: str, final: str, value: object, kind: str
) -> Sample:
    check = {"kind": kind, "value": value}
    return Sample("follow-ups", history, (assistant(final, thought),), check, effort=some_effort(rng),
                  date=some_date(rng).isoformat())  # fmt: skip


def _capital(rng: random.Random, held_out: bool) -> Sample:
    first, second = draw_split(lambda: tuple(rng.sample(COUNTRIES, 2)), lambda p: ("and", p[0][0], p[1][0]), held_out)
    before = (
        user(f"What is the capital of {first.name}?"),
        assistant(f"The capital of {first.name} is {first.capital}.", ""),
    )
    asked = rng.choice((f"And of {second.name}?", f"And {second.name}?", f"What about {second.name}?"))
    thought = f"The user wants the capital of {second.name}. {second.subject}: {second.capital}."
    final = f"The capital of {second.name} is {second.capital}."
    return _sample(rng, (*before, user(asked)), thought, final, second.capital, "contains")


def _sum(rng: random.Random, held_out: bool) -> Sample:
    """``And plus 7?`` goes on from the last result."""
    first, third = draw_split(
        lambda: (Problem("add", rng.randrange(500), rng.randrange(500)), rng.randrange(1, 100)), lambda p: p, held_out
    )
    total = first.result
    op = rng.choice(("add", "sub")) if total >= third else "add"
    problem = Problem(op, total, third)
    before = (user(f"What is {first.a} + {first.b}?"), assistant(f"{first.a} + {first.b} = {total}.", ""))
    word = "plus" if op == "add" else "minus"
    asked = rng.choice((f"And {word} {third}?", f"Now {word} {third}.", f"{word.capitalize()} {third}?"))
    effort = some_effort(rng)
    final = f"{total} {arithmetic.SIGNS[op]} {third} = {problem.result}."
    made = _sample(rng, (*before, user(asked)), arithmetic.work(problem, effort), final, problem.result, "number")
    return Sample(**{**vars(made), "effort": effort})


def _name(rng: random.Random, held_out: bool) -> Sample:
    name, begin = draw_split(
        lambda: (values.person(rng), rng.choice(("My name is", "I am", "Call me"))), lambda p: ("name", p), held_out
    )
    before = (user(f"{begin} {name}."), assistant(f"Hello {name}! How can I help you?", ""))
    past = _past(rng, rng.randint(0, 2))
    asked = rng.choice(("What is my name?", "Do you remember my name?", "Who am I?"))
    thought = f"The user said: {begin} {name}."
    return _sample(rng, (*before, *past, user(asked)), thought, f"Your name is {name}.", name, "contains")


def _again(rng: random.Random, held_out: bool) -> Sample:
    """The last answer once more."""
    past = draw_split(lambda: _past(rng, rng.randint(1, 2)), lambda p: p[-1].content, held_out)
    answer = past[-1].content
    asked = rng.choice(("Say that again, please.", "Can you repeat that?", "Pardon?", "Once more, please."))
    thought = by_effort(
        some_effort(rng), "I repeat.", "The user wants my last answer again.", "I repeat my last answer."
    )
    return _sample(rng, (*past, user(asked)), thought, answer, answer, "contains")


def _tools_again(rng: random.Random, held_out: bool) -> Sample:
    """A second call, or a question, after a first call that is over."""
    first = tools.make_call(rng, False)
    second = tools.make_call(rng, held_out) if rng.random() < 0.6 else rng.choice(OTHERS).make(rng, held_out)
    offered = {tool.name: tool for tool in (*first.tools, *second.tools)}
    # The thoughts of a turn that has its final answer are gone.
    over = tuple(Message(**{**vars(message), "reasoning": ""}) for message in first.turn)
    calls = [message for message in first.history if message.role.value == "user"]
    asked = [message for message in second.history if message.role.value == "user"]
    history = (*calls, *over, *asked)
    return replace(second, task="follow-ups", history=history, tools=tuple(offered.values()))
