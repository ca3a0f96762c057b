"""Parses the model's tokens into messages, one token at a time, whatever the model wrote.

Three states over the control tokens:

    IDLE ── <|start|> ──► HEADER ── <|message|> ──► BODY ── <|end|>, <|call|>, <|return|> ──► IDLE

A prompt ends with ``<|start|>assistant``, so an output begins in HEADER. For well-formed output this equals the parser
of ``oss-harmony``. For malformed output that parser raises; here each kind has a rule that keeps the text, and a
``Flaw``. Every character of every text token is in exactly one place, in order: a ``Text``, the ``header.raw`` of a
``Begin``, or the ``text`` of a ``Flawed`` (a header that led to no message).
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

from microscale.text.chat_format import OutputParser
from microscale.text.conversation import Tool
from microscale.text.events import ASSISTANT, Begin, End, Flaw, Header, Text, TextKind
from microscale.text.harmony.header import CHANNELS, NAMESPACE, HeaderPart, HeaderReader, SegmentEnd
from microscale.text.harmony.tokens import HarmonyTokens
from microscale.text.json_text import is_json

# Recipients that are not tools.
PEOPLE = (ASSISTANT, "user", "all")


class HarmonyState(Enum):
    IDLE = 0
    HEADER = 1
    BODY = 2


class HarmonyParser(OutputParser):
    """A call of a function that was not offered is text of its channel."""

    def __init__(self, tokens: HarmonyTokens, tools: Collection[Tool] | None = None) -> None:
        super().__init__(tokens.tokenizer, tools)
        self._tokens = tokens
        self._ends = tokens.stops | {tokens.end}
        self._state = HarmonyState.HEADER
        self._reader = HeaderReader(started=False)
        self._kind = TextKind.CONTENT
        self._arguments: list[str] = []
        self.header: Header | None = None
        """The header of the open message."""

    def feed_plain(self, token: int) -> tuple[TextKind, str] | None:
        if self._state is not HarmonyState.BODY or self._kind is TextKind.CALL:
            return None
        text = self._detokenizer.whole(token)
        if not text:
            return None
        if not self._has_content and self._kind is TextKind.CONTENT and not text.isspace():
            self._has_content = True
        return self._kind, text

    @property
    def body_kind(self) -> TextKind | None:
        return self._kind if self._state is HarmonyState.BODY else None

    def _end_output(self) -> None:
        if self._state is HarmonyState.HEADER:
            self._end_header(Flaw.CUT, SegmentEnd.CUT)
        elif self._state is HarmonyState.BODY:
            self._flag(Flaw.CUT)
            self._end_body(complete=False)
        self._state = HarmonyState.IDLE

    def _add(self, text: str) -> None:
        if not text:
            return
        if self._state is HarmonyState.BODY:
            self._add_body(text)
            return
        if self._state is HarmonyState.IDLE:
            self._flag(Flaw.MISSING_START)
            self._begin_header(started=False)
        if not self._reader.feed(text):
            self._begin_body(self._reader.close(SegmentEnd.OPEN))

    def _control(self, token: int) -> None:
        ids = self._tokens
        if token in self._ends:
            self._end(token)
        elif token == ids.start:
            self._start()
        elif token == ids.message:
            self._message()
        elif token == ids.channel:
            self._segment(HeaderPart.CHANNEL)
        elif token == ids.constrain:
            self._segment(HeaderPart.CONSTRAIN)
        else:
            self._flag(Flaw.STRAY_TOKEN)

    def _end(self, token: int) -> None:
        if self._state is HarmonyState.BODY:
            if token == self._tokens.call and self._kind is not TextKind.CALL:
                self._flag(Flaw.CALL_WITHOUT_RECIPIENT)
            self._end_body(complete=True)
        elif self._state is HarmonyState.HEADER:
            self._end_header(Flaw.NO_MESSAGE, SegmentEnd.DONE)
        else:
            self._flag(Flaw.STRAY_TOKEN)
        self._state = HarmonyState.IDLE

    def _start(self) -> None:
        if self._state is HarmonyState.BODY:
            self._flag(Flaw.HEADER_IN_TEXT)
            self._end_body(complete=True)
        elif self._state is HarmonyState.HEADER:
            self._end_header(Flaw.REPEATED_HEADER, SegmentEnd.DONE)
        self._begin_header(started=True)

    def _message(self) -> None:
        if self._state is HarmonyState.IDLE:
            self._flag(Flaw.MISSING_START)
            self._begin_header(started=False)
        if self._state is HarmonyState.HEADER:
            self._begin_body(self._reader.close(SegmentEnd.CONTROL))
        else:
            self._flag(Flaw.STRAY_TOKEN)

    def _segment(self, part: HeaderPart) -> None:
        if self._state is HarmonyState.IDLE:
            self._flag(Flaw.MISSING_START)
            self._begin_header(started=False)
        if self._state is HarmonyState.HEADER:
            text = self._reader.close(SegmentEnd.CONTROL)
            if text:
                self._begin_body(text)
        if self._state is HarmonyState.BODY:
            if part is HeaderPart.CONSTRAIN:
                self._flag(Flaw.STRAY_TOKEN)
                return
            self._flag(Flaw.HEADER_IN_TEXT)
            self._end_body(complete=True)
            self._begin_header(started=False)
        self._reader.next_part(part)

    def _begin_header(self, *, started: bool) -> None:
        self._state = HarmonyState.HEADER
        self._reader = HeaderReader(started=started)

    def _end_header(self, flaw: Flaw, ending: SegmentEnd) -> None:
        """End a header without ``<|message|>``: text in it still becomes a message."""
        text = self._reader.close(ending)
        if text:
            self._begin_body(text)
            if flaw is Flaw.CUT:
                self._flag(flaw)
            self._end_body(complete=flaw is not Flaw.CUT)
        else:
            self._flag(flaw, self._reader.header().raw)

    def _begin_body(self, text: str) -> None:
        self._state = HarmonyState.BODY
        self.header = header = self._reader.header()
        for flaw in self._reader.fields.flaws:
            self._flag(flaw)
        self._arguments = []
        function = self._function(header)
        if function is not None:
            self._kind = TextKind.CALL
            self._begin_call(function, header)
        else:
            self._kind = TextKind.REASONING if header.channel == "analysis" else TextKind.CONTENT
            self._events.append(Begin(self._kind, header))
        self._flag_header(header)
        if text:
            self._add_body(text)

    def _function(self, header: Header) -> str | None:
        """The name of the function that a message calls."""
        if header.recipient is None:
            return None
        name = header.recipient.removeprefix(NAMESPACE)
        if header.recipient in PEOPLE or not name:
            self._flag(Flaw.WRONG_RECIPIENT)
            return None
        if self._tools is not None and name not in self._tools:
            self._flag(Flaw.UNKNOWN_TOOL)
            return None
        return name

    def _flag_header(self, header: Header) -> None:
        if header.role != ASSISTANT:
            self._flag(Flaw.WRONG_ROLE)
        if header.channel is None:
            self._flag(Flaw.NO_CHANNEL)
        elif header.channel not in CHANNELS or (self._kind is TextKind.CALL and header.channel == "final"):
            self._flag(Flaw.WRONG_CHANNEL)

    def _add_body(self, text: str) -> None:
        if self._kind is TextKind.CALL:
            self._arguments.append(text)
        elif self._kind is TextKind.CONTENT and not text.isspace():
            self._has_content = True
        self._events.append(Text(self._kind, text))

    def _end_body(self, *, complete: bool) -> None:
        if self._kind is TextKind.CALL and complete and not is_json("".join(self._arguments)):
            self._flag(Flaw.BAD_ARGUMENTS)
        self._arguments = []
        self.header = None
        self._events.append(End(self._kind, complete))
