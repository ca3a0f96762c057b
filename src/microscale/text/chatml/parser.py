"""Parses ChatML's tokens into messages, one token at a time, whatever the model wrote.

    <|im_start|>assistant, line                a header: usually in the prompt, rarely in an output
    text                                       content
    <think>, line … line, </think>, 2 lines    reasoning
    <tool_call>, line … line, </tool_call>     a call, in one of two styles (``call``)
    <|im_end|>, <|endoftext|>                  the end

Up to two line breaks on either side of a mark are layout and not shown. All other text is kept: for every kind of
malformed output there is a rule for what its text becomes, and a ``Flaw``. Arguments are passed on as they arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum

from microscale.text.chat_format import OutputParser
from microscale.text.chatml.call import CallReader, Tools
from microscale.text.chatml.json_call import JsonCallReader
from microscale.text.chatml.tokens import ChatmlTokens
from microscale.text.conversation import Tool
from microscale.text.events import ASSISTANT, Begin, End, Event, Flaw, Header, Text, TextKind
from microscale.text.json_text import BadCall, is_json

LAYOUT = 2
"""Line breaks next to a mark that belong to it."""
MAX_ROLE_CHARS = 32


class ChatmlState(Enum):
    TEXT = 0
    THOUGHTS = 1
    CALL = 2
    HEADER = 3
    """A role, up to the end of the line."""


KINDS = {ChatmlState.TEXT: TextKind.CONTENT, ChatmlState.THOUGHTS: TextKind.REASONING, ChatmlState.CALL: TextKind.CALL}


class ChatmlParser(OutputParser):
    """A call of a function that was not offered is text of the surrounding kind."""

    def __init__(
        self,
        tokens: ChatmlTokens,
        tools: Collection[Tool] | None = None,
        new_reader: Callable[[Tools | None], CallReader] = JsonCallReader,
    ) -> None:
        super().__init__(tokens.tokenizer, tools)
        self._tokens = tokens
        self._parameters = None if tools is None else {tool.name: tool.parameters for tool in tools}
        self._new_reader = new_reader
        self._may_call = tools is None or bool(self._tools)
        self._state = ChatmlState.TEXT
        self._around = ChatmlState.TEXT
        """What surrounds a call: text, or unclosed reasoning."""
        self._open: TextKind | None = None
        """The message that has begun and not ended."""
        self._role = ""
        self._breaks = ""
        """Line breaks that are layout if a mark follows."""
        self._num_skipped = LAYOUT
        """Line breaks since the last mark, up to ``LAYOUT``."""
        self._is_layout = False
        """The last token consisted only of line breaks that belong to the mark before it."""
        self._reader = new_reader({})
        self._arguments: list[str] = []

    def feed(self, token: int) -> list[Event]:
        self._is_layout = False
        return super().feed(token)

    def feed_plain(self, token: int) -> tuple[TextKind, str] | None:
        kind = self._open
        if kind is None or kind is TextKind.CALL or self._breaks or self._state is ChatmlState.CALL:
            return None
        text = self._detokenizer.whole(token)
        if not text or (text[-1] == "\n" and self._holds_breaks):
            return None
        if not self._has_content and kind is TextKind.CONTENT and not text.isspace():
            self._has_content = True
        return kind, text

    @property
    def body_kind(self) -> TextKind | None:
        return None if self._is_layout else KINDS.get(self._state)

    def _end_output(self) -> None:
        if self._state is not ChatmlState.TEXT:
            self._flag(Flaw.CUT)
        if self._state is ChatmlState.CALL:
            self._end_call(complete=False)
        self._close(complete=False)

    # ---- marks -------------------------------------------------------------------------------------------------------

    def _control(self, token: int) -> None:
        tokens = self._tokens
        if token == tokens.end_call and self._state is ChatmlState.CALL:
            self._end_call(complete=True)
            return
        if token in tokens.inner and self._state is ChatmlState.CALL and self._reader.in_text:
            self._add_to_call(tokens.inner[token])
            return
        is_inside = ChatmlState.THOUGHTS in (self._state, self._around if self._state is ChatmlState.CALL else None)
        begins = token in (tokens.start, tokens.call) or (token == tokens.think and not is_inside)
        if not begins and token not in tokens.stops and not (token == tokens.end_think and is_inside):
            self._flag(Flaw.STRAY_TOKEN)
            return
        if self._state is ChatmlState.CALL:
            # The call is not closed; what follows does not belong to it.
            self._flag(Flaw.HEADER_IN_TEXT)
            self._end_call(complete=True)
        if token == tokens.call:
            self._enter_call()
        elif token in (tokens.think, tokens.end_think):
            self._breaks = ""
            self._close(complete=True)
            self._state = ChatmlState.THOUGHTS if token == tokens.think else ChatmlState.TEXT
        else:
            if self._state is ChatmlState.THOUGHTS or (token == tokens.start and self._open is not None):
                self._flag(Flaw.HEADER_IN_TEXT)
            self._close(complete=True)
            self._state = ChatmlState.HEADER if token == tokens.start else ChatmlState.TEXT

    def _close(self, *, complete: bool) -> None:
        """End the open message or header. The first line breaks of the text that follows belong to the mark."""
        if self._state is ChatmlState.HEADER:
            self._leave_header()
        if self._breaks:
            breaks, self._breaks = self._breaks, ""
            self._say(breaks)
        self._end(complete=complete)
        self._state = ChatmlState.TEXT
        self._num_skipped = 0

    def _leave_header(self) -> None:
        role, self._role = self._role, ""
        self._state = ChatmlState.TEXT
        if role.strip() not in (ASSISTANT, ""):
            self._flag(Flaw.WRONG_ROLE, role)

    # ---- text --------------------------------------------------------------------------------------------------------

    def _add(self, text: str) -> None:
        if not text:
            return
        if self._state is ChatmlState.CALL:
            self._add_to_call(text)
        elif self._state is ChatmlState.HEADER:
            self._add_to_header(text)
        else:
            self._write(text)

    def _add_to_header(self, text: str) -> None:
        self._role, newline, text = (self._role + text).partition("\n")
        if newline:
            self._leave_header()
            self._num_skipped = LAYOUT
        elif len(self._role) > MAX_ROLE_CHARS:
            self._flag(Flaw.TEXT_IN_HEADER)
            text, self._role = self._role, ""
            self._state = ChatmlState.TEXT
        if text:
            self._write(text)

    def _write(self, text: str) -> None:
        """Add content or reasoning, without line breaks that belong to the last mark or may belong to the next."""
        if self._num_skipped < LAYOUT:
            shown = text.lstrip("\n")
            num_skipped = min(len(text) - len(shown), LAYOUT - self._num_skipped)
            text = text[num_skipped:]
            self._num_skipped = LAYOUT if text else self._num_skipped + num_skipped
            self._is_layout = not text
        text = self._breaks + text
        num_held = min(len(text) - len(text.rstrip("\n")), LAYOUT) if self._holds_breaks else 0
        text, self._breaks = text[: len(text) - num_held], text[len(text) - num_held :]
        if text:
            self._say(text)

    @property
    def _holds_breaks(self) -> bool:
        """Whether a mark may follow to which line breaks would belong. Not in an answer without tools."""
        return self._state is ChatmlState.THOUGHTS or self._may_call or self._open is None

    def _say(self, text: str) -> None:
        kind = KINDS[self._state]
        if self._open is not kind:
            self._open = kind
            self._events.append(Begin(kind, Header()))
        if kind is TextKind.CONTENT and not text.isspace():
            self._has_content = True
        self._events.append(Text(kind, text))

    def _end(self, *, complete: bool) -> None:
        if self._open is not None:
            self._events.append(End(self._open, complete))
            self._open = None

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _enter_call(self) -> None:
        if self._state is ChatmlState.HEADER:
            self._leave_header()
        self._around, self._state = self._state, ChatmlState.CALL
        self._reader = self._new_reader(self._parameters)

    def _add_to_call(self, text: str) -> None:
        is_new = self._reader.function is None
        arguments = self._reader.feed(text)
        if is_new and self._reader.function is not None:
            self._open_call(self._reader.function)
        if arguments:
            self._say_arguments(arguments)

    def _open_call(self, function: str) -> None:
        """Begin a call: the line breaks before it belong to it, and the message before it ends."""
        self._breaks = ""
        if self._around is ChatmlState.THOUGHTS:
            self._flag(Flaw.HEADER_IN_TEXT)
        self._end(complete=True)
        self._open = TextKind.CALL
        self._arguments = []
        self._begin_call(function, Header(recipient=function))

    def _say_arguments(self, text: str) -> None:
        self._arguments.append(text)
        self._events.append(Text(TextKind.CALL, text))

    def _end_call(self, *, complete: bool) -> None:
        """End a call; the surrounding text continues."""
        reader, self._state = self._reader, self._around
        if reader.function is None:
            self._end_held(reader.rest, complete=complete)
            return
        if arguments := reader.finish(complete=complete):
            self._say_arguments(arguments)
        is_good = reader.ends_well and is_json("".join(self._arguments))
        if complete and not is_good:
            self._flag(Flaw.BAD_ARGUMENTS)
        self._end(complete=complete)
        self._num_skipped = 0
        if not reader.ends_well and reader.left:
            self._write(reader.left)

    def _end_held(self, text: str, *, complete: bool) -> None:
        """End a call whose name was not known before its end; it is text if it is not a call."""
        try:
            function, arguments = self._reader.held_call()
        except (BadCall, ValueError, RecursionError):
            function, arguments = "", ""
        if not function or (self._tools is not None and function not in self._tools):
            if complete:
                self._flag(Flaw.UNKNOWN_TOOL if function else Flaw.CALL_WITHOUT_RECIPIENT)
            self._write(text.strip("\n"))
            return
        self._open_call(function)
        self._say_arguments(arguments)
        if complete and not is_json(arguments):
            self._flag(Flaw.BAD_ARGUMENTS)
        self._end(complete=complete)
        self._num_skipped = 0
