"""What a parser says of an output: messages that begin, their text, their ends, and what was malformed.

Every chat format has a parser of its own; all give these events, so that clients get the same fields from each.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

ASSISTANT = "assistant"


class Flaw(StrEnum):
    """What was wrong with an output. None of them loses text."""

    NO_HEADER = "no_header"
    """Text with no header before it."""
    NO_CHANNEL = "no_channel"
    WRONG_CHANNEL = "wrong_channel"
    """A channel that the format has not, or a call on the final channel."""
    WRONG_ROLE = "wrong_role"
    """A message that says it is not the assistant's."""
    WRONG_RECIPIENT = "wrong_recipient"
    """A recipient without ``to=``, glued to another word, twice, after the type, or one that is no tool."""
    UNKNOWN_TOOL = "unknown_tool"
    """A call of a tool that was not offered: it stays text."""
    TEXT_IN_HEADER = "text_in_header"
    """``<|message|>`` was missing, or words stood before it that mean nothing there."""
    HEADER_IN_TEXT = "header_in_text"
    """A new header before the message's end."""
    MISSING_START = "missing_start"
    """A message without ``<|start|>``."""
    REPEATED_HEADER = "repeated_header"
    NO_MESSAGE = "no_message"
    """A header that ended with no message."""
    STRAY_TOKEN = "stray_token"
    """A control token where it means nothing, or an id outside the vocabulary."""
    CALL_WITHOUT_RECIPIENT = "call_without_recipient"
    BAD_ARGUMENTS = "bad_arguments"
    """Arguments of a call that are not JSON, or a call that is not, where calls are."""
    NO_CONTENT = "no_content"
    """Neither an answer nor a call."""
    CUT = "cut"
    """The output ended inside a message or a header."""


@dataclass(frozen=True)
class Header:
    """What a message says of itself."""

    role: str = ASSISTANT
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None
    raw: str = ""
    """The text of the header, without its control tokens."""


class Kind(StrEnum):
    """What a message is for the client."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"
    """Its text is the arguments."""


@dataclass(frozen=True, slots=True)
class Begin:
    """A message begins. ``function`` and ``call_idx`` (from 0, in order) are there for a call."""

    kind: Kind
    header: Header
    function: str | None = None
    call_idx: int | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """More text of the message that began last."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class End:
    """The message is over; ``complete`` unless the output was cut inside it."""

    kind: Kind
    complete: bool


@dataclass(frozen=True, slots=True)
class Flawed:
    """The output is malformed here. ``text``: of a header that became no message."""

    flaw: Flaw
    text: str = ""


Event = Begin | Text | End | Flawed
