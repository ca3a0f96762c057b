"""Stored responses, to be continued or fetched: in memory, the least recently used are dropped first.

response ──► its conversation: items, shared with the responses before it
item id ───► the item, while a response that contains it is stored
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from microscale.server import error_texts
from microscale.server.openai.responses.input_items import Item
from microscale.server.options import RequestLimits


@dataclass(frozen=True)
class StoredItem:
    """One item of a conversation."""

    id: str
    item: Item
    size: int
    """Approximate bytes in memory."""
    is_ours: bool
    """The id was made here, so that no client can have chosen or guessed it: it may be referred to."""


@dataclass(frozen=True)
class StoredResponse:
    reply: bytes
    """The response, as JSON."""
    items: tuple[StoredItem, ...]
    """The conversation including the response, without instructions, which belong to each request."""
    num_input: int
    """Number of items before the response's own."""
    owner: str
    """The owner of the API key; to all others the response does not exist."""

    @property
    def size(self) -> int:
        """Bytes. Items that conversations share are counted in each."""
        return len(self.reply) + sum(item.size for item in self.items)


@dataclass
class _Shared:
    item: StoredItem
    num_responses: int


class ResponseStore:
    def __init__(self) -> None:
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._items: dict[tuple[str, str], _Shared] = {}
        """By owner and id."""
        self._size = 0

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, response_id: str, response: StoredResponse, limits: RequestLimits) -> None:
        self._responses[response_id] = response
        self._size += response.size
        for item in response.items:
            if item.is_ours:
                self._items.setdefault((response.owner, item.id), _Shared(item, 0)).num_responses += 1
        while len(self._responses) > limits.max_stored_responses or self._size > limits.max_stored_bytes:
            self._forget(next(iter(self._responses)))

    def get(self, response_id: str, owner: str) -> StoredResponse:
        """Raises for a response that is not stored, or belongs to another owner."""
        response = self._responses.get(response_id)
        if response is None or response.owner != owner:
            raise error_texts.response_not_found(response_id)
        self._responses.move_to_end(response_id)
        return response

    def item(self, item_id: str, owner: str) -> StoredItem:
        """Raises unless a stored response of ``owner`` contains the item."""
        shared = self._items.get((owner, item_id))
        if shared is None:
            raise error_texts.item_not_found(item_id)
        return shared.item

    def delete(self, response_id: str, owner: str) -> None:
        self.get(response_id, owner)
        self._forget(response_id)

    def _forget(self, response_id: str) -> None:
        response = self._responses.pop(response_id)
        self._size -= response.size
        for item in response.items:
            if not item.is_ours:
                continue
            shared = self._items[response.owner, item.id]
            shared.num_responses -= 1
            if not shared.num_responses:
                del self._items[response.owner, item.id]
