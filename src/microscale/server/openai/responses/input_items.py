"""The items of a Responses request's ``input``, by type.

What a server has returned is sent back whole, with keys that say nothing to the model. An item that only OpenAI's own
tools make is passed over and named.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from microscale.server.requests.body import MANY, Body
from microscale.server.requests.fields import Name, only_text

SENT_BACK: Mapping[str, str] = {
    "status": "is what the server returned",
    "annotations": "is what the server returned",
    "logprobs": "is what the server returned",
    "parsed": "is what the client made of the text",
    "parsed_arguments": "is what the client made of the arguments",
    "phase": "is what other servers return",
    "caller": "is what other servers return",
    "created_by": "is what other servers return",
    "async": "is what other servers return",
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
    # By hand: an error is then of the parts, and not that they are no string.
    Discriminator(lambda value: "Parts" if isinstance(value, list) else "Text"),
]
ItemId = Annotated[str, Field(max_length=256)]


class InputItem(Body):
    HARMLESS = SENT_BACK

    id: ItemId | None = None
    """The client's or ours; ours can be referred to while the response is kept."""


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
    """What such a call returned. A local shell's result names its call by ``id``, the others by ``call_id``."""

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

    def passed_over(self) -> Iterable[str]:
        # Another server's thoughts, for that server's eyes.
        sealed = self.encrypted_content
        return ["encrypted_content"] if sealed and not self.content and unsealed(sealed) is None else []


class Reference(Body):
    """An item that was kept, by its id."""

    type: Literal["item_reference"] | None = None
    id: ItemId


def _only_type(value: object) -> object:
    """The rest of it is of no use, and is not named key by key."""
    return {"type": value["type"]} if isinstance(value, dict) and isinstance(value.get("type"), str) else value


class PassedItem(Body):
    """An item that says nothing to the model: of a tool that runs on another server."""

    type: str

    def passed_over(self) -> Iterable[str]:
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
    """By its type, under names that no path of an error shows."""
    if not isinstance(value, dict):
        return "Message"
    kind = value.get("type")
    if kind is None:
        # OpenAI lets a message and a reference go without.
        return "Reference" if "id" in value and not {"role", "content"} & value.keys() else "Message"
    return KINDS.get(kind, "Passed") if isinstance(kind, str) else "Message"


Item = InputMessage | CallItem | CustomCallItem | CallOutputItem | BuiltInCallItem | BuiltInOutputItem | ReasoningItem
"""What a conversation consists of. References and what is passed over are gone by then."""
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

# ---- thoughts for clients that keep nothing else ---------------------------------------------------------------------

SEAL = "microscale:"


def sealed(text: str) -> str:
    """Thoughts as ``encrypted_content``. The item shows them anyway, so this hides nothing: it is for clients that
    send back this field alone."""
    return SEAL + base64.b64encode(text.encode()).decode()


def unsealed(content: str) -> str | None:
    """``None`` for another server's."""
    if not content.startswith(SEAL):
        return None
    try:
        return base64.b64decode(content.removeprefix(SEAL), validate=True).decode()
    except (binascii.Error, ValueError):
        return None
