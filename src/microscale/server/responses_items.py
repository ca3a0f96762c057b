"""Deltas of one output to items, and to the events that tell of them.

    output_item.added ── content_part.added ── *_text.delta … ── *_text.done ── content_part.done ── output_item.done
    output_item.added ── function_call_arguments.delta … ── function_call_arguments.done ── output_item.done

One item is open at a time. Text of another kind closes it, and so does the end.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

from msgspec import UNSET, UnsetType

from microscale.server.responses_replies import (
    ArgumentsEvent,
    CallItem,
    Event,
    Item,
    ItemEvent,
    MessageItem,
    OutputText,
    PartEvent,
    ReasoningItem,
    ReasoningText,
    Status,
    TextEvent,
)
from microscale.text.output import Delta

NAMES = {MessageItem: "response.output_text", ReasoningItem: "response.reasoning_text"}


class Items:
    """One response's."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._open: Item | None = None
        self._pieces: list[str] = []
        self._seen: set[type[Item]] = set()

    def add(self, delta: Delta) -> Iterator[Event]:
        """The events of a delta. Run through them, and encode each before the next: the items grow meanwhile."""
        if delta.reasoning:
            yield from self._text(ReasoningItem, delta.reasoning)
        if delta.content:
            yield from self._text(MessageItem, delta.content)
        for call in delta.calls:
            if call.function is not None:
                yield from self.close("completed")
                item = CallItem(_new_id("fc"), "in_progress", _new_id("call"), call.function, "")
                yield from self._begin(item)
            if call.arguments and isinstance(self._open, CallItem):
                self._pieces.append(call.arguments)
                yield ArgumentsEvent(
                    type="response.function_call_arguments.delta",
                    item_id=self._open.id,
                    output_index=self._index,
                    delta=call.arguments,
                )

    def close(self, status: Status) -> Iterator[Event]:
        """The last events of the open item."""
        item, self._open = self._open, None
        if item is None:
            return
        text, index = "".join(self._pieces), self._index
        self._pieces = []
        item.status = status
        if isinstance(item, CallItem):
            item.arguments = text
            yield ArgumentsEvent(
                type="response.function_call_arguments.done",
                item_id=item.id,
                output_index=index,
                arguments=text,
                name=item.name,
            )
        else:
            part = item.content[0]
            part.text = text
            logprobs: list[Any] | UnsetType = [] if isinstance(part, OutputText) else UNSET
            name = NAMES[type(item)] + ".done"
            yield TextEvent(type=name, item_id=item.id, output_index=index, text=text, logprobs=logprobs)
            yield PartEvent(type="response.content_part.done", item_id=item.id, output_index=index, part=part)
        yield ItemEvent(type="response.output_item.done", output_index=index, item=item)

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    def _text(self, kind: type[MessageItem] | type[ReasoningItem], text: str) -> Iterator[Event]:
        if not isinstance(self._open, kind):
            yield from self.close("completed")
            if kind in self._seen:
                # The break that parts messages of one kind: here they are items of their own.
                text = text.removeprefix("\n")
            self._seen.add(kind)
            if kind is MessageItem:
                yield from self._begin(MessageItem(_new_id("msg"), "in_progress", []))
            else:
                yield from self._begin(ReasoningItem(_new_id("rs"), "in_progress", []))
        self._pieces.append(text)
        item = self.items[-1]
        logprobs: list[Any] | UnsetType = [] if kind is MessageItem else UNSET
        name = NAMES[kind] + ".delta"
        yield TextEvent(type=name, item_id=item.id, output_index=self._index, delta=text, logprobs=logprobs)

    def _begin(self, item: Item) -> Iterator[Event]:
        self._open = item
        self.items.append(item)
        yield ItemEvent(type="response.output_item.added", output_index=self._index, item=item)
        if isinstance(item, MessageItem):
            item.content.append(OutputText(""))
        elif isinstance(item, ReasoningItem):
            item.content.append(ReasoningText(""))
        else:
            return
        part = item.content[0]
        yield PartEvent(type="response.content_part.added", item_id=item.id, output_index=self._index, part=part)


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
