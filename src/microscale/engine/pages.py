"""Who owns each page of the KV cache.

    page 0 … num_pages - 1:   free list  |  sequence A  |  sequence B  |  free list …

A page is on the free list or belongs to exactly one owner. ``check()`` says so or raises.
"""

from __future__ import annotations

from collections.abc import Hashable

from microscale.errors import OutOfPages


class PagePool:
    """Hands out page numbers and takes them back."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._owned: dict[Hashable, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_of(self, owner: Hashable) -> list[int]:
        """The owner's pages, in the order of the positions that they hold."""
        return self._owned.get(owner, [])

    def grow(self, owner: Hashable, total: int) -> None:
        """Give ``owner`` pages until it has ``total``; all of them or none."""
        pages = self._owned.setdefault(owner, [])
        missing = total - len(pages)
        if missing > len(self._free):
            raise OutOfPages(f"{missing} more KV pages are needed and {len(self._free)} of {self.num_pages} are free.")
        pages.extend(self._free.pop() for _ in range(missing))

    def release(self, owner: Hashable) -> None:
        """Take back all pages of ``owner``."""
        self._free.extend(reversed(self._owned.pop(owner, [])))

    def check(self) -> None:
        """Every page is free or owned, once."""
        held = [*self._free, *(page for pages in self._owned.values() for page in pages)]
        if sorted(held) != list(range(self.num_pages)):
            raise AssertionError(f"page pool is inconsistent: {len(held)} pages accounted for of {self.num_pages}")
