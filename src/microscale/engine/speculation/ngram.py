"""``ngram``: the last tokens of a request stood somewhere before, in its prompt or its output; what came next there is
the draft. Prompt lookup, as others say.

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

from microscale.engine.speculation.drafter import Context, Launched

HASHES = 1 << 14
"""Words of a request's table: 64 KB. More places than that share words, and a look-up then tries some in vain."""
MAX_TRIED = 32
"""Places that a look-up compares, the last ones first."""
NOWHERE = -1


class _Index:
    """Where the tokens of one request stood before."""

    def __init__(self, tokens: Sequence[int], least: int, most: int) -> None:
        """``tokens`` may grow; ``least`` and ``most`` tokens must, and may, match."""
        self._tokens = tokens
        self._least, self._most = least, most
        self._heads = array("i", (NOWHERE,)) * HASHES
        self._before = array("i")

    def grow(self) -> None:
        """Take in the tokens that are new."""
        tokens, heads, before, least = self._tokens, self._heads, self._before, self._least
        for place in range(len(before), len(tokens)):
            if place + 1 < least:
                before.append(NOWHERE)
                continue
            at = hash(tuple(tokens[place + 1 - least : place + 1])) % HASHES
            before.append(heads[at])
            heads[at] = place

    def find(self) -> int | None:
        """Where the last tokens ended before: the longest match, the last of those that are equally long."""
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
        """Tokens up to ``place`` that are the same as those up to ``end``."""
        tokens, most = self._tokens, min(self._most, place + 1)
        length = 0
        while length < most and tokens[place - length] == tokens[end - length]:
            length += 1
        return length

    def draft(self, most: int) -> list[int]:
        """What came next. A match that reaches the end goes round in a circle, and so does the draft."""
        place = self.find()
        if place is None:
            return []
        period = len(self._tokens) - 1 - place
        return [self._tokens[place + 1 + step % period] for step in range(most)]


class NgramDrafter:
    """Drafts from what each request has said or was given itself."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._indexes: dict[str, tuple[Sequence[int], _Index]] = {}

    def observe(self, step: Launched, most: int) -> None:
        """Prompts are taken in while they are computed."""
        for work in step.schedule:
            self._index(work.request.request_id, work.request.tokens).grow()

    def expects(self, context: Context) -> bool:
        return self._index(context.request.request_id, context.request.tokens).find() is not None

    def propose(self, contexts: Sequence[Context]) -> list[Sequence[int]]:
        return [self._index(c.request.request_id, c.request.tokens).draft(c.most) for c in contexts]

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)

    def _index(self, request_id: str, tokens: Sequence[int]) -> _Index:
        found = self._indexes.get(request_id)
        if found is None or found[0] is not tokens:
            found = self._indexes[request_id] = tokens, _Index(tokens, self._least, self._most)
        return found[1]
