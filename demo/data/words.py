"""Meanings, opposites, synonyms and kinds, from WordNet. The pairs of a wording and a word are held out."""

from __future__ import annotations

import random

from demo.data.base import Sample, article, by_effort, draw_split, simple
from demo.data.lexicon import ENTRIES, Entry

NAMES = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}
MEANING = ("What does {w} mean?", "What is the meaning of {w}?", "Define {w}.", "Explain the word {w}.",
           "What is meant by {w}?", "Give me a definition of {w}.", "meaning of {w}")  # fmt: skip
OPPOSITE = ("What is the opposite of {w}?", "Name the opposite of {w}.", "Which word is the opposite of {w}?",
            "Give me an antonym of {w}.", "opposite of {w}", "What's the opposite of {w}?")  # fmt: skip
SYNONYM = ("Give me a synonym for {w}.", "What is another word for {w}?", "Which word means the same as {w}?",
           "Name a synonym of {w}.")  # fmt: skip
KIND = ("What kind of thing is {a}?", "What sort of thing is {a}?", "{w}: what kind of thing is that?")
PART = ("Is {w} a noun, a verb or an adjective?", "What part of speech is {w}?", "Which part of speech is {w}?")
WITH = {MEANING: ENTRIES, OPPOSITE: tuple(e for e in ENTRIES if e.opposite),
        SYNONYM: tuple(e for e in ENTRIES if e.synonym),
        KIND: tuple(e for e in ENTRIES if e.kind), PART: ENTRIES}  # fmt: skip


def make(rng: random.Random, held_out: bool) -> Sample:
    kind = rng.choices(tuple(WITH), (5, 4, 2, 1, 1))[0]
    wording, entry = draw_split(
        lambda: (rng.choice(kind), rng.choice(WITH[kind])), lambda p: (p[0], p[1].word), held_out
    )
    word = rng.choice((entry.word, f'"{entry.word}"'))
    question = wording.format(w=word, a=article(entry.word))
    final, value, short = _answer(kind, entry)
    known = f"The word is {entry.word}, {article(NAMES[entry.pos])}."
    thought = lambda effort: by_effort(
        effort, short, f"{known} {short}", f"{known} {short} I will say it in one sentence."
    )
    return simple(rng, "words", question, thought, final, kind="contains", value=value)


def _answer(kind: tuple[str, ...], entry: Entry) -> tuple[str, str, str]:
    """The final answer, what it must contain, and the thought that leads there."""
    word = entry.word
    if kind is MEANING:
        means = f"To {word} means" if entry.pos == "verb" else f"{word.capitalize()} means"
        return f"{means}: {entry.definition}.", entry.definition, f"{word}: {entry.definition}."
    if kind is OPPOSITE:
        return f"The opposite of {word} is {entry.opposite}.", entry.opposite, f"{word} and {entry.opposite}."
    if kind is SYNONYM:
        return f"Another word for {word} is {entry.synonym}.", entry.synonym, f"{word} is like {entry.synonym}."
    if kind is KIND:
        kinds = article(entry.kind)
        return f"{article(word).capitalize()} is {kinds}.", kinds, f"{word}: a kind of {entry.kind}."
    name = NAMES[entry.pos]
    return f"The word {word} is {article(name)}.", name, f"{word}: {name}."
