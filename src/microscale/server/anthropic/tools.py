"""Converts Anthropic's tools and calls to chat fields, and back."""

from __future__ import annotations

import json
from typing import Any, Literal

from microscale.server import errors
from microscale.server.anthropic.request import ClientTool, CountRequest, HostedTool
from microscale.server.requests.chat import Function, FunctionName, NamedTool, ToolSpec

INVALID = "INVALID_JSON"
"""The key for tool input that is not a JSON object, from Anthropic's guide to streaming."""


def input_of(arguments: str) -> tuple[dict[str, Any], bool]:
    """A call's arguments as an object, and whether they were one."""
    if not arguments.strip():
        return {}, True
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return (value, True) if isinstance(value, dict) else ({INVALID: arguments}, False)


def arguments_of(value: dict[str, Any]) -> str:
    """A call's input as the model wrote it, or would have."""
    if len(value) == 1 and isinstance(text := value.get(INVALID), str):
        return text
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def custom_tools(request: CountRequest) -> list[tuple[int, ClientTool]]:
    return [(at, tool) for at, tool in enumerate(request.tools or ()) if isinstance(tool, ClientTool)]


def tool_specs(request: CountRequest) -> list[ToolSpec]:
    return [
        ToolSpec(
            type="function",
            function=Function(
                name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
            ),
        )
        for _, tool in custom_tools(request)
    ]


def tool_choice_of(request: CountRequest) -> Literal["none", "auto", "required"] | NamedTool | None:
    choice = request.tool_choice
    if choice is None:
        return None
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    name = choice.name or ""
    for tool in request.tools or ():
        if isinstance(tool, HostedTool) and name in (tool.name, tool.type):
            raise errors.hosted_tool_chosen(name)
    return NamedTool(type="function", function=FunctionName(name=name))


def eager_tools(request: CountRequest) -> frozenset[str]:
    """The tools whose input is streamed as it is written."""
    return frozenset(tool.name for _, tool in custom_tools(request) if tool.eager_input_streaming)
