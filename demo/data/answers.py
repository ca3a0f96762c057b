"""Answers in JSON: a schema is given, and the values stand in the user's text or are known. Schemas are held out.

The schema stands in the developer message, as the server has it rendered; or its keys are named by the user.
"""

from __future__ import annotations

import random
from typing import Any

from demo.data.arithmetic import Problem, work
from demo.data.base import Sample, assistant, developer, draw_split, listed, some_date, some_effort, user
from demo.data.capitals import COUNTRIES
from demo.data.lexicon import NOUNS
from demo.data.schema import Parameter, arguments_json, parameter_schema
from demo.data.tools import OBJECTS, draw_parameter, mention, value_of
from microscale.text.conversation import Message, ResponseFormat

INSTRUCTIONS = ("Answer in JSON.", "You are a helpful assistant.", "Extract the data.", "Be exact.")


def make(rng: random.Random, held_out: bool) -> Sample:
    return (_known if rng.random() < 0.15 else _extracted)(rng, held_out)


def _extracted(rng: random.Random, held_out: bool) -> Sample:
    """All values are in the user's text."""
    name, parameters = draw_split(lambda: _draw(rng), lambda d: (d[0], [p.name for p in d[1]]), held_out)
    values = {parameter.name: value_of(rng, parameter) for parameter in parameters}
    said = [mention(rng, parameter, values[parameter.name]) for parameter in parameters]
    rng.shuffle(said)
    words = name.replace("_", " ")
    text = rng.choice(
        (
            f"Give me the {words}: {', '.join(said)}.",
            f"A {words} with {listed(said)}.",
            f"{words.capitalize()}: {', '.join(said)}",
            f"The {words} has {listed(said)}.",
        )
    )
    schema = _schema(rng, words, parameters)
    thought = rng.choice(("JSON.", f"The answer is JSON with {listed(list(values))}."))
    if rng.random() < 0.2:
        keys = listed([parameter.name for parameter in parameters])
        text = f"{text.rstrip('.')}. Answer as JSON with the keys {keys}."
        return _sample(rng, text, thought, values, schema, None)
    return _sample(rng, text, thought, values, schema, name)


def _known(rng: random.Random, held_out: bool) -> Sample:
    """The values are what the model knows or works out."""
    if rng.random() < 0.4:
        problem = draw_split(
            lambda: Problem(rng.choice(("add", "sub")), rng.randrange(500, 1000), rng.randrange(500)),
            lambda p: p,
            held_out,
        )
        key = rng.choice(("result", "sum", "answer", "value"))
        sign = "+" if problem.op == "add" else "-"
        text = rng.choice(("What is {q}?", "{q}", "Calculate {q}.")).format(q=f"{problem.a} {sign} {problem.b}")
        fields = [Parameter(key, "integer", key, "", True, ())]
        effort = some_effort(rng)
        sample = _sample(rng, text, work(problem, effort), {key: problem.result}, _schema(rng, key, fields), key)
        return Sample(**{**vars(sample), "effort": effort})
    country, keys = draw_split(
        lambda: (rng.choice(COUNTRIES), rng.sample(("country", "capital", "continent"), rng.randint(1, 3))),
        lambda p: ("json", p[0].name, p[1]),
        held_out,
    )
    facts = {"country": country.name.removeprefix("the "), "capital": country.capital, "continent": country.continent}
    text = rng.choice(
        (f"What is the capital of {country.name}?", f"Tell me about {country.name}.", f"{country.subject}")
    )
    fields = [Parameter(key, "string", key, "", True, ()) for key in keys]
    thought = f"{country.subject}: {country.capital}, {country.continent}."
    values = {key: facts[key] for key in keys}
    return _sample(
        rng, text, thought, values, _schema(rng, "country", fields), rng.choice(("country", "place", "facts"))
    )


def _schema(rng: random.Random, words: str, parameters: list[Parameter]) -> dict[str, Any]:
    schema: dict[str, Any] = parameter_schema(parameters)
    if rng.random() < 0.6:
        schema["additionalProperties"] = False
    if rng.random() < 0.2:
        schema = {"title": words.title().replace(" ", ""), **schema}
    return schema


def _sample(
    rng: random.Random, text: str, thought: str, values: dict[str, Any], schema: dict[str, Any], name: str | None
) -> Sample:
    """``name`` is the response format's; without one the user has said what is wanted."""
    told = None if name is None else ResponseFormat(name, "" if rng.random() < 0.8 else f"The {name}.", schema)
    history: tuple[Message, ...] = (user(text),)
    if rng.random() < 0.4:
        history = (developer(rng.choice(INSTRUCTIONS)), *history)
    return Sample(
        "json",
        history,
        (assistant(arguments_json(values), thought),),
        {"kind": "json", "schema": schema, "value": values},
        response_format=told,
        effort=some_effort(rng),
        date=some_date(rng).isoformat(),
    )


def _draw(rng: random.Random) -> tuple[str, list[Parameter]]:
    name = rng.choice(OBJECTS) if rng.random() < 0.6 else f"{rng.choice(NOUNS)}_{rng.choice(OBJECTS)}"
    picked: dict[str, Parameter] = {}
    for _ in range(rng.randint(1, 5)):
        parameter = draw_parameter(rng)
        picked[parameter.name] = Parameter(**{**vars(parameter), "required": True})
    return name, list(picked.values())
