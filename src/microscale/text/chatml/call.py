"""A style of calls in ChatML: what models write between ``<tool_call>`` and ``</tool_call>``.

There are two: one JSON object (``json_call``) and XML tags (``xml_call``). The checkpoint's template shows which one
the model was trained on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from microscale.text.conversation import ToolCall
from microscale.text.grammar import Schema

Tools = Mapping[str, Mapping[str, object] | None]
"""Functions that may be called, with the schemas of their parameters."""

MAX_HEAD_CHARS = 1024
"""After this many characters without arguments, the search for them ends."""


class CallReader(ABC):
    """Reads one call while the model writes it.

    ``feed`` and ``finish`` return what is added to the arguments, as JSON text; ``rest`` is all other text.
    """

    def __init__(self, tools: Tools | None) -> None:
        """``tools``: functions that may be called; ``None`` means all."""
        self._tools = tools
        self.function: str | None = None
        """Set once the arguments begin, and only if it may be called."""
        self.is_whole = False
        """The arguments have ended."""

    @abstractmethod
    def feed(self, text: str) -> str: ...

    @abstractmethod
    def finish(self, *, complete: bool) -> str:
        """Called at the end of the call; it is not ``complete`` if the output was cut there."""

    @property
    @abstractmethod
    def in_text(self) -> bool:
        """Inside a string, where a name of a mark is only a word."""

    @property
    @abstractmethod
    def rest(self) -> str:
        """All text if there is no ``function``; else the text that does not belong to its call."""

    @property
    def left(self) -> str:
        """The part of ``rest`` that is shown after the call, if it does not end well."""
        return self.rest.strip()

    @property
    @abstractmethod
    def ends_well(self) -> bool:
        """Whether the call is well formed."""

    @abstractmethod
    def held_call(self) -> tuple[str, str]:
        """Function and arguments of a call that is recognised only when complete. Raises ``BadCall`` otherwise."""


@dataclass(frozen=True)
class CallGrammar:
    """The grammar of what is between a call's marks."""

    body: str
    rules: list[str] = field(default_factory=list)
    """Further rules that ``body`` uses."""
    forms: list[dict[str, Any]] = field(default_factory=list)
    """Named forms that it uses."""


@dataclass(frozen=True)
class CallStyle:
    reader: Callable[[Tools | None], CallReader]
    text: Callable[[ToolCall], str]
    """A call as the model writes it."""
    grammar: Callable[[int, str, Schema], CallGrammar]
    """The grammar of the n-th function's call; names in it end in the number."""
    why_not_strict: Callable[[Schema], str | None]
    """Why a grammar cannot enforce a schema of parameters; ``None`` if it can."""
    renderable: Callable[[ToolCall], ToolCall]
    """A call of an earlier turn, with arguments that the template can write."""
