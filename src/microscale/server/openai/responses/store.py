"""Responses that were kept, to be continued or fetched: in memory, least recently used dropped first.

response ──► its conversation: items shared with the responses before it
item id ───► the item, while a response that holds it is kept
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from microscale.server.http.error_replies import NoSuchItem, NoSuchResponse
from microscale.server.openai.responses.input_items import Item
from microscale.server.options import Limits


@dataclass(frozen=True)
class KeptItem:
    """One item of a conversation."""

    id: str
    item: Item
    size: int
    """Bytes that it takes, about."""
    is_ours: bool
    """The id was made here, so nobody can have guessed or chosen it: it may be referred to."""


@dataclass(frozen=True)
class Kept:
    reply: bytes
    """The response, as JSON."""
    items: tuple[KeptItem, ...]
    """The conversation up to its end, without the instructions: they are each request's own."""
    num_input: int
    """Items that stood before the response's own."""
    owner: str
    """Whose key it was made with: to all others it does not exist."""

    @property
    def size(self) -> int:
        """Bytes. What a conversation shares with an earlier one is counted in each."""
        return len(self.reply) + sum(item.size for item in self.items)


@dataclass
class _Shared:
    item: KeptItem
    num_holders: int


class ResponseStore:
    def __init__(self) -> None:
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._items: dict[tuple[str, str], _Shared] = {}
        """By owner and id."""
        self._size = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_items(self) -> int:
        """Items that can be referred to."""
        return len(self._items)

    def put(self, response_id: str, kept: Kept, limits: Limits) -> None:
        self._kept[response_id] = kept
        self._size += kept.size
        for item in kept.items:
            if item.is_ours:
                self._items.setdefault((kept.owner, item.id), _Shared(item, 0)).num_holders += 1
        while len(self._kept) > limits.max_stored_responses or self._size > limits.max_stored_bytes:
            self._forget(next(iter(self._kept)))

    def get(self, response_id: str, owner: str) -> Kept:
        """Raise ``NoSuchResponse`` for one that was never kept, or not any more, or for another."""
        kept = self._kept.get(response_id)
        if kept is None or kept.owner != owner:
            raise NoSuchResponse(f"There is no response {response_id[:64]!r} here, or not any more.")
        self._kept.move_to_end(response_id)
        return kept

    def item(self, item_id: str, owner: str) -> KeptItem:
        """Raise ``NoSuchItem`` for one of no response that is kept for ``owner``."""
        shared = self._items.get((owner, item_id))
        if shared is None:
            raise NoSuchItem(
                f"There is no item {item_id[:64]!r} here, or not any more: items are kept with their response, "
                "and not at all with store: false."
            )
        return shared.item

    def delete(self, response_id: str, owner: str) -> None:
        self.get(response_id, owner)
        self._forget(response_id)

    def _forget(self, response_id: str) -> None:
        kept = self._kept.pop(response_id)
        self._size -= kept.size
        for item in kept.items:
            if not item.is_ours:
                continue
            shared = self._items[kept.owner, item.id]
            shared.num_holders -= 1
            if not shared.num_holders:
                del self._items[kept.owner, item.id]
