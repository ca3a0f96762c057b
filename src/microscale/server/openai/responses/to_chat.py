"""Converts a Responses request to chat fields: items become messages."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
from pydantic import TypeAdapter

from microscale.server import error_texts
from microscale.server.http.encoding import encode
from microscale.server.openai.responses.input_items import (
    AnyItem,
    BuiltInCallItem,
    BuiltInOutputItem,
    CallItem,
    CallOutputItem,
    CustomCallItem,
    InputMessage,
    Item,
    PassedItem,
    ReasoningItem,
    Reference,
    TextOrParts,
)
from microscale.server.openai.responses.replies import ReplyItem
from microscale.server.openai.responses.request import ResponsesRequest
from microscale.server.openai.responses.store import ResponseStore, StoredItem
from microscale.server.openai.responses.tool_calls import arguments_of, custom_arguments
from microscale.server.openai.responses.toolbox import Toolbox
from microscale.server.requests.chat import ChatFields, ChatMessage, MessageBuilder, TextMessage, ToolMessage

ITEM: TypeAdapter[Any] = TypeAdapter(AnyItem)
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


# ---- items -----------------------------------------------------------------------------------------------------------


def new_items(
    request: ResponsesRequest, before: Sequence[StoredItem], store: ResponseStore, owner: str
) -> list[StoredItem]:
    """What the request adds to the conversation. Raises for a reference to an unknown item."""
    if isinstance(request.input, str):
        return [stored_input(InputMessage(role="user", content=request.input))]
    known = {item.id for item in before}
    items = []
    for item in request.input:
        if isinstance(item, Reference):
            # An item of the previous response is already in its place.
            if item.id not in known:
                items.append(store.item(item.id, owner))
        elif not isinstance(item, PassedItem):
            items.append(stored_input(item))
    return items


def stored_input(item: Item) -> StoredItem:
    item_id = item.id or f"{PREFIXES.get(item.type or 'message', 'item')}_{secrets.token_hex(12)}"
    return StoredItem(item_id, item, _size(item), is_ours=item.id is None)


def reply_items(items: Sequence[ReplyItem]) -> list[StoredItem]:
    """What a response adds to the conversation."""
    parsed: list[Item] = [ITEM.validate_python(msgspec.to_builtins(item)) for item in items]
    return [StoredItem(reply.id, item, _size(item), is_ours=True) for reply, item in zip(items, parsed, strict=True)]


def _size(item: Item) -> int:
    """Approximate bytes of an item in memory: its text, and the overhead of objects."""
    return 1024 + 4 * len(encode(shown(item)))


def shown(item: Item) -> dict[str, Any]:
    """An item as it was sent."""
    return item.model_dump(mode="json", by_alias=True, exclude_unset=True)


# ---- messages --------------------------------------------------------------------------------------------------------


class ItemConverter:
    """Converts items to messages, one at a time."""

    def __init__(self, toolbox: Toolbox) -> None:
        self._toolbox = toolbox
        self._builder = MessageBuilder()
        self._call_ids: dict[str, str] = {}
        """Item id → call id: a local shell's result may name either."""

    def add(self, item: Item) -> None:
        builder = self._builder
        if isinstance(item, CallItem):
            builder.call(item.call_id, self._toolbox.model_name(item.name, item.namespace), item.arguments)
        elif isinstance(item, CustomCallItem):
            name = self._toolbox.model_name(item.name, item.namespace)
            builder.call(item.call_id, name, custom_arguments(item.input))
        elif isinstance(item, BuiltInCallItem):
            kind = item.type.removesuffix("_call")
            call_id = item.call_id or item.id or ""
            self._call_ids[item.id or ""] = call_id
            builder.call(call_id, kind, arguments_of(kind, item.action or item.operation or {}))
        elif isinstance(item, CallOutputItem):
            builder.add(ToolMessage(role="tool", content=_text(item.output), tool_call_id=item.call_id))
        elif isinstance(item, BuiltInOutputItem):
            answered = item.call_id or self._call_ids.get(item.id or "", item.id)
            builder.add(ToolMessage(role="tool", content=_result(item), tool_call_id=answered))
        elif isinstance(item, ReasoningItem):
            builder.think(item.text)
        elif item.role == "assistant":
            builder.say(_text(item.content))
        else:
            builder.add(TextMessage(role=item.role, content=_text(item.content)))

    def messages(self) -> list[ChatMessage]:
        return self._builder.messages()


def messages_of(items: Sequence[StoredItem], toolbox: Toolbox) -> list[ChatMessage]:
    builder = ItemConverter(toolbox)
    for stored in items:
        builder.add(stored.item)
    return builder.messages()


def _text(content: TextOrParts) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _result(item: BuiltInOutputItem) -> str:
    """What a shell or a patch returned, as the client reports it."""
    if isinstance(item.output, str):
        return item.output
    return (item.status or "") if item.output is None else json.dumps(item.output, ensure_ascii=False)


# ---- the chat --------------------------------------------------------------------------------------------------------


def chat_fields(request: ResponsesRequest, messages: Sequence[ChatMessage], toolbox: Toolbox) -> ChatFields:
    instructions: list[ChatMessage] = []
    if request.instructions:
        instructions.append(TextMessage(role="developer", content=request.instructions))
    if not instructions and not messages:
        raise error_texts.not_readable("input")
    wanted = None if request.reasoning is None else request.reasoning.effort
    return ChatFields(
        messages=[*instructions, *messages],
        tools=toolbox.specs or None,
        tool_choice=toolbox.choice,
        parallel_tool_calls=request.parallel_tool_calls,
        reasoning_effort="xhigh" if wanted == "max" else wanted,
        verbosity=None if request.text is None else request.text.verbosity,
    )
