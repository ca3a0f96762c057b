"""Parses Gemma 4's tokens into messages, one token at a time, whatever the model wrote.

    text                                    content
    <|channel>thought, line, … <channel|>   reasoning
    <|tool_call>call:name{ … }<tool_call|>  a call
    <turn|>, <eos>, <|tool_response>        the end

For every kind of malformed output there is a rule that keeps the text, and a ``Flaw``. A call is passed on when it is
complete, with its arguments as JSON.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

from microscale.text.chat_format import OutputParser
from microscale.text.conversation import Tool
from microscale.text.events import Begin, End, Flaw, Header, Text, TextKind
from microscale.text.gemma.call import QUOTE, arguments_json, split_call
from microscale.text.gemma.tokens import GemmaTokens
from microscale.text.json_text import BadCall

THOUGHT = "thought"
MAX_CHANNEL_CHARS = 32


class GemmaState(Enum):
    TEXT = 0
    CHANNEL = 1
    """The channel's name, up to the end of the line."""
    THOUGHTS = 2
    CALL = 3


class GemmaParser(OutputParser):
    """A call of a function that was not offered is content."""

    def __init__(self, tokens: GemmaTokens, tools: Collection[Tool] | None = None) -> None:
        super().__init__(tokens.tokenizer, tools)
        self._tokens = tokens
        self._state = GemmaState.TEXT
        self._open: TextKind | None = None
        """The message that has begun and not ended."""
        self._pending = ""
        """A channel's name or a call so far; in reasoning, a line break that may be the last."""

    def feed_plain(self, token: int) -> tuple[TextKind, str] | None:
        text = self._detokenizer.whole(token)
        if not text:
            return None
        if self._state is GemmaState.TEXT and self._open is TextKind.CONTENT:
            self._has_content = self._has_content or not text.isspace()
            return TextKind.CONTENT, text
        if (
            self._state is GemmaState.THOUGHTS
            and self._open is TextKind.REASONING
            and not self._pending
            and text[-1] != "\n"
        ):
            return TextKind.REASONING, text
        return None

    @property
    def body_kind(self) -> TextKind | None:
        kinds = {
            GemmaState.TEXT: TextKind.CONTENT,
            GemmaState.THOUGHTS: TextKind.REASONING,
            GemmaState.CALL: TextKind.CALL,
        }
        return kinds.get(self._state)

    def _end_output(self) -> None:
        if self._state is not GemmaState.TEXT:
            self._flag(Flaw.CUT)
            self._leave(complete=False)
        self._end(complete=False)

    def _add(self, text: str) -> None:
        if not text:
            return
        if self._state is GemmaState.TEXT:
            self._say(TextKind.CONTENT, text)
        elif self._state is GemmaState.THOUGHTS:
            self._think(text)
        else:
            self._pending += text
            if self._state is GemmaState.CHANNEL and ("\n" in self._pending or len(self._pending) > MAX_CHANNEL_CHARS):
                self._enter_channel()

    def _control(self, token: int) -> None:
        tokens = self._tokens
        if token == tokens.quote and self._state is GemmaState.CALL:
            self._pending += QUOTE
            return
        if token in (tokens.end_channel, tokens.end_call):
            expected = (GemmaState.CALL,) if token == tokens.end_call else (GemmaState.CHANNEL, GemmaState.THOUGHTS)
            if self._state not in expected:
                self._flag(Flaw.STRAY_TOKEN)
                return
            self._leave(complete=True)
            return
        is_end = token in tokens.stops
        if not is_end and token not in (tokens.channel, tokens.call):
            self._flag(Flaw.STRAY_TOKEN)
            return
        if self._state is not GemmaState.TEXT:
            # Unclosed reasoning or an unclosed call; what follows does not belong to it.
            self._flag(Flaw.HEADER_IN_TEXT)
            self._leave(complete=True)
        self._end(complete=True)
        if not is_end:
            self._state = GemmaState.CHANNEL if token == tokens.channel else GemmaState.CALL

    def _leave(self, *, complete: bool) -> None:
        """End reasoning or a call; text follows."""
        state, self._state = self._state, GemmaState.TEXT
        if state is GemmaState.CHANNEL:
            # The line did not end: an empty channel, or reasoning without a line break.
            self._state = GemmaState.CHANNEL
            self._enter_channel()
            self._state = GemmaState.TEXT
        if state is GemmaState.CALL:
            pending, self._pending = self._pending, ""
            self._call(pending, complete)
            return
        self._pending = ""
        self._end(complete=complete)

    def _enter_channel(self) -> None:
        """Go from a channel's first line to its text."""
        name, newline, rest = self._pending.partition("\n")
        self._pending = ""
        if name.strip() == THOUGHT:
            self._state = GemmaState.THOUGHTS
            self._think(rest)
        elif not newline and len(name) > MAX_CHANNEL_CHARS:
            self._flag(Flaw.NO_CHANNEL)
            self._state = GemmaState.THOUGHTS
            self._think(name)
        else:
            # An unknown channel may contain the answer, so its text is shown.
            self._flag(Flaw.WRONG_CHANNEL, name)
            self._state = GemmaState.TEXT
            if rest:
                self._say(TextKind.CONTENT, rest)

    def _think(self, text: str) -> None:
        """Add reasoning, except a last line break: the format puts one before the end of the channel."""
        text, self._pending = self._pending + text, ""
        if text.endswith("\n"):
            text, self._pending = text[:-1], "\n"
        if text:
            self._say(TextKind.REASONING, text)

    def _say(self, kind: TextKind, text: str) -> None:
        if self._open is not kind:
            self._end(complete=True)
            self._open = kind
            channel = THOUGHT if kind is TextKind.REASONING else None
            self._events.append(Begin(kind, Header(channel=channel)))
        if kind is TextKind.CONTENT and not text.isspace():
            self._has_content = True
        self._events.append(Text(kind, text))

    def _end(self, *, complete: bool) -> None:
        if self._open is not None:
            self._events.append(End(self._open, complete))
            self._open = None

    def _call(self, text: str, complete: bool) -> None:
        shown = text.replace(QUOTE, '"')
        try:
            name, rest = split_call(text)
        except BadCall:
            self._flag(Flaw.CALL_WITHOUT_RECIPIENT)
            if shown:
                self._say(TextKind.CONTENT, shown)
            return
        if self._tools is not None and name not in self._tools:
            self._flag(Flaw.UNKNOWN_TOOL)
            self._say(TextKind.CONTENT, shown)
            return
        try:
            arguments = arguments_json(rest)
        except (BadCall, RecursionError):
            if complete:
                self._flag(Flaw.BAD_ARGUMENTS)
            arguments = rest.replace(QUOTE, '"')
        self._begin_call(name, Header(recipient=name))
        self._events += [Text(TextKind.CALL, arguments), End(TextKind.CALL, complete)]
