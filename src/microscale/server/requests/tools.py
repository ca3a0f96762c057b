"""Tools that a model may call, and the choice of one."""

from __future__ import annotations

from typing import Any, Literal

from microscale.server.requests.body import Body


class Function(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName
