"""Calls as JSON objects, as Qwen 3 and Hermes models write them.

    {"name": "get_weather", "arguments": {"city": "Paris"}}

In this order, arguments are passed on token by token, as the model writes them. A call in another order is held back
until it is complete. Other fields are ignored.
"""

from __future__ import annotations

import json
import re

from microscale.text.chatml.call import MAX_HEAD_CHARS, CallGrammar, CallReader, CallStyle, Tools
from microscale.text.conversation import ToolCall
from microscale.text.grammar import Schema, named
from microscale.text.json_text import BadCall, is_json

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([A-Za-z0-9_.:-]{1,128})"\s*,\s*"arguments"\s*:\s*(?=\{)')
_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')
_SPACE = re.compile(r"[ \t\r\n]*")


class JsonCallReader(CallReader):
    def __init__(self, tools: Tools | None) -> None:
        super().__init__(tools)
        self._held: list[str] = []
        self._num_held = 0
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    @property
    def in_text(self) -> bool:
        return self._in_string

    @property
    def rest(self) -> str:
        """With the brace that closes the call, after the arguments."""
        return "".join(self._held)

    @property
    def left(self) -> str:
        return self.rest.strip().removeprefix("}").strip()

    @property
    def ends_well(self) -> bool:
        return self.is_whole and is_json('{"":0' + self.rest)

    def feed(self, text: str) -> str:
        if self.function is None:
            text = self._look_for_head(text)
        if self.function is None or self.is_whole:
            self._hold(text)
            return ""
        end = self._end_in(text)
        if end is None:
            return text
        self.is_whole = True
        self._hold(text[end:])
        return text[:end]

    def finish(self, *, complete: bool) -> str:
        return ""

    def held_call(self) -> tuple[str, str]:
        return whole_call(self.rest)

    def _look_for_head(self, text: str) -> str:
        """The text that is not yet held; once the arguments begin, only theirs."""
        if self._num_held > MAX_HEAD_CHARS:
            return text
        text = self.rest + text
        self._held, self._num_held = [], 0
        match = _HEAD.match(text)
        if match is None or (self._tools is not None and match[1] not in self._tools):
            return text
        self.function = match[1]
        return text[match.end() :]

    def _hold(self, text: str) -> None:
        self._held.append(text)
        self._num_held += len(text)

    def _end_in(self, text: str) -> int | None:
        """Where the arguments end in a text; ``None`` if they continue after it."""
        at = 0
        if self._is_escaped:
            self._is_escaped, at = False, 1
        while match := (_IN_STRING if self._in_string else _OUTSIDE).search(text, at):
            at = match.end()
            if match[0] == '"':
                self._in_string = not self._in_string
            elif match[0] == "\\":
                self._is_escaped = at == len(text)
                at += 1
            else:
                self._depth += 1 if match[0] in "{[" else -1
                if self._depth == 0:
                    return at
        return None


def whole_call(text: str) -> tuple[str, str]:
    """The function and the arguments of a call whose fields are in any order.

    Missing arguments are empty; arguments in a string, as clients send them, are decoded.
    """
    fields = fields_of(text)
    name = json.loads(fields.get("name", "null"))
    if not isinstance(name, str) or not name:
        raise BadCall("no name")
    arguments = fields.get("arguments", "null")
    if arguments == "null":
        return name, "{}"
    return name, json.loads(arguments) if arguments.startswith('"') else arguments


def fields_of(text: str) -> dict[str, str]:
    """The fields of a JSON object, each value as it was written."""
    # Numbers stay text: Python does not parse integers of more than 4,300 digits.
    decoder = json.JSONDecoder(parse_int=str, parse_float=str)
    if not is_json(text) or not text.lstrip().startswith("{"):
        raise BadCall("not a JSON object")
    fields: dict[str, str] = {}
    at = text.index("{") + 1
    while text[(at := _past_space(text, at))] != "}":
        key, at = decoder.raw_decode(text, _past_space(text, at + (text[at] == ",")))
        begin = _past_space(text, text.index(":", at) + 1)
        _, at = decoder.raw_decode(text, begin)
        fields[key] = text[begin:at]
    return fields


def _past_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def call_text(call: ToolCall) -> str:
    """A call with unchanged arguments."""
    return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {call.arguments or "{}"}}}'


def call_grammar(number: int, function: str, form: Schema) -> CallGrammar:
    head = json.dumps(f'{{"name": {json.dumps(function)}, "arguments": ')
    return CallGrammar(f'{head} @arguments_{number} "}}"', forms=[named(f"arguments_{number}", form)])


JSON = CallStyle(JsonCallReader, call_text, call_grammar, lambda form: None, lambda call: call)
