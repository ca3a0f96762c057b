"""What a prompt shares with what is in the cache already: keys of pages, and how far a hit reaches.

The key of a page is a hash of its tokens and of the key before it, so it stands for everything from the first token on;
the chain begins with the tenant's salt, and tenants with different salts share nothing.

A hit of n pages needs the full layers' pages 0 to n - 1 and, of the sliding layers', only those that the window of the
next token still sees. So one prompt can have a longer hit than what is left of its sliding pages suggests, and a full
page without its window is no hit at its end: the longest n for which both are there is taken.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from microscale.engine.step.pages import Key, PagePool

HASH_BYTES = 16
"""128 bits: among 2**40 pages two collide by chance once in 2**49 tries. Keys are not secret, salts are."""


@dataclass
class PageKeys:
    """The keys of one request's full pages, made as its tokens come. ``salt`` keeps tenants apart."""

    page_size: int
    salt: str = ""
    lookahead: int = 0
    """Tokens after a page that its key covers (``Limits.key_lookahead``)."""
    _keys: list[Key] = field(default_factory=list)

    def of(self, tokens: Sequence[int], num_pages: int) -> Sequence[Key]:
        """Keys of the first ``num_pages`` pages, all of which ``tokens`` must fill, and go on by ``lookahead``."""
        while len(self._keys) < num_pages:
            start = len(self._keys) * self.page_size
            before = self._keys[-1] if self._keys else self.salt.encode()
            page = array("I", tokens[start : start + self.page_size + self.lookahead]).tobytes()
            self._keys.append(hashlib.blake2b(before + page, digest_size=HASH_BYTES, person=b"kv page").digest())
        return self._keys[:num_pages]


def window_pages(num_pages: int, window: int, page_size: int) -> int:
    """The first of ``num_pages`` pages that the token after them still sees through ``window``."""
    first_position = max(0, num_pages * page_size - window + 1)
    return min(first_position // page_size, num_pages)


def longest_hit(keys: Sequence[Key], full: PagePool, sliding: PagePool, window: int, page_size: int) -> int:
    """How many pages from the start can be reused."""
    found = 0
    while found < len(keys) and full.find(keys[found]):
        found += 1
    # run: how many sliding pages in a row are there, ending before page n.
    run, best = 0, 0
    for n in range(1, found + 1):
        run = run + 1 if sliding.find(keys[n - 1]) else 0
        if run >= n - window_pages(n, window, page_size):
            best = n
    return best
