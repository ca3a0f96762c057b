"""Turns the deltas of one output into items and their events.

    output_item.added ── content_part.added ── *_text.delta … ── *_text.done ── content_part.done ── output_item.done
    output_item.added ── function_call_arguments.delta … ── function_call_arguments.done ── output_item.done
    output_item.added ── custom_tool_call_input.delta … ── custom_tool_call_input.done ── output_item.done
    output_item.added ── output_item.done  (a shell call, which is sent when it is complete)

One item is open at a time. Text of another kind closes it, and so does the end.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from microscale.server.openai.responses.input_items import sealed
from microscale.server.openai.responses.replies import (
    CallReplyItem,
    CustomCallReplyItem,
    Event,
    ItemEvent,
    MessageItem,
    OutputText,
    PartEvent,
    PatchCallItem,
    PieceEvent,
    ReasoningReplyItem,
    ReasoningReplyText,
    ReplyItem,
    ShellCallItem,
    Status,
)
from microscale.server.openai.responses.tool_calls import CustomInput, action_of
from microscale.server.openai.responses.toolbox import OfferedTool, Toolbox, ToolKind
from microscale.text.output import CallDelta, Delta

NAMES = {MessageItem: "output_text", ReasoningReplyItem: "reasoning_text"}
PREFIXES = {ToolKind.LOCAL_SHELL: "lsh", ToolKind.SHELL: "sh", ToolKind.APPLY_PATCH: "apc"}


class Items:
    """The items of one response."""

    def __init__(self, toolbox: Toolbox, *, seals: bool = False) -> None:
        """``seals``: reasoning is also returned as ``encrypted_content``."""
        self.items: list[ReplyItem] = []
        self._toolbox = toolbox
        self._seals = seals
        self._open: ReplyItem | None = None
        self._built_in: OfferedTool | None = None
        """The tool of a call that is sent when it is complete."""
        self._input = CustomInput()
        self._pieces: list[str] = []
        self._seen: set[type[ReplyItem]] = set()

    def add(self, delta: Delta, logprobs: Sequence[Any] = ()) -> Iterator[Event]:
        """The events of a delta. Encode each before taking the next: the items grow meanwhile."""
        if delta.reasoning:
            yield from self._text(ReasoningReplyItem, delta.reasoning)
        if delta.content:
            yield from self._text(MessageItem, delta.content, logprobs)
        elif logprobs and isinstance(self._open, MessageItem):
            # For a token whose text was in an earlier delta.
            self._open.content[0].logprobs += logprobs
        for call in delta.calls:
            yield from self._call(call)

    def close(self, status: Status) -> Iterator[Event]:
        """The last events of the open item."""
        if self._built_in is not None:
            yield from self._send_built_in(self._built_in, status)
        item, self._open = self._open, None
        if item is None:
            return
        if isinstance(item, CustomCallReplyItem):
            yield from self._more_input(item, self._input.finish())
        text, self._pieces = "".join(self._pieces), []
        item.status = status
        if isinstance(item, CallReplyItem):
            item.arguments = text
            yield self._piece(item, "function_call_arguments.done", arguments=text, name=item.name)
        elif isinstance(item, CustomCallReplyItem):
            item.input = text
            yield self._piece(item, "custom_tool_call_input.done", input=text)
        elif isinstance(item, MessageItem | ReasoningReplyItem):
            yield from self._end_text(item, text)
        yield ItemEvent(type="response.output_item.done", output_index=self._index, item=item)

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    # ---- text --------------------------------------------------------------------------------------------------------

    def _text(
        self, kind: type[MessageItem] | type[ReasoningReplyItem], text: str, logprobs: Sequence[Any] = ()
    ) -> Iterator[Event]:
        if self._built_in is not None or not isinstance(self._open, kind):
            yield from self.close("completed")
            if kind in self._seen:
                # Messages of one kind are separated by a line break; here they are separate items.
                text = text.removeprefix("\n")
            self._seen.add(kind)
            if kind is MessageItem:
                yield from self._begin(MessageItem(_new_id("msg"), "in_progress", []))
            else:
                yield from self._begin(ReasoningReplyItem(_new_id("rs"), "in_progress", []))
        self._pieces.append(text)
        item = self.items[-1]
        entries: list[Any] | UnsetType = UNSET
        if isinstance(item, MessageItem):
            entries = list(logprobs)
            item.content[0].logprobs += entries
        yield self._piece(item, NAMES[kind] + ".delta", content_index=0, delta=text, logprobs=entries)

    def _end_text(self, item: MessageItem | ReasoningReplyItem, text: str) -> Iterator[Event]:
        part = item.content[0]
        part.text = text
        if isinstance(item, ReasoningReplyItem) and self._seals:
            item.encrypted_content = sealed(text)
        logprobs: list[Any] | UnsetType = part.logprobs if isinstance(part, OutputText) else UNSET
        yield self._piece(item, NAMES[type(item)] + ".done", content_index=0, text=text, logprobs=logprobs)
        yield PartEvent(type="response.content_part.done", item_id=item.id, output_index=self._index, part=part)

    def _begin(self, item: ReplyItem) -> Iterator[Event]:
        self._open = item
        self.items.append(item)
        yield ItemEvent(type="response.output_item.added", output_index=self._index, item=item)
        if isinstance(item, MessageItem):
            item.content.append(OutputText(""))
        elif isinstance(item, ReasoningReplyItem):
            item.content.append(ReasoningReplyText(""))
        else:
            return
        part = item.content[0]
        yield PartEvent(type="response.content_part.added", item_id=item.id, output_index=self._index, part=part)

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _call(self, call: CallDelta) -> Iterator[Event]:
        if call.function is not None:
            yield from self.close("completed")
            yield from self._begin_call(call.function)
        if not call.arguments:
            return
        if isinstance(self._open, CustomCallReplyItem):
            yield from self._more_input(self._open, self._input.feed(call.arguments))
            return
        self._pieces.append(call.arguments)
        if self._built_in is None and isinstance(self._open, CallReplyItem):
            yield self._piece(self._open, "function_call_arguments.delta", delta=call.arguments)

    def _begin_call(self, function: str) -> Iterator[Event]:
        tool = self._toolbox.tool_called(function)
        name = function if tool is None else tool.name
        namespace: str | UnsetType = UNSET if tool is None or tool.namespace is None else tool.namespace
        if tool is None or tool.kind is ToolKind.FUNCTION:
            item = CallReplyItem(_new_id("fc"), "in_progress", _new_id("call"), name, "", namespace)
            yield from self._begin(item)
        elif tool.kind is ToolKind.CUSTOM:
            self._input = CustomInput()
            yield from self._begin(
                CustomCallReplyItem(_new_id("ctc"), "in_progress", _new_id("call"), name, "", namespace)
            )
        else:
            self._built_in = tool

    def _more_input(self, item: CustomCallReplyItem, text: str) -> Iterator[Event]:
        if text:
            self._pieces.append(text)
            yield self._piece(item, "custom_tool_call_input.delta", delta=text)

    def _send_built_in(self, tool: OfferedTool, status: Status) -> Iterator[Event]:
        """Begin the item of a complete call. With invalid arguments it becomes a function call: nothing is lost."""
        self._built_in = None
        text = "".join(self._pieces)
        action = action_of(tool.kind, text) if status == "completed" else None
        if action is None:
            item = CallReplyItem(_new_id("fc"), "in_progress", _new_id("call"), tool.name, "")
            yield from self._begin(item)
            if text:
                yield self._piece(item, "function_call_arguments.delta", delta=text)
            return
        item_id, call_id = _new_id(PREFIXES[tool.kind]), _new_id("call")
        if tool.kind is ToolKind.APPLY_PATCH:
            yield from self._begin(PatchCallItem(item_id, "in_progress", call_id, action))
        else:
            yield from self._begin(ShellCallItem(item_id, "in_progress", call_id, action, f"{tool.kind}_call"))

    def _piece(self, item: ReplyItem, kind: str, **fields: Any) -> Event:
        return PieceEvent(type=f"response.{kind}", item_id=item.id, output_index=self._index, **fields)


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
