"""The tools of a Responses request as the functions that a model hears of, and the way back from its calls.

function, namespace ── as they are ─────────────────► function_call
custom ─────────────── one text, "input" ───────────► custom_tool_call
local_shell, shell, apply_patch ── fixed schemas ───► local_shell_call, shell_call, apply_patch_call
all others ─────────── passed over
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any, Literal

from microscale.server.http.error_replies import BadField
from microscale.server.openai.responses.tool_specs import (
    AllowedChoice,
    BuiltInTool,
    CustomTool,
    FunctionTool,
    InputFormat,
    NamedChoice,
    NamespaceTool,
    PassedTool,
    ResponseTool,
    ToolChoice,
)
from microscale.server.options import Limits
from microscale.server.requests.chat import Function, FunctionName, NamedTool, ToolSpec


class ToolKind(StrEnum):
    FUNCTION = "function"
    CUSTOM = "custom"
    LOCAL_SHELL = "local_shell"
    SHELL = "shell"
    APPLY_PATCH = "apply_patch"


CUSTOM_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The whole input, as text."}},
    "required": ["input"],
    "additionalProperties": False,
}
_STRINGS = {"type": "array", "items": {"type": "string"}}
_TIMEOUT = {"type": "integer", "description": "Milliseconds after which it is stopped."}
BUILT_IN: dict[ToolKind, tuple[str, dict[str, Any]]] = {
    ToolKind.LOCAL_SHELL: (
        "Runs a command on the user's machine and returns its output.",
        {
            "type": "object",
            "properties": {
                "command": _STRINGS | {"description": 'The program and its arguments: ["bash", "-lc", "ls"].'},
                "working_directory": {"type": "string"},
                "timeout_ms": _TIMEOUT,
                "env": {"type": "object", "additionalProperties": {"type": "string"}},
            },
            "required": ["command"],
        },
    ),
    ToolKind.SHELL: (
        "Runs shell commands on the user's machine and returns their outputs.",
        {
            "type": "object",
            "properties": {
                "commands": _STRINGS | {"description": "Lines for the shell."},
                "timeout_ms": _TIMEOUT,
                "max_output_length": {"type": "integer", "description": "Characters of output to return at most."},
            },
            "required": ["commands"],
        },
    ),
    ToolKind.APPLY_PATCH: (
        "Creates, updates or deletes one file on the user's machine.",
        {
            "type": "object",
            "properties": {
                "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
                "path": {"type": "string"},
                "diff": {"type": "string", "description": "A V4A diff; not for delete_file."},
            },
            "required": ["type", "path"],
        },
    ),
}
"""What the model hears of the tools that have no description of their own, and the schemas of their arguments."""


@dataclass(frozen=True)
class Offered:
    """One tool."""

    kind: ToolKind
    name: str
    """The client's name for it."""
    namespace: str | None
    spec: ToolSpec
    """As the model hears of it. Its name here is the one in the model's calls."""
    where: str
    """The place in the request."""

    @property
    def heard(self) -> str:
        return self.spec.function.name


class Toolbox:
    """One request's tools, and what ``tool_choice`` leaves of them."""

    def __init__(
        self, tools: Sequence[ResponseTool], choice: ToolChoice | None = None, most: int = Limits.max_tools
    ) -> None:
        """``most``: as many tools are taken, and as many named in a choice."""
        found = list(islice(_unwrapped(tools), most + 1))
        if len(found) > most:
            raise BadField(f"There are more than {most} tools; at most so many are taken.", "tools")
        counts = Counter(tool.heard for tool in found)
        self._all = [_told_apart(tool) if counts[tool.heard] > 1 else tool for tool in found]
        self._passed = {tool.type for tool in tools if isinstance(tool, PassedTool)}
        self.offered = self._all
        self.choice: Literal["none", "auto", "required"] | NamedTool | None = None
        if isinstance(choice, AllowedChoice):
            if len(choice.tools) > most:
                raise BadField(f"tool_choice names more than {most} tools.", "tool_choice")
            self.offered, self.choice = self._allowed(choice), choice.mode
        elif isinstance(choice, NamedChoice):
            heard = self._chosen(choice, "tool_choice").heard
            self.choice = NamedTool(type="function", function=FunctionName(name=heard))
        else:
            self.choice = choice
        self._by_heard = {tool.heard: tool for tool in self.offered}
        self._by_name = {(tool.namespace, tool.name): tool for tool in self._all}

    @property
    def specs(self) -> list[ToolSpec]:
        return [tool.spec for tool in self.offered]

    def called(self, heard: str) -> Offered | None:
        """The tool that the model calls by this name."""
        return self._by_heard.get(heard)

    def heard(self, name: str, namespace: str | None) -> str:
        """The model's name for the tool of an earlier call."""
        tool = self._by_name.get((namespace, name))
        return name if tool is None else tool.heard

    def _allowed(self, choice: AllowedChoice) -> list[Offered]:
        places = [
            self._chosen(named, f"tool_choice.tools[{number}]").where
            for number, named in enumerate(choice.tools)
            if named.type not in self._passed
        ]
        return [tool for tool in self._all if tool.where in places]

    def _chosen(self, choice: NamedChoice, where: str) -> Offered:
        name = choice.type if choice.name is None else choice.name
        for tool in self._all:
            if tool.kind == choice.type and tool.name == name and choice.namespace in (None, tool.namespace):
                return tool
        if choice.type in ("function", "custom"):
            told = "no name" if choice.name is None else f"{name[:64]!r}, which is not in tools"
            raise BadField(f"{where} names {told}.", where)
        why = "is not run here: functions, custom tools and the client's own shell can be called"
        raise BadField(f"{where}: {choice.type[:64]!r} {why}.", where, "unsupported_value")


def _told_apart(tool: Offered) -> Offered:
    """With its namespace in its name: another has the same one."""
    if tool.namespace is None:
        return tool
    function = tool.spec.function.model_copy(update={"name": f"{tool.namespace}__{tool.name}"})
    spec = ToolSpec(type="function", function=function)
    return Offered(tool.kind, tool.name, tool.namespace, spec, tool.where)


def _unwrapped(tools: Sequence[ResponseTool]) -> Iterator[Offered]:
    for at, tool in enumerate(tools):
        where = f"tools[{at}]"
        if isinstance(tool, NamespaceTool):
            about = f"One of the tools of {tool.name}: {tool.description}" if tool.description else ""
            for below, nested in enumerate(tool.tools):
                if not isinstance(nested, PassedTool):
                    yield _offered(nested, f"{where}.tools[{below}]", tool.name, about)
                    about = ""  # said once
        elif isinstance(tool, BuiltInTool):
            kind = ToolKind(tool.type)
            about, schema = BUILT_IN[kind]
            yield Offered(kind, tool.type, None, _spec(tool.type, about, schema, False), where)
        elif not isinstance(tool, PassedTool):
            yield _offered(tool, where, None, "")


def _offered(tool: FunctionTool | CustomTool, where: str, namespace: str | None, about: str) -> Offered:
    if isinstance(tool, CustomTool):
        texts = [tool.description, about, "" if tool.format is None else _told(tool.format)]
        spec = _spec(tool.name, _joined(texts), CUSTOM_INPUT, False)
        return Offered(ToolKind.CUSTOM, tool.name, namespace, spec, where)
    description = _joined([tool.description, about]) if about else tool.description
    spec = _spec(tool.name, description, tool.parameters, tool.strict)
    return Offered(ToolKind.FUNCTION, tool.name, namespace, spec, where)


def _spec(name: str, description: str | None, schema: dict[str, Any] | None, strict: bool | None) -> ToolSpec:
    function = Function(name=name, description=description, parameters=schema, strict=strict)
    return ToolSpec(type="function", function=function)


def _told(wanted: InputFormat) -> str:
    """A grammar, in words."""
    if not wanted.definition:
        return ""
    return f"The input must match this {wanted.syntax or wanted.type} grammar:\n{wanted.definition}"


def _joined(texts: Sequence[str | None]) -> str:
    return "\n\n".join(text for text in texts if text)
