"""Converts a call in Gemma 4's spelling to a function's name and JSON.

    call:get_weather{city:<|"|>Paris<|"|>,days:3,where:{zone:<|"|>EU<|"|>},tags:[<|"|>a<|"|>,true]}

Keys are bare, texts are between two quote tokens and are taken literally, everything else is as in JSON. Numbers keep
their digits. Models also write JSON's own quotes, which are accepted too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from microscale.text.json_text import BadCall

QUOTE = "\ud800"
"""Represents the quote token: half a surrogate pair, which cannot occur in a model's text, since UTF-8 excludes it."""
MAX_DEPTH = 64

_NAME = re.compile(r"\s*call:\s*([A-Za-z0-9_.:-]{1,128})\s*(?=\{)")
_BARE = re.compile(rf"[^,\]}}{QUOTE}]+")
_KEY = re.compile(rf"[^:{{}}\[\]{QUOTE}]+")
_JSON_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}


def split_call(text: str) -> tuple[str, str]:
    """The function's name, and the text of its arguments from the opening brace on."""
    match = _NAME.match(text)
    if match is None:
        raise BadCall("no call:name{")
    return match[1], text[match.end() :].rstrip()


def arguments_json(text: str) -> str:
    """Arguments as JSON text."""
    reader = _Reader(text)
    result = reader.value(0)
    reader.skip()
    if reader.at != len(text):
        raise BadCall(f"text after the arguments at {reader.at}")
    return result


class _Number(str):
    """A JSON number with its original digits."""


def call_text(name: str, arguments: str) -> str:
    """A call as the model writes it, from JSON: the inverse of ``split_call`` and ``arguments_json``."""
    try:
        value = json.loads(arguments or "{}", parse_int=_Number, parse_float=_Number)
    except (ValueError, RecursionError):
        value = None
    return f"call:{name}{_spelt(value) if isinstance(value, dict) else _without_quotes(arguments)}"


def _spelt(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{_spelt_key(key)}:{_spelt(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_spelt, value)) + "]"
    if isinstance(value, str) and not isinstance(value, _Number):
        return _between_quotes(value)
    return value if isinstance(value, _Number) else json.dumps(value)


def _spelt_key(key: str) -> str:
    return key if _KEY.fullmatch(key) and key == key.strip() and key[0] != '"' else _between_quotes(key)


def _between_quotes(text: str) -> str:
    return QUOTE + _without_quotes(text) + QUOTE


def _without_quotes(text: str) -> str:
    """A client's text may contain half a surrogate pair; no text may become a token."""
    return text.replace(QUOTE, "\ufffd")


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def skip(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def peek(self) -> str:
        self.skip()
        return self.text[self.at : self.at + 1]

    def take(self, char: str) -> None:
        if self.peek() != char:
            raise BadCall(f"{char!r} is missing at {self.at}")
        self.at += 1

    def value(self, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise BadCall("nested too deeply")
        char = self.peek()
        if char == "{":
            return "{" + self._list("{", "}", lambda: f"{self._key()}: {self.value(depth + 1)}") + "}"
        if char == "[":
            return "[" + self._list("[", "]", lambda: self.value(depth + 1)) + "]"
        return self._text() if char in (QUOTE, '"') else self._bare()

    def _list(self, first: str, last: str, entry: Callable[[], str]) -> str:
        self.take(first)
        entries: list[str] = []
        while self.peek() != last:
            if entries:
                self.take(",")
                if self.peek() == last:  # a comma too many
                    break
            entries.append(entry())
        self.take(last)
        return ", ".join(entries)

    def _key(self) -> str:
        if self.peek() in (QUOTE, '"'):
            name = self._text()
        else:
            match = _KEY.match(self.text, self.at)
            if match is None:
                raise BadCall(f"no key at {self.at}")
            self.at = match.end()
            name = json.dumps(match[0].strip(), ensure_ascii=False)
        self.take(":")
        return name

    def _text(self) -> str:
        if self.text[self.at] == '"':
            match = _JSON_TEXT.match(self.text, self.at)
            if match is None:
                raise BadCall(f"the text at {self.at} has no end")
            try:
                value = json.loads(match[0].replace(QUOTE, r"\""), strict=False)
            except ValueError as exc:
                raise BadCall(str(exc)) from None
            self.at = match.end()
            # Half a surrogate pair that the model wrote as an escape stays an escape: the text must be valid UTF-8.
            return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
        end = self.text.find(QUOTE, self.at + 1)
        if end < 0:
            raise BadCall(f"the text at {self.at} has no end")
        inner, self.at = self.text[self.at + 1 : end], end + 1
        return json.dumps(inner, ensure_ascii=False)

    def _bare(self) -> str:
        match = _BARE.match(self.text, self.at)
        word = "" if match is None else match[0].strip()
        if match is None or not word:
            raise BadCall(f"no value at {self.at}")
        self.at = match.end()
        if word in _WORDS:
            return _WORDS[word]
        # A text that the model forgot to quote.
        return word if _NUMBER.fullmatch(word) else json.dumps(word, ensure_ascii=False)
