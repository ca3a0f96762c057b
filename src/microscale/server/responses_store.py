"""Responses that were kept, to be continued or fetched: in memory, those that were not used for longest go first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from microscale.server.faults import NoSuchResponse
from microscale.server.limits import Limits
from microscale.server.protocol import ChatMessage


@dataclass(frozen=True)
class Kept:
    reply: bytes
    """The response, as JSON."""
    messages: tuple[ChatMessage, ...]
    """The conversation up to its end, without the instructions: they are each request's own."""
    owner: str
    """Whose key it was made with: to all others it does not exist."""
    size: int
    """Bytes of both. What a conversation shares with an earlier one is counted in each."""


class ResponseStore:
    def __init__(self) -> None:
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, response_id: str, kept: Kept, limits: Limits) -> None:
        self._kept[response_id] = kept
        self._size += kept.size
        while len(self._kept) > limits.max_stored_responses or self._size > limits.max_stored_bytes:
            self._size -= self._kept.popitem(last=False)[1].size

    def get(self, response_id: str, owner: str) -> Kept:
        """Raise ``NoSuchResponse`` for one that was never kept, or not any more, or for another."""
        kept = self._kept.get(response_id)
        if kept is None or kept.owner != owner:
            raise NoSuchResponse(f"There is no response {response_id[:64]!r} here, or not any more.")
        self._kept.move_to_end(response_id)
        return kept

    def delete(self, response_id: str, owner: str) -> None:
        self._size -= self.get(response_id, owner).size
        del self._kept[response_id]
