"""The tools of a Responses request as functions for the model, and the way back from its calls.

function, namespace ── as they are ─────────────────► function_call
custom ─────────────── one text, "input" ───────────► custom_tool_call
local_shell, shell, apply_patch ── fixed schemas ───► local_shell_call, shell_call, apply_patch_call
all others ─────────── ignored
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any, Literal

from microscale.server import error_texts
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
from microscale.server.options import RequestLimits
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
"""Descriptions and argument schemas of the built-in tools, which clients send without."""


@dataclass(frozen=True)
class OfferedTool:
    """One tool that the model may call."""

    kind: ToolKind
    name: str
    """The client's name for it."""
    namespace: str | None
    spec: ToolSpec
    """As described to the model. The model calls the tool by the name in it."""
    where: str
    """Its path in the request, for errors."""

    @property
    def model_name(self) -> str:
        return self.spec.function.name


class Toolbox:
    """One request's tools, and those that ``tool_choice`` allows."""

    def __init__(
        self, tools: Sequence[ResponseTool], choice: ToolChoice | None = None, most: int = RequestLimits.max_tools
    ) -> None:
        """``most``: maximum number of tools, and of tools named in a choice."""
        unwrapped = list(islice(_unwrapped(tools), most + 1))
        if len(unwrapped) > most:
            raise error_texts.too_many("or more tools", len(unwrapped), most, "tools")
        counts = Counter(tool.model_name for tool in unwrapped)
        self._all = [_with_namespace(tool) if counts[tool.model_name] > 1 else tool for tool in unwrapped]
        self._passed = {tool.type for tool in tools if isinstance(tool, PassedTool)}
        self.offered = self._all
        self.choice: Literal["none", "auto", "required"] | NamedTool | None = None
        if isinstance(choice, AllowedChoice):
            if len(choice.tools) > most:
                raise error_texts.too_long("tool_choice", len(choice.tools), "tools", most)
            self.offered, self.choice = self._allowed(choice), choice.mode
        elif isinstance(choice, NamedChoice):
            name = self._chosen(choice, "tool_choice").model_name
            self.choice = NamedTool(type="function", function=FunctionName(name=name))
        else:
            self.choice = choice
        self._by_model_name = {tool.model_name: tool for tool in self.offered}
        self._by_name = {(tool.namespace, tool.name): tool for tool in self._all}

    @property
    def specs(self) -> list[ToolSpec]:
        return [tool.spec for tool in self.offered]

    def tool_called(self, model_name: str) -> OfferedTool | None:
        """The tool that the model calls by this name."""
        return self._by_model_name.get(model_name)

    def model_name(self, name: str, namespace: str | None) -> str:
        """The model's name for the tool of an earlier call."""
        tool = self._by_name.get((namespace, name))
        return name if tool is None else tool.model_name

    def _allowed(self, choice: AllowedChoice) -> list[OfferedTool]:
        places = [
            self._chosen(named, f"tool_choice.tools[{number}]").where
            for number, named in enumerate(choice.tools)
            if named.type not in self._passed
        ]
        return [tool for tool in self._all if tool.where in places]

    def _chosen(self, choice: NamedChoice, where: str) -> OfferedTool:
        name = choice.type if choice.name is None else choice.name
        for tool in self._all:
            if tool.kind == choice.type and tool.name == name and choice.namespace in (None, tool.namespace):
                return tool
        if choice.type in ("function", "custom"):
            if choice.name is None:
                raise error_texts.tool_choice_without_name(where)
            raise error_texts.tool_not_in_tools(where, name)
        raise error_texts.tool_not_callable(where, choice.type)


def _with_namespace(tool: OfferedTool) -> OfferedTool:
    """Put the namespace into the model's name for a tool, since another tool has the same name."""
    if tool.namespace is None:
        return tool
    function = tool.spec.function.model_copy(update={"name": f"{tool.namespace}__{tool.name}"})
    spec = ToolSpec(type="function", function=function)
    return OfferedTool(tool.kind, tool.name, tool.namespace, spec, tool.where)


def _unwrapped(tools: Sequence[ResponseTool]) -> Iterator[OfferedTool]:
    for at, tool in enumerate(tools):
        where = f"tools[{at}]"
        if isinstance(tool, NamespaceTool):
            about = f"One of the tools of {tool.name}: {tool.description}" if tool.description else ""
            for below, nested in enumerate(tool.tools):
                if not isinstance(nested, PassedTool):
                    yield _offered(nested, f"{where}.tools[{below}]", tool.name, about)
                    about = ""  # only in the first description
        elif isinstance(tool, BuiltInTool):
            kind = ToolKind(tool.type)
            about, schema = BUILT_IN[kind]
            yield OfferedTool(kind, tool.type, None, _spec(tool.type, about, schema, False), where)
        elif not isinstance(tool, PassedTool):
            yield _offered(tool, where, None, "")


def _offered(tool: FunctionTool | CustomTool, where: str, namespace: str | None, about: str) -> OfferedTool:
    if isinstance(tool, CustomTool):
        texts = [tool.description, about, "" if tool.format is None else _grammar_text(tool.format)]
        spec = _spec(tool.name, _joined(texts), CUSTOM_INPUT, False)
        return OfferedTool(ToolKind.CUSTOM, tool.name, namespace, spec, where)
    description = _joined([tool.description, about]) if about else tool.description
    spec = _spec(tool.name, description, tool.parameters, tool.strict)
    return OfferedTool(ToolKind.FUNCTION, tool.name, namespace, spec, where)


def _spec(name: str, description: str | None, schema: dict[str, Any] | None, strict: bool | None) -> ToolSpec:
    function = Function(name=name, description=description, parameters=schema, strict=strict)
    return ToolSpec(type="function", function=function)


def _grammar_text(wanted: InputFormat) -> str:
    """The description of an input grammar."""
    if not wanted.definition:
        return ""
    return f"The input must match this {wanted.syntax or wanted.type} grammar:\n{wanted.definition}"


def _joined(texts: Sequence[str | None]) -> str:
    return "\n\n".join(text for text in texts if text)
