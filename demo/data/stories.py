"""Small stories from a grammar, about what the user names."""

from __future__ import annotations

import random

from demo.data.base import Sample, article, draw_split, simple

HEROES = {"fox": "it", "girl": "she", "boy": "he", "bear": "it", "robot": "it", "cat": "it", "dog": "it",
          "queen": "she",
          "farmer": "he", "mouse": "it", "owl": "it", "sailor": "he", "baker": "she", "rabbit": "it", "dragon": "it",
          "gardener": "she", "duck": "it", "king": "he", "painter": "she", "frog": "it"}  # fmt: skip
ITS = {"it": "its", "she": "her", "he": "his"}
TRAITS = ("little", "brave", "clever", "old", "kind", "shy", "hungry", "quiet", "curious", "young")
PLACES = (
    "forest", "village", "garden", "harbour", "mountain", "castle", "river", "desert", "city", "island", "library",
)  # fmt: skip
THINGS = (
    "lantern", "key", "map", "bell", "kite", "boat", "book", "ring", "drum", "letter", "cake", "mirror", "star", "hat",
)  # fmt: skip
WEATHER = ("The sun was shining.", "It was a windy day.", "It had rained all night.", "Snow lay on the ground.",
           "The morning was quiet.", "The moon was bright.")  # fmt: skip
TROUBLES = (
    "One day the {t} was gone.", "Then a storm came and took the {t} away.", "But the {t} was broken.",
    "A crow stole the {t}.", "Nobody knew what the {t} was for.",
)  # fmt: skip
SEARCH = (
    "{S} looked behind every tree and under every stone.", "{S} asked {f} for help.", "{S} thought about it all day.",
    "{S} walked until {p} feet were tired.", "{S} did not give up.",
)  # fmt: skip
FRIENDS = ("a friendly mouse", "the wise owl", "a passing sailor", "the old baker", "a small bird", "the boy next door")
ENDS = (
    "In the end {s} found it beside the {l}, and everyone was glad.",
    "At last {s} mended it, and it was better than before.",
    "{S} got it back, and they laughed about it together.", "That evening {s} put it in a safe place and slept well.",
)  # fmt: skip
ASKED = ("Tell me a short story about {h}.", "Write a small story about {h} and {t}.",
         "Tell me a story with {h} in it.",
         "I would like a story about {h} and {t}.", "Can you tell a short story about {h}?")  # fmt: skip


def make(rng: random.Random, held_out: bool) -> Sample:
    def draw() -> tuple[str, str, str]:
        return rng.choice(ASKED), rng.choice(tuple(HEROES)), rng.choice(THINGS)

    wording, hero, thing = draw_split(draw, lambda p: p if "{t}" in p[0] else p[:2], held_out)
    question = wording.format(h=article(hero), t=article(thing))
    thought = f"A short story: {hero}, {thing}. Beginning, trouble, end."
    return simple(rng, "stories", question, thought, tell(rng, hero, thing), kind="contains", value=hero)


def tell(rng: random.Random, hero: str, thing: str) -> str:
    trait, place = rng.choice(TRAITS), rng.choice(PLACES)
    words = {"s": HEROES[hero], "S": HEROES[hero].capitalize(), "p": ITS[HEROES[hero]], "t": thing, "l": place,
             "f": rng.choice([friend for friend in FRIENDS if hero not in friend])}  # fmt: skip
    middle = rng.sample(SEARCH, 2)
    sentences = (
        f"Once there was {article(trait)} {hero} who lived near the {place}.",
        rng.choice(WEATHER),
        f"The {hero} had {article(thing)} and loved it very much.",
        rng.choice(TROUBLES),
        *middle,
        rng.choice(ENDS),
    )
    return " ".join(sentence.format(**words) for sentence in sentences)
