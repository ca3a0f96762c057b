"""The items of a Responses request's ``input``, by type.

Clients send back whole items, including keys that mean nothing to the model. Items that only OpenAI's own tools make
are ignored and named in the reply.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from microscale.server.requests.base import MANY, Body
from microscale.server.requests.fields import Name, only_text

SENT_BACK: Mapping[str, str] = {
    "status": "was returned by the server",
    "annotations": "was returned by the server",
    "logprobs": "was returned by the server",
    "parsed": "is the client's parse of the text",
    "parsed_arguments": "is the client's parse of the arguments",
    "phase": "is returned by other servers",
    "caller": "is returned by other servers",
    "created_by": "is returned by other servers",
    "async": "is returned by other servers",
}


class InputText(Body):
    HARMLESS = SENT_BACK

    type: Annotated[Literal["input_text", "output_text", "text"], BeforeValidator(only_text)]
    text: str


class Refusal(Body):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def _part_kind(value: object) -> str:
    return "Refusal" if isinstance(value, dict) and value.get("type") == "refusal" else "Text"


InputPart = Annotated[Annotated[InputText, Tag("Text")] | Annotated[Refusal, Tag("Refusal")], Discriminator(_part_kind)]
InputParts = Annotated[list[InputPart], Field(max_length=MANY, fail_fast=True)]
TextOrParts = Annotated[
    Annotated[str, Tag("Text")] | Annotated[InputParts, Tag("Parts")],
    # Explicit, so that errors are about the parts and not about a missing string.
    Discriminator(lambda value: "Parts" if isinstance(value, list) else "Text"),
]
ItemId = Annotated[str, Field(max_length=256)]


class InputItem(Body):
    HARMLESS = SENT_BACK

    id: ItemId | None = None
    """The client's id or ours; ours can be referred to while the response is stored."""


class InputMessage(InputItem):
    type: Literal["message"] | None = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: TextOrParts


class CallItem(InputItem):
    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str
    namespace: Name | None = None


class CustomCallItem(InputItem):
    type: Literal["custom_tool_call"]
    call_id: Name
    name: Name
    input: str
    namespace: Name | None = None


class CallOutputItem(InputItem):
    """What a function, or a custom tool, returned."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Name
    output: TextOrParts


class BuiltInCallItem(InputItem):
    """A call of a shell or of ``apply_patch``."""

    type: Literal["local_shell_call", "shell_call", "apply_patch_call"]
    call_id: Name | None = None
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None


class BuiltInOutputItem(InputItem):
    """What a built-in call returned. A local shell's result names its call by ``id``, the others by ``call_id``."""

    type: Literal["local_shell_call_output", "shell_call_output", "apply_patch_call_output"]
    call_id: Name | None = None
    output: str | list[Any] | None = None
    status: str | None = None


class ReasoningText(Body):
    type: Literal["reasoning_text", "summary_text"]
    text: str


ReasoningParts = Annotated[list[ReasoningText], Field(max_length=MANY, fail_fast=True)]


class ReasoningItem(InputItem):
    type: Literal["reasoning"]
    content: ReasoningParts | None = None
    summary: ReasoningParts | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        if self.content:
            return "\n".join(part.text for part in self.content)
        sealed = None if self.encrypted_content is None else unsealed(self.encrypted_content)
        return sealed or "\n".join(part.text for part in self.summary or [])

    def ignored_values(self) -> Iterable[str]:
        # Reasoning that only another server can read.
        sealed = self.encrypted_content
        return ["encrypted_content"] if sealed and not self.content and unsealed(sealed) is None else []


class Reference(Body):
    """A stored item, by its id."""

    type: Literal["item_reference"] | None = None
    id: ItemId


def _only_type(value: object) -> object:
    """Drops all other keys, so that they are not reported one by one."""
    return {"type": value["type"]} if isinstance(value, dict) and isinstance(value.get("type"), str) else value


class PassedItem(Body):
    """An item of a tool that runs on another server: ignored."""

    type: str

    def ignored_values(self) -> Iterable[str]:
        return [self.type]


KINDS = {
    "message": "Message",
    "function_call": "Call",
    "custom_tool_call": "CustomCall",
    "function_call_output": "CallOutput",
    "custom_tool_call_output": "CallOutput",
    "local_shell_call": "BuiltInCall",
    "shell_call": "BuiltInCall",
    "apply_patch_call": "BuiltInCall",
    "local_shell_call_output": "BuiltInOutput",
    "shell_call_output": "BuiltInOutput",
    "apply_patch_call_output": "BuiltInOutput",
    "reasoning": "Reasoning",
    "item_reference": "Reference",
}


def _item_kind(value: object) -> str:
    """The variant, by type; variant names do not appear in the paths of errors."""
    if not isinstance(value, dict):
        return "Message"
    kind = value.get("type")
    if kind is None:
        # OpenAI allows messages and references without a type.
        return "Reference" if "id" in value and not {"role", "content"} & value.keys() else "Message"
    return KINDS.get(kind, "Passed") if isinstance(kind, str) else "Message"


Item = InputMessage | CallItem | CustomCallItem | CallOutputItem | BuiltInCallItem | BuiltInOutputItem | ReasoningItem
"""What a conversation consists of, after references are resolved and ignored items removed."""
AnyItem = Annotated[
    Annotated[InputMessage, Tag("Message")]
    | Annotated[CallItem, Tag("Call")]
    | Annotated[CustomCallItem, Tag("CustomCall")]
    | Annotated[CallOutputItem, Tag("CallOutput")]
    | Annotated[BuiltInCallItem, Tag("BuiltInCall")]
    | Annotated[BuiltInOutputItem, Tag("BuiltInOutput")]
    | Annotated[ReasoningItem, Tag("Reasoning")]
    | Annotated[Reference, Tag("Reference")]
    | Annotated[PassedItem, BeforeValidator(_only_type), Tag("Passed")],
    Discriminator(_item_kind),
]

# ---- reasoning as encrypted_content ----------------------------------------------------------------------------------

SEAL = "microscale:"


def sealed(text: str) -> str:
    """Reasoning as ``encrypted_content``, for clients that send back only this field. It hides nothing: the item
    contains the same text."""
    return SEAL + base64.b64encode(text.encode()).decode()


def unsealed(content: str) -> str | None:
    """The reasoning, or ``None`` if another server made it."""
    if not content.startswith(SEAL):
        return None
    try:
        return base64.b64decode(content.removeprefix(SEAL), validate=True).decode()
    except (binascii.Error, ValueError):
        return None
