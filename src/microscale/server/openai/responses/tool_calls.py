"""Converts calls of custom and built-in tools between JSON arguments and items."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import msgspec
from msgspec import Struct

from microscale.server.openai.responses.toolbox import ToolKind

# ---- from the model --------------------------------------------------------------------------------------------------


class _LocalShell(Struct):
    command: list[str] | str
    env: dict[str, str] | None = None
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


class _Shell(Struct):
    commands: list[str] | str
    timeout_ms: int | None = None
    max_output_length: int | None = None


class _Patch(Struct):
    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str | None = None


def action_of(kind: ToolKind, arguments: str) -> dict[str, Any] | None:
    """The action that the client runs, or ``None`` if the arguments are not valid."""
    try:
        if kind is ToolKind.LOCAL_SHELL:
            return _exec(msgspec.json.decode(arguments, type=_LocalShell))
        if kind is ToolKind.SHELL:
            shell = msgspec.json.decode(arguments, type=_Shell)
            commands = [shell.commands] if isinstance(shell.commands, str) else shell.commands
            limits = {"timeout_ms": shell.timeout_ms, "max_output_length": shell.max_output_length}
            return {"commands": commands, **limits}
        patch = msgspec.json.decode(arguments, type=_Patch)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
    if patch.type == "delete_file":
        return {"type": patch.type, "path": patch.path}
    return None if patch.diff is None else {"type": patch.type, "path": patch.path, "diff": patch.diff}


def _exec(shell: _LocalShell) -> dict[str, Any]:
    command = ["bash", "-lc", shell.command] if isinstance(shell.command, str) else shell.command
    return {
        "type": "exec",
        "command": command,
        "env": shell.env or {},
        "timeout_ms": shell.timeout_ms,
        "user": shell.user,
        "working_directory": shell.working_directory,
    }


HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
WHOLE = re.compile(r'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u]|\\u(?=[0-9a-fA-F]{0,3}[^0-9a-fA-F]))*', re.DOTALL)
"""The part of a JSON string that can be decoded without what follows."""
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
HIGH = re.compile(r"(?<!\\)(?:\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}$")
MOST_HEAD = 256
"""If the text does not begin within this many characters, everything is read at the end."""
PLAIN = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "/": "/"}


class CustomInput:
    """Decodes the text in ``{"input": "..."}`` as its JSON arrives. Anything else is taken as the input itself."""

    def __init__(self) -> None:
        self._held = ""
        self._late: list[str] = []
        """Pieces after ``MOST_HEAD`` characters without a beginning."""
        self._in_string = False
        self._is_raw = False
        self._ended = False

    def feed(self, piece: str) -> str:
        """The text that is certain now."""
        if self._ended:
            return ""
        if self._is_raw:
            return piece
        if not self._in_string and len(self._held) > MOST_HEAD:
            self._late.append(piece)
            return ""
        self._held += piece
        if not self._in_string:
            head = HEAD.match(self._held)
            if head is None:
                return self._begun_raw()
            self._in_string = True
            self._held = self._held[head.end() :]
        return self._decoded()

    def finish(self) -> str:
        """What was held back."""
        held, self._held = "".join([self._held, *self._late]), ""
        if self._in_string:
            return "" if self._ended else _unescaped(held)
        try:
            given = json.loads(held)["input"]
        except (ValueError, TypeError, LookupError, RecursionError):
            return held
        return _clean(given) if isinstance(given, str) else held

    def _begun_raw(self) -> str:
        """Text that is not an object is the input itself; an object with another beginning is read at its end."""
        if not self._held.strip() or self._held.lstrip().startswith("{"):
            return ""
        self._is_raw = True
        text, self._held = self._held, ""
        return text

    def _decoded(self) -> str:
        match = WHOLE.match(self._held)
        assert match is not None  # the pattern also matches the empty string
        end = match.end()
        self._ended = self._held[end : end + 1] == '"'
        if not self._ended and (high := HIGH.search(self._held, 0, end)) is not None:
            end = high.start()  # half a character
        text, self._held = self._held[:end], self._held[end:]
        return _unescaped(text)


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text
    return _clean(ESCAPE.sub(lambda at: chr(int(at[1], 16)) if at[1] else PLAIN.get(at[2], at[0]), text))


def _clean(text: str) -> str:
    """Join pairs of surrogates; a lone one is replaced."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# ---- back to the model -----------------------------------------------------------------------------------------------

ACTION_KEYS = ("command", "commands", "working_directory", "timeout_ms", "max_output_length", "env", "user")


def arguments_of(kind: str, action: dict[str, Any]) -> str:
    """An earlier call's arguments, as the model could have written them."""
    if kind == ToolKind.APPLY_PATCH:
        kept = {name: action[name] for name in ("type", "path", "diff") if action.get(name) is not None}
    else:
        kept = {name: action[name] for name in ACTION_KEYS if action.get(name)}
    return json.dumps(kept, ensure_ascii=False)


def custom_arguments(text: str) -> str:
    return json.dumps({"input": text}, ensure_ascii=False)
