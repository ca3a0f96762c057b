"""Values of parameters, by what a parameter is about: people, places, numbers, dates, codes, free words."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from demo.data.arithmetic import NAMES
from demo.data.base import some_date
from demo.data.capitals import COUNTRIES
from demo.data.lexicon import ADJECTIVES, NOUNS, WORDS
from demo.data.stories import PLACES
from demo.data.stories import THINGS as OBJECTS

SURNAMES = (
    "Berg", "Smith", "Miller", "Costa", "Novak", "Silva", "Weber", "Rossi", "Khan", "Lee", "Garcia", "Brown", "Dubois",
    "Larsen", "Okafor", "Tanaka", "Murphy", "Haas",
)  # fmt: skip
CITIES = (
    *(country.capital for country in COUNTRIES),
    "New York", "San Francisco", "Munich", "Hamburg", "Milan", "Barcelona", "Sydney", "Mumbai", "Toronto", "Chicago",
    "Boston", "Seattle", "Zurich", "Geneva", "Lyon", "Porto", "Osaka", "Shanghai", "Dubai", "Los Angeles",
)  # fmt: skip
LANGUAGES = (
    "English", "German", "French", "Spanish", "Italian", "Polish", "Dutch", "Greek", "Turkish", "Japanese", "Hindi",
)  # fmt: skip
CURRENCIES = ("USD", "EUR", "GBP", "JPY", "CHF", "CAD", "AUD", "SEK", "INR", "BRL")
CONSONANTS, VOWELS = "bcdfghklmnprstvwz", "aeiou"


def person(rng: random.Random) -> str:
    name = rng.choice(NAMES) if rng.random() < 0.7 else made_up(rng).capitalize()
    return f"{name} {rng.choice(SURNAMES)}" if rng.random() < 0.5 else name


def made_up(rng: random.Random) -> str:
    """A word that is none: what is copied must be copied letter by letter, or piece by piece."""
    return "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.randint(1, 3))) + rng.choice(
        CONSONANTS
    )


def city(rng: random.Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.85 else made_up(rng).capitalize()


def phrase(rng: random.Random) -> str:
    kind = rng.randrange(5)
    if kind == 0:
        return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    if kind == 1:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(2, 4)))
    if kind == 2:
        return f"{rng.choice(OBJECTS)} in the {rng.choice(PLACES)}"
    if kind == 3:
        return f"{made_up(rng)} {rng.choice(NOUNS)}"
    return rng.choice(NOUNS)


def code(rng: random.Random) -> str:
    letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(rng.randint(1, 3)))
    return f"{letters}{rng.choice(('-', '', '-'))}{rng.randrange(10, 10 ** rng.randint(2, 5))}"


def clock(rng: random.Random) -> str:
    return f"{rng.randrange(24):02d}:{rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02d}"


def email(rng: random.Random) -> str:
    host = rng.choice(("example.com", "mail.org", "post.net", f"{made_up(rng)}.com"))
    return f"{rng.choice((*NAMES, made_up(rng))).lower()}@{host}"


def integer(rng: random.Random) -> int:
    return rng.randrange(1, 10 ** rng.randint(1, 4))


def decimal(rng: random.Random) -> float:
    return rng.choice((float(rng.randrange(1, 500)) + 0.5, rng.randrange(1, 1000) / 10, rng.randrange(1, 10000) / 100))


Made = Callable[[random.Random], Any]
STRINGS: dict[str, Made] = {
    "city": city, "place": city, "location": city, "destination": city, "origin": city, "town": city,
    "name": person, "person": person, "customer": person, "recipient": person, "author": person, "guest": person,
    "owner": person, "contact": person, "employee": person, "patient": person, "player": person, "artist": person,
    "date": lambda rng: some_date(rng).isoformat(), "day": lambda rng: some_date(rng).isoformat(),
    "deadline": lambda rng: some_date(rng).isoformat(), "start": lambda rng: some_date(rng).isoformat(),
    "time": clock, "hour": clock, "alarm": clock,
    "email": email, "address": email, "sender": email,
    "code": code, "identifier": code, "number": code, "ticket": code, "order": code, "symbol": code, "reference": code,
    "title": phrase, "text": phrase, "query": phrase, "topic": phrase, "subject": phrase, "message": phrase,
    "note": phrase,
    "reason": phrase, "comment": phrase, "label": phrase, "item": phrase, "product": phrase, "song": phrase,
    "file": phrase,
    "language": lambda rng: rng.choice(LANGUAGES), "currency": lambda rng: rng.choice(CURRENCIES),
    "room": lambda rng: rng.choice(("kitchen", "bedroom", "garage", "office", "hall", "bathroom", "living room")),
    "country": lambda rng: rng.choice(COUNTRIES).name.removeprefix("the "),
    "word": lambda rng: rng.choice(WORDS), "tag": lambda rng: rng.choice(NOUNS), "key": made_up,
}  # fmt: skip
INTEGERS = (
    "amount", "count", "quantity", "limit", "size", "age", "year", "duration", "minutes", "hours", "days", "pages",
    "guests", "level", "priority", "volume", "seats", "points", "width", "height", "retries", "index", "page",
)  # fmt: skip
DECIMALS = (
    "price", "weight", "temperature", "rate", "distance", "speed", "budget", "radius", "score", "ratio", "latitude",
)  # fmt: skip
FLAGS = (
    "urgent", "public", "verbose", "notify", "recursive", "enabled", "draft", "archived", "silent", "strict", "repeat",
)  # fmt: skip
ENUMS: dict[str, tuple[str, ...]] = {
    "unit": ("celsius", "fahrenheit"), "color": ("red", "green", "blue", "yellow", "black", "white"),
    "mode": ("fast", "slow", "normal", "automatic"), "status": ("open", "closed", "pending"),
    "format": ("short", "long", "full"),
    "category": ("food", "travel", "work", "health", "sport"), "class": ("first", "second", "economy", "business"),
    "direction": ("north", "south", "east", "west"), "kind": ("basic", "standard", "premium"), "state": ("on", "off"),
    "shape": ("round", "square", "flat"), "season": ("spring", "summer", "autumn", "winter"),
    "meal": ("breakfast", "lunch", "dinner"),
    "channel": ("phone", "letter", "chat"), "quality": ("low", "medium", "high"), "sort": ("ascending", "descending"),
}  # fmt: skip
