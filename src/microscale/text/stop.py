"""Stop strings, found across token boundaries.

The stop that is *complete* first wins, whatever the size of the pieces in which text comes; of two that end at the same
character, the longer. Held back is the longest end of the text that begins some stop, and no more than that.
One automaton (Aho and Corasick) over all stops: each character costs amortised constant time, however they overlap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from microscale.errors import BadRequest

MAX_STOPS = 16
MAX_STOP_CHARS = 256


@dataclass
class _Node:
    depth: int
    """Length of the beginning of a stop that was read: what must be held back."""
    found: str | None = None
    """The longest stop that ends here."""
    fallback: _Node | None = None
    """The node of the longest proper end of this text that begins a stop too."""
    next: dict[str, _Node] = field(default_factory=dict)


def check_stops(stops: Sequence[str]) -> None:
    """Refuse what would cost more than it is worth."""
    if len(stops) > MAX_STOPS:
        raise BadRequest(f"There are {len(stops)} stop strings; at most {MAX_STOPS} are taken.")
    for stop in stops:
        if not stop:
            raise BadRequest("A stop string is empty, which would stop before the first character.")
        if len(stop) > MAX_STOP_CHARS:
            raise BadRequest(f"A stop string has {len(stop)} characters; at most {MAX_STOP_CHARS} are taken.")


class StopStrings:
    """Watches one stream of text."""

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        """``keep``: the stop string itself is part of the text."""
        check_stops(stops)
        self._keep = keep
        self._root = _automaton(stops)
        self._node = self._root
        self._held = ""
        self.found: str | None = None
        """The stop that ended the stream."""

    @property
    def watches(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self._root.next)

    def feed(self, text: str) -> str:
        """The text that is now known to stand before any stop. After a stop it is empty."""
        if self.found is not None:
            return ""
        if not self._root.next:
            return text
        node = self._node
        for at, char in enumerate(text):
            while char not in node.next and node.fallback is not None:
                node = node.fallback
            node = node.next.get(char, self._root)
            if node.found is not None:
                self.found = node.found
                text, self._held = self._held + text[: at + 1], ""
                return text if self._keep else text[: -len(node.found)]
        self._node = node
        text = self._held + text
        cut = len(text) - node.depth
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """What was held back, now that no text follows."""
        held, self._held, self._node = self._held, "", self._root
        return held


def _automaton(stops: Sequence[str]) -> _Node:
    root = _Node(0)
    for stop in stops:
        node = root
        for char in stop:
            node = node.next.setdefault(char, _Node(node.depth + 1))
        node.found = stop
    # Breadth first: the fallback of a node is shallower, so it is complete when it is needed.
    queue: deque[_Node] = deque()
    for child in root.next.values():
        child.fallback = root
        queue.append(child)
    while queue:
        node = queue.popleft()
        for char, child in node.next.items():
            fallback = node.fallback
            while fallback is not None and char not in fallback.next:
                fallback = fallback.fallback
            child.fallback = root if fallback is None else fallback.next[char]
            child.found = child.found or child.fallback.found
            queue.append(child)
    return root
