"""Takes the commonest words of WordNet 3.0, with definition, synonym, opposite and kind: writes ``wordnet.txt``.

    python -m demo.data.select_wordnet /usr/share/wordnet

The folder is that of Debian's package wordnet-base. The result is kept in the repository, so that the data can be made
without WordNet.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

NUM_WORDS = 1500
MAX_DEFINITION = 64
POS = {"1": "noun", "2": "verb", "3": "adj", "4": "adv", "5": "adj"}
# Not for a first acquaintance.
LEFT_OUT = re.compile(
    r"\b(sex|kill|murder|nazi|negro|race|rape|drug|god|christ|penis|slave|jew|ethnic|suicide|whore)", re.I
)


class Synset(NamedTuple):
    words: list[str]
    pointers: list[tuple[str, ...]]
    """Symbol, offset, part of speech, source and target."""
    definition: str


def main(folder: Path) -> None:
    synsets = {pos: dict(_synsets(folder / f"data.{pos}")) for pos in ("noun", "verb", "adj", "adv")}
    rows: dict[str, str] = {}
    for _, lemma, pos in sorted(_counted(folder), key=lambda entry: (-entry[0], entry[1:])):
        offset = _first_sense(folder, pos).get(lemma)
        if offset is None or lemma in rows:
            continue
        row = _row(lemma, pos, synsets[pos][offset], synsets)
        if row is not None:
            rows[lemma] = row
        if len(rows) == NUM_WORDS:
            break
    lines = [rows[lemma] for lemma in sorted(rows)]
    head = "# word|part of speech|definition|synonym|opposite|kind. From WordNet 3.0: see WORDNET_LICENSE."
    (Path(__file__).parent / "wordnet.txt").write_text("\n".join([head, *lines]) + "\n")


def _counted(folder: Path) -> Iterator[tuple[int, str, str]]:
    """How often each word was seen in its first sense."""
    for line in (folder / "cntlist.rev").read_text().splitlines():
        key, sense, count = line.split()
        lemma, _, rest = key.partition("%")
        if sense == "1" and re.fullmatch("[a-z]{3,11}", lemma):
            yield int(count), lemma, POS[rest[0]]


_INDEX: dict[str, dict[str, str]] = {}


def _first_sense(folder: Path, pos: str) -> dict[str, str]:
    if pos not in _INDEX:
        lines = (folder / f"index.{pos}").read_text().splitlines()
        entries = [line.split() for line in lines if not line.startswith("  ")]
        _INDEX[pos] = {entry[0]: entry[6 + int(entry[3])] for entry in entries}
    return _INDEX[pos]


def _synsets(path: Path) -> Iterator[tuple[str, Synset]]:
    for line in path.read_text().splitlines():
        if line.startswith("  "):
            continue
        data, _, gloss = line.partition("|")
        parts = data.split()
        num_words = int(parts[3], 16)
        words = [re.sub(r"\(.*\)", "", word) for word in parts[4 : 4 + 2 * num_words : 2]]
        at = 4 + 2 * num_words
        fields = parts[at + 1 : at + 1 + 4 * int(parts[at])]
        pointers = [tuple(fields[i : i + 4]) for i in range(0, len(fields), 4)]
        yield parts[0], Synset(words, pointers, gloss.strip())


def _row(lemma: str, pos: str, synset: Synset, synsets: dict[str, dict[str, Synset]]) -> str | None:
    definition = re.sub(r"^\([^)]*\)\s*", "", synset.definition.split(";")[0].strip())
    if lemma not in synset.words:  # a proper name: Mexican, July
        return None
    if not 8 <= len(definition) <= MAX_DEFINITION or LEFT_OUT.search(lemma + " " + definition):
        return None
    if not re.fullmatch(r"[A-Za-z0-9 ,'()-]+", definition) or re.search(rf"\b{lemma}\b", definition):
        return None
    plain = re.compile("[a-z]{3,12}")
    synonym = next((word for word in synset.words if word != lemma and plain.fullmatch(word)), "")
    opposite = kind = ""
    for symbol, offset, other, ends in synset.pointers:
        letter = {"n": "noun", "v": "verb", "a": "adj", "s": "adj", "r": "adv"}[other]
        target = synsets[letter][offset]
        number = synset.words.index(lemma) + 1
        if symbol == "!" and int(ends[:2], 16) == number and not opposite:
            word = target.words[int(ends[2:], 16) - 1]
            opposite = word if plain.fullmatch(word) else ""
        if symbol == "@" and pos == "noun" and not kind and plain.fullmatch(target.words[0]):
            kind = target.words[0]
    return "|".join((lemma, pos, definition, synonym, opposite, kind))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
