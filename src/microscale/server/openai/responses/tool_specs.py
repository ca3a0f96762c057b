"""The tools and the ``tool_choice`` of a Responses request, by type.

Types that run on OpenAI's machines, and unknown types, are ignored and named in the reply.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from microscale.server.requests.base import MANY, Body

HINTS: Mapping[str, str] = {
    "defer_loading": "every tool is in the prompt from the beginning",
    "allowed_callers": "only the model itself calls tools",
    "async": "results arrive with the next request",
    "output_schema": "describes results, which the model reads unchanged",
}


class FunctionTool(Body):
    HARMLESS = HINTS

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class InputFormat(Body):
    """The format of a custom tool's input: text, or text that follows a grammar."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class CustomTool(Body):
    """A function whose only argument is a text."""

    HARMLESS = HINTS

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: InputFormat | None = None

    def ignored_values(self) -> Iterable[str]:
        # The prompt describes the grammar, but it is not enforced.
        return ["format"] if self.format is not None and self.format.type != "text" else []


class Environment(Body):
    type: str


class BuiltInTool(Body):
    """A tool that models are trained on and that the client runs."""

    type: Literal["local_shell", "shell", "apply_patch"]
    environment: Environment | None = None


def _only_type(value: object) -> object:
    """Drops all other keys, so that they are not reported one by one."""
    return {"type": value["type"]} if isinstance(value, dict) and isinstance(value.get("type"), str) else value


class PassedTool(Body):
    """A tool that cannot run here: ignored."""

    type: str

    def ignored_values(self) -> Iterable[str]:
        return [self.type]


Passed = Annotated[PassedTool, BeforeValidator(_only_type), Tag("Passed")]
NAMES = {"function": "Function", "custom": "Custom"}
BUILT_IN = ("local_shell", "shell", "apply_patch")


def _nested_kind(value: object) -> str:
    """The variant, by type; variant names do not appear in the paths of errors."""
    kind = value.get("type") if isinstance(value, dict) else None
    return NAMES.get(kind, "Passed") if isinstance(kind, str) else "Function"


NestedTool = Annotated[
    Annotated[FunctionTool, Tag("Function")] | Annotated[CustomTool, Tag("Custom")] | Passed,
    Discriminator(_nested_kind),
]


class NamespaceTool(Body):
    """Several tools under a common name."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Annotated[list[NestedTool], Field(max_length=MANY, fail_fast=True)]


def _tool_kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "namespace":
        return "Namespace"
    if kind in BUILT_IN:
        # A shell in a container runs at OpenAI; the client's own is local, or has no environment.
        place = value.get("environment") if isinstance(value, dict) else None
        is_hosted = isinstance(place, dict) and place.get("type") != "local"
        return "Passed" if is_hosted else "BuiltIn"
    return _nested_kind(value)


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("Function")]
    | Annotated[CustomTool, Tag("Custom")]
    | Annotated[NamespaceTool, Tag("Namespace")]
    | Annotated[BuiltInTool, Tag("BuiltIn")]
    | Passed,
    Discriminator(_tool_kind),
]
ResponseTools = Annotated[list[ResponseTool], Field(max_length=MANY, fail_fast=True)]


# ---- the choice between them -----------------------------------------------------------------------------------------


class NamedChoice(Body):
    """Requires a call of this tool. Built-in tools have a type but no name."""

    type: str
    name: str | None = None
    namespace: str | None = None


class AllowedChoice(Body):
    """Allows some of the tools, as if there were no others."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(max_length=MANY, fail_fast=True)]


def _choice_kind(value: object) -> str:
    if not isinstance(value, dict):
        return "Word"
    return "Allowed" if value.get("type") == "allowed_tools" else "Named"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("Word")]
    | Annotated[AllowedChoice, Tag("Allowed")]
    | Annotated[NamedChoice, Tag("Named")],
    Discriminator(_choice_kind),
]
