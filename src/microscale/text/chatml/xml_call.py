"""Calls as XML tags, as Qwen 3.5, Qwen 3.6 and Qwen3-Coder write them.

    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    <parameter=days>
    3
    </parameter>
    </function>

The tags are plain text. A text value is literal, up to a line break and its closing tag, and is passed on as it
arrives. Other values are JSON, passed on when complete; the schema of the function's parameters decides which is which.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum

from microscale.text.chatml.call import MAX_HEAD_CHARS, CallReader, CallStyle, Tools
from microscale.text.chatml.json_call import fields_of, whole_call
from microscale.text.chatml.xml_grammar import CLOSE, END, call_grammar, why_not_strict
from microscale.text.chatml.xml_schema import NO_TYPES, TEXT, as_json, as_mapping, as_text, resolved, value_types
from microscale.text.conversation import ToolCall
from microscale.text.json_text import BadCall
from microscale.text.stop import begin_of

MARK = "<function="
"""Templates of models with this style contain it."""
OPEN = "<parameter="

_HEAD = re.compile(rf"\s*{MARK}([A-Za-z0-9_.:-]{{1,128}})>")
_OPEN = re.compile(rf"\s*{OPEN}([^>\n]{{0,{MAX_HEAD_CHARS}}})>")
_END = re.compile(rf"\s*{END}")


class State(Enum):
    HEAD = 0
    BETWEEN = 1
    """Between parameters."""
    OPENED = 2
    """After a parameter's opening tag."""
    VALUE = 3
    OVER = 4
    """After the call, or in text that is not one."""


class XmlCallReader(CallReader):
    def __init__(self, tools: Tools | None) -> None:
        super().__init__(tools)
        self._state = State.HEAD
        self._buffer = ""
        """Text whose meaning is not yet known."""
        self._rest: list[str] = []
        self._schema: Mapping[str, object] = {}
        self._begun = "{"
        """What comes before the next parameter's name."""
        self._types = NO_TYPES
        self._close = CLOSE
        self._value: list[str] = []
        """The value so far, unless it is passed on as it arrives."""

    @property
    def in_text(self) -> bool:
        return self._state in (State.OPENED, State.VALUE)

    @property
    def rest(self) -> str:
        return "".join(self._rest) + (self._buffer if self.function is None else "")

    @property
    def ends_well(self) -> bool:
        return self.is_whole and not self.rest.strip()

    def feed(self, text: str) -> str:
        self._buffer += text
        steps = {
            State.HEAD: self._read_head,
            State.BETWEEN: self._read_tag,
            State.OPENED: self._read_opened,
            State.VALUE: self._read_value,
        }
        added: list[str] = []
        while self._state is not State.OVER:
            state = self._state
            added.append(steps[state]())
            if self._state is state:
                return "".join(added)
        self._rest.append(self._buffer)
        self._buffer = ""
        return "".join(added)

    def finish(self, *, complete: bool) -> str:
        if self._state is State.BETWEEN:
            self._rest.append(self._buffer)
        elif self.in_text:
            # The line break before the end belongs to a tag that is missing.
            text = self._buffer.removesuffix("\n") if complete else self._buffer
            self._value.append(text)
            text = "".join(self._value)
            if self._is_passed_on:
                added = as_text(text)[1 : None if complete else -1]
            else:
                added = as_json(text, self._types) if complete else text
            return added + "}" * complete
        return (self._begun.removesuffix(", ") + "}") * complete if not self.is_whole else ""

    def held_call(self) -> tuple[str, str]:
        """A call in the other style, which such models sometimes write, or one of a function that was not offered."""
        head = _HEAD.match(self.rest)
        return whole_call(self.rest) if head is None else (head[1], "")

    # Each step reads from the buffer, returns what it adds to the arguments, and changes the state if it is done.

    def _read_head(self) -> str:
        match = _HEAD.match(self._buffer)
        if match is not None and (self._tools is None or match[1] in self._tools):
            self.function = match[1]
            self._schema = (self._tools or {}).get(match[1]) or {}
            self._buffer = self._buffer[match.end() :]
            self._state = State.BETWEEN
        elif match is not None or len(self._buffer) > MAX_HEAD_CHARS:
            self._state = State.OVER
        return ""

    def _read_tag(self) -> str:
        while True:
            if match := _END.match(self._buffer):
                self._buffer = self._buffer[match.end() :]
                self._state, self.is_whole = State.OVER, True
                return self._begun.removesuffix(", ") + "}"
            if match := _OPEN.match(self._buffer):
                self._buffer = self._buffer[match.end() :]
                return self._open(match[1])
            text = self._buffer.lstrip()
            is_tag = text.startswith(OPEN) and "\n" not in text and len(text) <= len(OPEN) + MAX_HEAD_CHARS
            if is_tag or OPEN.startswith(text) or END.startswith(text):
                return ""
            # Text between the tags, without the space before what follows.
            at = text.find("<", 1)
            text = text if at < 0 else text[:at]
            cut = self._buffer.index(text) + len(text.rstrip())
            self._rest.append(self._buffer[:cut])
            self._buffer = self._buffer[cut:]

    def _open(self, parameter: str) -> str:
        self._state, self._value = State.OPENED, []
        schema = resolved(self._schema, self._schema)
        known = as_mapping(schema.get("properties"))
        self._types = value_types(known.get(parameter, schema.get("additionalProperties")), self._schema)
        begun, self._begun = self._begun, ", "
        return f"{begun}{as_text(parameter)}: " + '"' * self._is_passed_on

    def _read_opened(self) -> str:
        text = self._buffer
        if text == CLOSE or not CLOSE.startswith(text):
            # A value on the tag's own line ends on it too.
            self._close = CLOSE if text.startswith("\n") else CLOSE.strip()
            self._buffer = text if text.startswith(CLOSE) else text.removeprefix("\n")
            self._state = State.VALUE
        return ""

    def _read_value(self) -> str:
        at = self._buffer.find(self._close)
        cut = begin_of(self._close, self._buffer) if at < 0 else at
        text = self._buffer[:cut]
        self._buffer = self._buffer[cut + (0 if at < 0 else len(self._close)) :]
        if at >= 0:
            self._state = State.BETWEEN
        if self._is_passed_on:
            return as_text(text)[1 : -1 if at < 0 else None]
        self._value.append(text)
        return "" if at < 0 else as_json("".join(self._value), self._types)

    @property
    def _is_passed_on(self) -> bool:
        return self._types == {TEXT}


def call_text(call: ToolCall) -> str:
    lines = [f"{MARK}{call.name}>"]
    for name, value in fields_of(with_object(call).arguments or "{}").items():
        text = json.loads(value) if value.startswith('"') else value
        lines += [f"{OPEN}{name}>", text + CLOSE]
    return "\n".join([*lines, END])


def with_object(call: ToolCall) -> ToolCall:
    """Templates go through the arguments one by one. Those of a call that was cut become one parameter."""
    try:
        fields_of(call.arguments or "{}")
    except BadCall:
        return replace(call, arguments=json.dumps({"arguments": call.arguments}))
    return call


XML = CallStyle(XmlCallReader, call_text, call_grammar, why_not_strict, with_object)
