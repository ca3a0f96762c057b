"""Reads a message's header as the model wrote it, which does not always follow the format.

A header is text in up to three kinds of segment:

    lead        after ``<|start|>``:     role, recipient            assistant to=functions.f
    channel     after ``<|channel|>``:   channel, recipient, type   commentary to=functions.f
    constrain   after ``<|constrain|>``: type                       json

and ``<|message|>`` ends it. If the model forgets ``<|message|>``, its text continues in the header. So for each segment
we ask: *from where on can this not be a header?* From there on it is text, and the message has begun. A word belongs to
the header only if it has a meaning there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum

from microscale.text.events import ASSISTANT, Flaw, Header

CHANNELS = ("analysis", "commentary", "final")
ROLES = (ASSISTANT, "user", "system", "developer", "tool")
CONTENT_TYPES = ("json", "code", "text")
TO = "to="
NAMESPACE = "functions."

# A recipient is the longest word: a function's name has at most 128 characters.
MAX_WORD_CHARS = 192
MAX_GAP_CHARS = 32
# Per segment: role or channel, recipient, a second recipient, type.
MAX_WORDS = 4

_WORD = re.compile(r"\S+")
_TYPE = re.compile(r"[A-Za-z][A-Za-z0-9_.+/-]{0,31}")


class HeaderPart(Enum):
    LEAD = 0
    CHANNEL = 1
    CONSTRAIN = 2


class SegmentEnd(Enum):
    """What follows a segment."""

    OPEN = 0
    """More text may follow: the last word may be incomplete."""
    CONTROL = 1
    """A control token of the header."""
    DONE = 2
    """No message follows: a word without a certain meaning is text."""
    CUT = 3
    """Nothing follows: like ``DONE``, and the last word may be incomplete."""


@dataclass(frozen=True)
class _Fields:
    role: str | None = None
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None
    flaws: tuple[Flaw, ...] = ()

    def flawed(self, flaw: Flaw) -> _Fields:
        return self if flaw in self.flaws else replace(self, flaws=(*self.flaws, flaw))


class HeaderReader:
    """Collects one header. ``started``: it comes after an explicit ``<|start|>``."""

    def __init__(self, *, started: bool) -> None:
        self.started = started
        self.part = HeaderPart.LEAD
        self.segment = ""
        self.fields = _Fields()
        self._raw: list[str] = []
        """Header text of the earlier segments."""

    @property
    def evident(self) -> bool:
        """Whether there is any sign that this is a header, and not an answer without one."""
        return self.started or self.part is not HeaderPart.LEAD or self.segment.lstrip().startswith(TO)

    def feed(self, text: str) -> bool:
        """Add text; false once the message's text has begun, which ``close`` then returns."""
        self.segment += text
        return _Scan(self, SegmentEnd.OPEN).text_at is None

    def close(self, ending: SegmentEnd) -> str:
        """Add the segment's words to the header; return the rest, which is text of the message."""
        scan = _Scan(self, ending)
        self.fields = scan.fields
        text = "" if scan.text_at is None else self.segment[scan.text_at :]
        if text:
            self.flag(Flaw.TEXT_IN_HEADER if self.evident else Flaw.NO_HEADER)
        self._raw.append(self.segment.removesuffix(text))
        self.segment = ""
        return text

    def next_part(self, part: HeaderPart) -> None:
        """Begin a segment, after ``close``."""
        if part is HeaderPart.CHANNEL and self.fields.channel is not None:
            self.flag(Flaw.REPEATED_HEADER)
            self.fields = replace(self.fields, channel=None)
        self.part = part

    def flag(self, flaw: Flaw) -> None:
        self.fields = self.fields.flawed(flaw)

    def header(self) -> Header:
        fields = self.fields
        raw = "".join(self._raw)
        return Header(fields.role or ASSISTANT, fields.channel, fields.recipient, fields.content_type, raw)


class _Scan:
    """One pass over a segment: the words that belong to the header, and where text begins."""

    def __init__(self, reader: HeaderReader, ending: SegmentEnd) -> None:
        self.fields = reader.fields
        self.text_at: int | None = None
        self._reader = reader
        self._ending = ending
        # The first word that belongs to the header only if the rest does, and the fields before it.
        self._unsure: tuple[int, _Fields] | None = None
        if not reader.evident:
            self._unsure = 0, reader.fields
        self._run(reader.segment)

    def _run(self, segment: str) -> None:
        past = 0
        grows = self._ending in (SegmentEnd.OPEN, SegmentEnd.CUT)
        for number, match in enumerate(_WORD.finditer(segment)):
            word, start = match.group(), match.start()
            taken = 0
            if number < MAX_WORDS and start - past <= MAX_GAP_CHARS and len(word) <= MAX_WORD_CHARS:
                self._start = start
                taken = self._take(word, number == 0, grows and match.end() == len(segment))
            if taken < len(word):
                # White space before the first word of the header is text as well.
                self._reject(start + taken if past or taken else 0)
                return
            past = match.end()
        is_over = self._ending in (SegmentEnd.DONE, SegmentEnd.CUT)
        if len(segment) - past > MAX_GAP_CHARS or (is_over and self._unsure is not None):
            self._reject(past)

    def _reject(self, at: int) -> None:
        self.text_at = at
        if self._unsure is not None:
            self.text_at, self.fields = self._unsure

    def _doubt(self) -> None:
        if self._unsure is None:
            self._unsure = self._start, self.fields

    def _take(self, word: str, first: bool, is_open: bool) -> int:
        """How many characters of ``word`` belong to the header."""
        part = self._reader.part
        if first and part is HeaderPart.LEAD:
            taken = self._take_role(word, is_open)
            if taken:
                return taken
        if self._take_recipient(word, is_open):
            return len(word)
        if part is HeaderPart.CHANNEL and self.fields.channel is None:
            return self._take_channel(word, first, is_open)
        return self._take_type(word, first, is_open)

    def _take_role(self, word: str, is_open: bool) -> int:
        started = self._reader.started
        if word in ROLES or (started and word.startswith(NAMESPACE)):
            self.fields = replace(self.fields, role=word)
            return len(word)
        known = (*ROLES, NAMESPACE) if started else ROLES
        if is_open and any(role.startswith(word) for role in known):
            return len(word)
        return len(ASSISTANT) if started and word.startswith(ASSISTANT) else 0

    def _take_recipient(self, word: str, is_open: bool) -> bool:
        part = self._reader.part
        if word.startswith(TO):
            self._set_recipient(word.removeprefix(TO), wrong=part is HeaderPart.CONSTRAIN)
            return True
        if part is not HeaderPart.LEAD and self.fields.recipient is None and word.startswith(NAMESPACE):
            self._set_recipient(word, wrong=True)
            return True
        return is_open and (TO.startswith(word) or (part is not HeaderPart.LEAD and NAMESPACE.startswith(word)))

    def _set_recipient(self, name: str, *, wrong: bool) -> None:
        if wrong or self.fields.recipient is not None or not name:
            self.fields = self.fields.flawed(Flaw.WRONG_RECIPIENT)
        if self.fields.recipient is None and name:
            self.fields = replace(self.fields, recipient=name)

    def _take_channel(self, word: str, first: bool, is_open: bool) -> int:
        if is_open and any(channel.startswith(word) for channel in CHANNELS):
            return len(word)
        for channel in CHANNELS:
            if word.startswith(channel):
                self.fields = replace(self.fields, channel=channel)
                rest = word.removeprefix(channel)
                if rest.startswith(TO):
                    self._set_recipient(rest.removeprefix(TO), wrong=True)
                    return len(word)
                return len(word) if is_open and TO.startswith(rest) else len(channel)
        if not first:
            return 0
        self._doubt()
        self.fields = replace(self.fields, channel=word)
        return len(word)

    def _take_type(self, word: str, first: bool, is_open: bool) -> int:
        if self.fields.content_type is not None:
            return len(word) if word == self.fields.content_type else 0
        if word in CONTENT_TYPES:
            self.fields = replace(self.fields, content_type=word)
            return len(word)
        if is_open and any(known.startswith(word) for known in CONTENT_TYPES):
            return len(word)
        expected = (first and self._reader.part is HeaderPart.CONSTRAIN) or self.fields.recipient is not None
        match = _TYPE.match(word) if expected else None
        if match is None:
            return 0
        if match.end() == len(word):
            self._doubt()
            self.fields = replace(self.fields, content_type=word)
            return len(word)
        if match.group() in CONTENT_TYPES:
            # ``json{"a": 1}``: the type, and the text right after it.
            self.fields = replace(self.fields, content_type=match.group())
            return match.end()
        return 0
