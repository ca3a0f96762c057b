"""What a parser reports about an output: messages that begin, their text, their ends, and what was malformed.

Every chat format has its own parser; all produce these events, so that clients get the same fields from each.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

ASSISTANT = "assistant"


class Flaw(StrEnum):
    """What was wrong with an output. No text is lost."""

    NO_HEADER = "no_header"
    """Text with no header before it."""
    NO_CHANNEL = "no_channel"
    WRONG_CHANNEL = "wrong_channel"
    """A channel that does not exist, or a call on the final channel."""
    WRONG_ROLE = "wrong_role"
    """A message with a role other than the assistant's."""
    WRONG_RECIPIENT = "wrong_recipient"
    """A recipient without ``to=``, joined to another word, repeated, after the type, or not a tool."""
    UNKNOWN_TOOL = "unknown_tool"
    """A call of a tool that was not offered: it remains text."""
    TEXT_IN_HEADER = "text_in_header"
    """``<|message|>`` was missing, or meaningless words came before it."""
    HEADER_IN_TEXT = "header_in_text"
    """A new header before the message's end."""
    MISSING_START = "missing_start"
    """A message without ``<|start|>``."""
    REPEATED_HEADER = "repeated_header"
    NO_MESSAGE = "no_message"
    """A header without a message."""
    STRAY_TOKEN = "stray_token"
    """A control token in a place where it has no meaning, or an id outside the vocabulary."""
    CALL_WITHOUT_RECIPIENT = "call_without_recipient"
    BAD_ARGUMENTS = "bad_arguments"
    """Arguments, or a whole call, that are not JSON where they must be."""
    NO_CONTENT = "no_content"
    """Neither an answer nor a call."""
    CUT = "cut"
    """The output ended inside a message or a header."""


@dataclass(frozen=True)
class Header:
    """The fields of a message's header."""

    role: str = ASSISTANT
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None
    raw: str = ""
    """The text of the header, without its control tokens."""


class TextKind(StrEnum):
    """What a message is to the client."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"
    """Its text is the arguments."""


@dataclass(frozen=True, slots=True)
class Begin:
    """A message begins. A call has a ``function`` and a ``call_idx`` (from 0, in order)."""

    kind: TextKind
    header: Header
    function: str | None = None
    call_idx: int | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """More text of the message that began last."""

    kind: TextKind
    text: str


@dataclass(frozen=True, slots=True)
class End:
    """The message ends; it is ``complete`` unless the output was cut inside it."""

    kind: TextKind
    complete: bool


@dataclass(frozen=True, slots=True)
class Flawed:
    """The output is malformed here. ``text``: the text of a header that led to no message."""

    flaw: Flaw
    text: str = ""


Event = Begin | Text | End | Flawed
