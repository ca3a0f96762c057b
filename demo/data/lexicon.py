"""The words taken from WordNet: see ``WORDNET_LICENSE`` and ``select_wordnet``."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Entry(NamedTuple):
    word: str
    pos: str
    definition: str
    synonym: str
    opposite: str
    kind: str


def _read() -> tuple[Entry, ...]:
    lines = (Path(__file__).parent / "wordnet.txt").read_text().splitlines()
    return tuple(Entry(*line.split("|")) for line in lines if not line.startswith("#"))


ENTRIES = _read()
WORDS = tuple(entry.word for entry in ENTRIES)
NOUNS = tuple(entry.word for entry in ENTRIES if entry.pos == "noun")
VERBS = tuple(entry.word for entry in ENTRIES if entry.pos == "verb")
ADJECTIVES = tuple(entry.word for entry in ENTRIES if entry.pos == "adj")
