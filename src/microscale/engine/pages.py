"""Who owns each page of a pool of the KV cache, and which pages can be shared by what they hold.

    free ──take──► in use (references ≥ 1) ──last release──► kept (a key, no reference) ──evicted──► in use
      ▲                     │                                   │
      └── last release ─────┘  (no key)                         └──found by its key──► in use again

A page is in exactly one of the three states; ``check()`` raises if not. Owners are requests; an owner's pages are in
the order of the positions that they hold. Full pages are *published* under a key (a hash of everything up to their
end), after which others may share them: a published page is never written again. A sliding layer's owner drops the
pages that its window has left; their places stay, empty.

Kept pages are evicted least recently used first, those that were never shared before those that were: a burst of
prompts that share nothing does not push out the prefix that all share. An owner's pages are released from the end, so
that the tail of a chain is evicted first and its head, without which the tail cannot be found, last.

Prefix cache: the key of a page is a hash of its tokens and of the key before it, so it identifies everything from the
first token on. The chain begins with the tenant's salt, and tenants with different salts share nothing. A hit of n
pages needs the full layers' pages 0 to n - 1 and, of the sliding layers', only those that the window of the next token
still sees: the longest n for which both are there is taken. A model with states also needs the slot with those after n
pages, of which there is one a prompt (``page_ledger``).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from microscale.errors import OutOfPages

Key = bytes
HASH_BYTES = 16
"""128 bits: among 2**40 pages two collide by chance once in 2**49 tries. Keys are not secret, salts are."""
NOWHERE = -1
"""In place of a page that its owner has dropped."""


class PagePool:
    """Hands out page numbers, takes them back, and finds them again."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._owned: dict[Hashable, list[int]] = {}
        self._key_of: dict[int, Key] = {}
        self._page_of: dict[Key, int] = {}
        # Kept pages, the least recently used first: those that were never shared, and those that were.
        self._once: OrderedDict[int, None] = OrderedDict()
        self._again: OrderedDict[int, None] = OrderedDict()
        self._shared: set[int] = set()
        self.num_evicted = 0

    @property
    def num_free(self) -> int:
        """Pages that could be handed out now, kept ones included."""
        return len(self._free) + len(self._once) + len(self._again)

    def pages_of(self, owner: Hashable) -> Sequence[int]:
        """The owner's pages by position; ``NOWHERE`` where it dropped one."""
        return self._owned.get(owner, ())

    def find(self, key: Key) -> bool:
        """Whether a page is published under this key."""
        return key in self._page_of

    def is_published(self, page: int) -> bool:
        return page in self._key_of

    def unpublish(self, page: int) -> bool:
        """Take back the key of a page that one owner holds, so that it may be written again. Whether that is so."""
        if self._references[page] != 1:
            return False
        del self._page_of[self._key_of.pop(page)]
        self._shared.discard(page)
        return True

    def share(self, owner: Hashable, keys: Sequence[Key | None]) -> None:
        """Begin ``owner`` with the pages published under ``keys``; ``None`` leaves a place empty."""
        if owner in self._owned:
            raise AssertionError(f"{owner} has pages already")
        pages = [NOWHERE if key is None else self._page_of[key] for key in keys]
        for page in pages:
            if page != NOWHERE:
                self._once.pop(page, None)
                self._again.pop(page, None)
                self._references[page] += 1
                self._shared.add(page)
        self._owned[owner] = pages

    def grow(self, owner: Hashable, total: int) -> None:
        """Give ``owner`` pages until it has ``total`` places; all of them or none."""
        missing = max(0, total - len(self.pages_of(owner)))
        if missing > self.num_free:
            raise OutOfPages(f"{missing} more KV pages are needed and {self.num_free} of {self.num_pages} are free.")
        self._owned.setdefault(owner, []).extend(self._take() for _ in range(missing))

    def publish(self, owner: Hashable, index: int, key: Key) -> None:
        """Let others find the page at ``index``. Where another page already holds the same, that one stays the one."""
        page = self._owned[owner][index]
        if page != NOWHERE and page not in self._key_of and key not in self._page_of:
            self._key_of[page] = key
            self._page_of[key] = page

    def drop(self, owner: Hashable, before: int) -> None:
        """Release the pages at the places below ``before``."""
        pages = self._owned.get(owner, [])
        index = min(before, len(pages)) - 1
        while index >= 0 and pages[index] != NOWHERE:  # those below a dropped one were dropped with it
            self._release(pages[index])
            pages[index] = NOWHERE
            index -= 1

    def shrink(self, owner: Hashable, total: int) -> None:
        """Take back the owner's pages from place ``total`` on, the last first."""
        pages = self._owned.get(owner, [])
        while len(pages) > total:
            page = pages.pop()
            if page != NOWHERE:
                self._release(page)

    def reorder(self, owner: Hashable, places: Sequence[int | None]) -> None:
        """Put the owner's pages, from these places, in this order; ``None`` makes an empty place."""
        pages = self._owned[owner]
        self._owned[owner] = [NOWHERE if place is None else pages[place] for place in places]

    def release(self, owner: Hashable) -> None:
        """Take back all pages of ``owner``, the last first."""
        for page in reversed(self._owned.pop(owner, [])):
            if page != NOWHERE:
                self._release(page)

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = (self._once or self._again).popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
            self._shared.discard(page)
            self.num_evicted += 1
        self._references[page] = 1
        return page

    def _release(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page]:
            return
        if page in self._key_of:
            (self._again if page in self._shared else self._once)[page] = None
        else:
            self._free.append(page)

    def check(self) -> None:
        """Every page is free, in use or kept; references, owners and keys agree."""
        references = [0] * self.num_pages
        for owner, pages in self._owned.items():
            held = [page for page in pages if page != NOWHERE]
            if len(set(held)) != len(held):
                raise AssertionError(f"{owner} holds a page twice: {pages}")
            for page in held:
                references[page] += 1
        if references != self._references:
            raise AssertionError("references do not agree with the owners' pages")
        in_use = [page for page, count in enumerate(references) if count]
        states = [*self._free, *in_use, *self._once, *self._again]
        if sorted(states) != list(range(self.num_pages)):
            raise AssertionError(f"{len(states)} pages are accounted for, of {self.num_pages}")
        if self._page_of != {key: page for page, key in self._key_of.items()}:
            raise AssertionError("keys and pages do not agree")
        kept = {*self._once, *self._again}
        if kept - self._key_of.keys() or self._key_of.keys() & set(self._free):
            raise AssertionError("a kept page has no key, or a free one has")


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
    in_full = 0
    while in_full < len(keys) and full.find(keys[in_full]):
        in_full += 1
    # run: how many sliding pages in a row are there, ending before page n.
    run, best = 0, 0
    for n in range(1, in_full + 1):
        run = run + 1 if sliding.find(keys[n - 1]) else 0
        if run >= n - window_pages(n, window, page_size):
            best = n
    return best
