"""Stop strings, matched across token boundaries.

The stop string that is *complete* first wins, however the text is cut into pieces; of two that end at the same
character, the longer one. The longest end of the text that could begin a stop string is held back, and no more. One
Aho-Corasick automaton matches all stop strings in amortized constant time per character.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from microscale.errors import BadRequest

MAX_STOP_CHARS = 256


@dataclass
class _Node:
    depth: int
    """How many characters of a stop string have been read, and must be held back."""
    matched: str | None = None
    """The longest stop string that ends here."""
    fallback: _Node | None = None
    """The node of the longest proper suffix that also begins a stop string."""
    next: dict[str, _Node] = field(default_factory=dict)


def check_stops(stops: Sequence[str]) -> None:
    """Raise for an empty or too long stop string."""
    for stop in stops:
        if not stop:
            raise BadRequest("A stop string is empty; it would stop before the first character.")
        if len(stop) > MAX_STOP_CHARS:
            raise BadRequest(f"A stop string has {len(stop)} characters; the maximum is {MAX_STOP_CHARS}.")


class StopStrings:
    """Watches one stream of text."""

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        """``keep``: include the stop string in the text."""
        check_stops(stops)
        self._keep = keep
        self._root = _automaton(stops)
        self._node = self._root
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the stream."""

    @property
    def watches(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self._root.next)

    def feed(self, text: str) -> str:
        """The text that certainly comes before any stop string; empty after one."""
        if self.matched is not None:
            return ""
        if not self._root.next:
            return text
        node = self._node
        for at, char in enumerate(text):
            while char not in node.next and node.fallback is not None:
                node = node.fallback
            node = node.next.get(char, self._root)
            if node.matched is not None:
                self.matched = node.matched
                text, self._held = self._held + text[: at + 1], ""
                return text if self._keep else text[: -len(node.matched)]
        self._node = node
        text = self._held + text
        cut = len(text) - node.depth
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The text that was held back, when no text follows."""
        held, self._held, self._node = self._held, "", self._root
        return held


def _automaton(stops: Sequence[str]) -> _Node:
    root = _Node(0)
    for stop in stops:
        node = root
        for char in stop:
            node = node.next.setdefault(char, _Node(node.depth + 1))
        node.matched = stop
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
            child.matched = child.matched or child.fallback.matched
            queue.append(child)
    return root
