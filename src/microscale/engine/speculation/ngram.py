"""``ngram``, also called prompt lookup: if the last tokens of a request occurred before in its prompt or output, what
came next there is the draft.

Each request has an index like that of a Lempel-Ziv compressor. ``_heads`` maps a hash of n tokens (the fewest that
must match) to the place where they ended last, and ``_before`` each place to the one before it with the same hash. A
token costs one entry, and a look-up at most ``MAX_TRIED`` comparisons, however long the text is:

    tokens    the cat sat on the mat and the cat | sat on the …
                    └──────── before ────────┘ ▲
                    1                        8   heads[hash("the cat")] = 8

Memory: 4 bytes a token, and ``HASHES`` words a request.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from microscale.engine.speculation.drafter import Context, LaunchedStep

HASHES = 1 << 14
"""Entries of a request's table: 64 KB. In longer texts places share entries, and a look-up tries some in vain."""
MAX_TRIED = 32
"""Maximum number of places that a look-up compares, the last ones first."""
NOWHERE = -1


class _Index:
    """Where the tokens of one request occurred before."""

    def __init__(self, tokens: Sequence[int], least: int, most: int) -> None:
        """``tokens`` may grow. At least ``least`` and at most ``most`` tokens match."""
        self._tokens = tokens
        self._least, self._most = least, most
        self._heads = array("i", (NOWHERE,)) * HASHES
        self._before = array("i")

    def grow(self) -> None:
        """Add the new tokens."""
        tokens, heads, before, least = self._tokens, self._heads, self._before, self._least
        for place in range(len(before), len(tokens)):
            if place + 1 < least:
                before.append(NOWHERE)
                continue
            at = hash(tuple(tokens[place + 1 - least : place + 1])) % HASHES
            before.append(heads[at])
            heads[at] = place

    def find(self) -> int | None:
        """Where the last tokens ended before: the longest match, and of several the last."""
        self.grow()
        end = len(self._tokens) - 1
        best, longest = None, self._least - 1
        place = self._before[end] if end >= 0 else NOWHERE
        for _ in range(MAX_TRIED):
            if place == NOWHERE or longest == self._most:
                break
            length = self._match(place, end)
            if length > longest:
                best, longest = place, length
            place = self._before[place]
        return best

    def _match(self, place: int, end: int) -> int:
        """The number of tokens up to ``place`` that equal those up to ``end``."""
        tokens, most = self._tokens, min(self._most, place + 1)
        length = 0
        while length < most and tokens[place - length] == tokens[end - length]:
            length += 1
        return length

    def draft(self, most: int) -> list[int]:
        """What came next. Where the match reaches the end of the text, the draft repeats it."""
        place = self.find()
        if place is None:
            return []
        period = len(self._tokens) - 1 - place
        return [self._tokens[place + 1 + step % period] for step in range(most)]


class NgramDrafter:
    """Drafts from each request's own text."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._indexes: dict[str, tuple[Sequence[int], _Index]] = {}

    def observe(self, step: LaunchedStep, most: int) -> None:
        """Add prompts while the device computes them."""
        for work in step.schedule:
            self._index(work.request.request_id, work.request.tokens).grow()

    def expects(self, context: Context) -> bool:
        return self._index(context.request.request_id, context.request.tokens).find() is not None

    def propose(self, contexts: Sequence[Context]) -> list[Sequence[int]]:
        return [self._index(c.request.request_id, c.request.tokens).draft(c.most) for c in contexts]

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)

    def _index(self, request_id: str, tokens: Sequence[int]) -> _Index:
        entry = self._indexes.get(request_id)
        if entry is None or entry[0] is not tokens:
            entry = self._indexes[request_id] = tokens, _Index(tokens, self._least, self._most)
        return entry[1]
