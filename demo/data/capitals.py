"""Countries, capitals and continents. Facts cannot be held out; the pairs of a wording and a country are."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

from demo.data.base import Sample, by_effort, draw_split, simple


class Country(NamedTuple):
    name: str
    capital: str
    continent: str

    @property
    def subject(self) -> str:
        """The name as a sentence begins with it."""
        return self.name[0].upper() + self.name[1:]


def _read() -> tuple[Country, ...]:
    lines = (Path(__file__).parent / "countries.txt").read_text().splitlines()
    return tuple(Country(*line.split("; ")) for line in lines if not line.startswith("#"))


COUNTRIES = _read()
CAPITAL_OF = (
    "What is the capital of {c}?", "Name the capital of {c}.", "Which city is the capital of {c}?", "capital of {c}",
    "Tell me the capital of {c}.", "What's the capital of {c}?", "Do you know the capital of {c}?",
    "What is the capital city of {c}?", "{c}: capital?", "Which city is the capital city of {c}, please?",
    "I forgot the capital of {c}. What is it?", "Can you name the capital of {c}?",
)  # fmt: skip
COUNTRY_OF = (
    "{k} is the capital of which country?", "Which country has {k} as its capital?",
    "What country is {k} the capital of?",
    "Of which country is {k} the capital?", "Name the country whose capital is {k}.",
)  # fmt: skip
CONTINENT_OF = (
    "On which continent is {c}?", "Which continent is {c} on?", "What continent does {c} belong to?",
    "Where in the world is {c}?", "On what continent does {c} lie?",
)  # fmt: skip


def make(rng: random.Random, held_out: bool) -> Sample:
    kind = rng.choices((CAPITAL_OF, COUNTRY_OF, CONTINENT_OF), (6, 2, 2))[0]
    wording, country = draw_split(
        lambda: (rng.choice(kind), rng.choice(COUNTRIES)), lambda p: (p[0], p[1][0]), held_out
    )
    question = wording.format(c=country.name, k=country.capital)
    if wording.startswith("{c}"):
        question = question[0].upper() + question[1:]
    if kind is CAPITAL_OF:
        return _capital(rng, question, country)
    if kind is COUNTRY_OF:
        final = f"{country.capital} is the capital of {country.name}."
        low, more = f"{country.capital}: {country.name}.", f"The question is whose capital {country.capital} is."
        value = country.name
    else:
        final = f"{country.subject} is in {country.continent}."
        low, more = (
            f"{country.subject}: {country.continent}.",
            f"The question is about the continent of {country.name}.",
        )
        value = country.continent
    thought = lambda effort: by_effort(effort, low, f"{more} {low}", f"{more} I remember: {low} So that is the answer.")
    return simple(rng, "geography", question, thought, final, kind="contains", value=value)


def make_capital(rng: random.Random, held_out: bool) -> Sample:
    """Only capitals: the bar that the model must clear."""
    while True:
        sample = make(rng, held_out)
        if sample.task == "capitals":
            return sample


def _capital(rng: random.Random, question: str, country: Country) -> Sample:
    fact = f"{country.subject}: {country.capital}."
    asked = f"The question is about the capital of {country.name}."
    thought = lambda effort: by_effort(
        effort, fact, f"{asked} {fact}", f"{asked} {country.subject} is in {country.continent}. {fact} That is certain."
    )
    final = f"The capital of {country.name} is {country.capital}."
    return simple(rng, "capitals", question, thought, final, kind="contains", value=country.capital)
