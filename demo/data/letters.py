"""Tasks on letters: the word is spelt out first, since a token hides its letters."""

from __future__ import annotations

import random

from demo.data.base import Sample, draw_split, simple
from demo.data.lexicon import WORDS

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def make(rng: random.Random, held_out: bool) -> Sample:
    kind = rng.choice((_spell, _reverse, _count, _count, _length, _nth, _nth, _vowels, _upper, _contains))
    word = draw_split(lambda: _word(rng), lambda w: (kind.__name__, w), held_out)
    return kind(rng, word)


def _word(rng: random.Random) -> str:
    if rng.random() < 0.15:
        # No word at all, so that spelling is learnt and not the words.
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 7)))
    return rng.choice(WORDS)


def spelt(word: str) -> str:
    return " ".join(word)


def _quoted(rng: random.Random, word: str) -> str:
    return rng.choice((f'"{word}"', word, f"'{word}'"))


def _spell(rng: random.Random, word: str) -> Sample:
    q = _quoted(rng, word)
    question = rng.choice((f"Spell {q}.", f"How do you spell {q}?", f"Spell the word {q} letter by letter."))
    answer = "-".join(word)
    return simple(rng, "letters", question, f"{word}: {spelt(word)}.", f"{answer}", kind="contains", value=answer)


def _reverse(rng: random.Random, word: str) -> Sample:
    q = _quoted(rng, word)
    question = rng.choice((f"Reverse the word {q}.", f"Write {q} backwards.", f"What is {q} spelt backwards?"))
    thought = f"{word}: {spelt(word)}. Backwards: {spelt(word[::-1])}."
    return simple(rng, "letters", question, thought, word[::-1], kind="contains", value=word[::-1])


def _count(rng: random.Random, word: str) -> Sample:
    q = _quoted(rng, word)
    letter = rng.choice(word) if rng.random() < 0.85 else rng.choice("aeioulnrst")
    question = rng.choice((f"How many times does the letter {letter} occur in {q}?", f"How many {letter}'s are in {q}?",
                           f"Count the letter {letter} in {q}.",
                           f"How many {letter} are in the word {q}?"))  # fmt: skip
    steps, seen = [], 0
    for at in word:
        seen += at == letter
        steps.append(f"{at} {seen}")
    final = f"The letter {letter} occurs {seen} {'time' if seen == 1 else 'times'} in {word}."
    return simple(rng, "letters", question, f"{word}: {', '.join(steps)}.", final, kind="number", value=seen)


def _length(rng: random.Random, word: str) -> Sample:
    q = _quoted(rng, word)
    question = rng.choice(
        (f"How many letters does {q} have?", f"How long is the word {q}?", f"Count the letters of {q}.")
    )
    thought = f"{word}: {', '.join(f'{letter} {at}' for at, letter in enumerate(word, 1))}."
    final = f"{word} has {len(word)} letters."
    return simple(rng, "letters", question, thought, final, kind="number", value=len(word))


def _nth(rng: random.Random, word: str) -> Sample:
    q = _quoted(rng, word)
    at = rng.randrange(min(len(word), len(ORDINALS)))
    name, letter = ORDINALS[at], word[at]
    if rng.random() < 0.25:
        name, letter = "last", word[-1]
    question = rng.choice((f"What is the {name} letter of {q}?", f"Which letter comes {name} in {q}?"))
    thought = f"{word}: {', '.join(f'{at} {letter}' for at, letter in enumerate(word, 1))}. The {name} is {letter}."
    final = f"The {name} letter is {letter}."
    return simple(rng, "letters", question, thought, final, kind="contains", value=f"is {letter}")


def _vowels(rng: random.Random, word: str) -> Sample:
    q = _quoted(rng, word)
    steps, seen = [], 0
    for letter in word:
        seen += letter in "aeiou"
        steps.append(f"{letter} {seen}")
    question = rng.choice((f"How many vowels are in {q}?", f"Count the vowels of {q}."))
    final = f"{word} has {seen} {'vowel' if seen == 1 else 'vowels'}."
    return simple(rng, "letters", question, f"{word}: {', '.join(steps)}.", final, kind="number", value=seen)


def _upper(rng: random.Random, word: str) -> Sample:
    q = _quoted(rng, word)
    question = rng.choice((f"Write {q} in capital letters.", f"Turn {q} into upper case."))
    thought = f"{word}: {spelt(word)}. {spelt(word.upper())}."
    return simple(rng, "letters", question, thought, word.upper(), kind="contains", value=word.upper())


def _contains(rng: random.Random, word: str) -> Sample:
    q = _quoted(rng, word)
    letter = rng.choice(word) if rng.random() < 0.5 else rng.choice("abcdefghijklmnopqrstuvwxyz")
    answer = "Yes" if letter in word else "No"
    thought = f"{word}: {spelt(word)}. {letter}: {answer.lower()}."
    final = f"{answer}, {word} {'contains' if answer == 'Yes' else 'does not contain'} the letter {letter}."
    question = f"Does {q} contain the letter {letter}?"
    return simple(rng, "letters", question, thought, final, kind="contains", value=f"{answer},")
