"""Functions that everybody tries first, with everyday wordings: weather, mail, alarms, sums."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from demo.data import values
from demo.data.base import draw_split
from demo.data.lexicon import NOUNS
from microscale.text.conversation import Tool

STRING, NUMBER, INTEGER = {"type": "string"}, {"type": "number"}, {"type": "integer"}


@dataclass(frozen=True)
class Known:
    names: tuple[str, ...]
    description: str
    properties: Mapping[str, Any]
    required: tuple[str, ...]
    wordings: tuple[str, ...]
    """With the parameters that they give in braces."""


UNIT = {"type": "string", "enum": ["celsius", "fahrenheit"]}
KNOWN = (
    Known(("get_weather", "get_current_weather", "weather"), "Get the current weather in a given location.",
          {"location": {"type": "string", "description": "The city."}, "unit": UNIT}, ("location",),
          ("What is the weather in {location}?", "How is the weather in {location} today?",
           "Is it raining in {location}?",
           "What's the weather like in {location}?", "Tell me the weather in {location} in {unit}.",
           "How warm is it in {location}, in {unit}?", "Weather for {location}, please.")),
    Known(("get_weather", "weather_report", "forecast"), "The weather of a city.", {"city": STRING}, ("city",),
          ("What is the weather in {city}?", "How is the weather in {city}?", "Do I need an umbrella in {city}?",
           "What is the temperature in {city}?", "Will it be sunny in {city}?")),
    Known(("get_time", "current_time", "clock"), "The current time in a city.", {"city": STRING}, ("city",),
          ("What time is it in {city}?", "Tell me the time in {city}.", "How late is it in {city}?")),
    Known(("send_email", "send_mail"), "Send an e-mail.", {"to": STRING, "subject": STRING, "body": STRING},
          ("to", "subject"),
          ("Send an email to {to} with the subject {subject}.", "Write to {to}, subject {subject}, saying {body}.",
           "Email {to} about {subject}.")),
    Known(("set_alarm", "create_alarm"), "Set an alarm.", {"time": STRING, "label": STRING}, ("time",),
          ("Wake me at {time}.", "Set an alarm for {time}.", "Set an alarm for {time} called {label}.")),
    Known(("set_timer", "start_timer"), "Start a timer.", {"minutes": INTEGER}, ("minutes",),
          ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.",
           "Remind me in {minutes} minutes.")),
    Known(("search", "web_search", "search_web"), "Search the web.", {"query": STRING}, ("query",),
          ("Search the web for {query}.", "Look up {query}.", "Find something about {query}.", "Google {query}.")),
    Known(("calculator", "calculate", "compute"), "Evaluate an arithmetic expression.", {"expression": STRING},
          ("expression",),
          ("Use the calculator for {expression}.", "Calculate {expression} with the tool.",
           "Compute {expression} exactly.")),
    Known(("convert_currency", "exchange"), "Convert an amount of money.",
          {"amount": NUMBER, "from_currency": STRING, "to_currency": STRING},
          ("amount", "from_currency", "to_currency"),
          ("Convert {amount} {from_currency} to {to_currency}.",
           "How much is {amount} {from_currency} in {to_currency}?")),
    Known(("translate", "translate_text"), "Translate text.", {"text": STRING, "language": STRING},
          ("text", "language"),
          ("Translate {text} into {language}.", "How do you say {text} in {language}?", "Say {text} in {language}.")),
    Known(("add_event", "create_event"), "Add an event to the calendar.",
          {"title": STRING, "date": STRING, "time": STRING},
          ("title", "date"), ("Put {title} in my calendar on {date}.", "Add {title} on {date} at {time}.",
                              "I have {title} on {date} at {time}.")),
    Known(("get_stock_price", "stock_price"), "The price of a stock.", {"symbol": STRING}, ("symbol",),
          ("What is the price of {symbol}?", "How is {symbol} doing?", "Get the stock price of {symbol}.")),
    Known(("turn_on_light", "light_on"), "Turn on the light in a room.", {"room": STRING}, ("room",),
          ("Turn on the light in the {room}.", "It is dark in the {room}.", "Light in the {room}, please.")),
    Known(("add_todo", "create_task"), "Add an item to the list of things to do.", {"item": STRING}, ("item",),
          ("Add {item} to my list.", "Remind me to bring the {item}.", "Put {item} on my list.")),
    Known(("book_flight", "find_flight"), "Find a flight.", {"origin": STRING, "destination": STRING, "date": STRING},
          ("origin", "destination"), ("Book a flight from {origin} to {destination}.",
                                      "I want to fly from {origin} to {destination} on {date}.",
                                      "Find a flight from {origin} to {destination} on {date}.")),
    Known(("play_music", "play_song"), "Play music.", {"song": STRING}, ("song",),
          ("Play {song}.", "I want to hear {song}.")),
    Known(("roll_dice", "roll"), "Roll dice.", {"sides": INTEGER, "count": INTEGER}, ("sides",),
          ("Roll a die with {sides} sides.", "Roll {count} dice with {sides} sides.")),
)  # fmt: skip
CITY = ("location", "city", "origin", "destination")


def known(rng: random.Random, held_out: bool) -> tuple[Tool, str, dict[str, Any]]:
    """A function, a request, and the arguments of the call that it asks for."""
    entry, wording, name = draw_split(lambda: _drawn(rng), lambda p: (p[1], p[2]), held_out)
    given = {key: _value(rng, key, spec) for key, spec in entry.properties.items() if f"{{{key}}}" in wording}
    schema = {"type": "object", "properties": dict(entry.properties), "required": list(entry.required)}
    return Tool(name, entry.description if rng.random() < 0.9 else "", schema), wording.format(**given), given


def _drawn(rng: random.Random) -> tuple[Known, str, str]:
    entry = rng.choice(KNOWN)
    return entry, rng.choice(entry.wordings), rng.choice(entry.names)


def _value(rng: random.Random, key: str, spec: Mapping[str, Any]) -> Any:
    if "enum" in spec:
        return rng.choice(spec["enum"])
    if spec["type"] in ("number", "integer"):
        return rng.randrange(1, rng.choice((12, 100, 1000)))
    if key in CITY:
        return values.city(rng)
    if key.endswith("currency"):
        return rng.choice(values.CURRENCIES)
    if key == "expression":
        return f"{rng.randrange(1000)} {rng.choice('+-*/')} {rng.randrange(1, 1000)}"
    if key == "to":
        return values.email(rng)
    if key == "symbol":
        return "".join(rng.choice("ABCDEFGHIKLMNOPRSTUVW") for _ in range(rng.randint(2, 5)))
    if key in ("title", "label"):
        return rng.choice(("lunch", "meeting", "dentist", "piano lesson", "football", "dinner", rng.choice(NOUNS)))
    return values.STRINGS.get(key, values.phrase)(rng)
