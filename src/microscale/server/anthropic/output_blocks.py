"""Turns the deltas of one output into blocks and their events.

    content_block_start ── text_delta …                        ── content_block_stop
    content_block_start ── thinking_delta … ── signature_delta ── content_block_stop
    content_block_start ── input_json_delta …                  ── content_block_stop

One block is open at a time. Text of another kind closes it, and so does the end. Tool input is held back until it is
complete and known to be JSON, unless the tool requests eager streaming: clients fail on input that is not JSON.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterator
from typing import Any

from microscale.server.anthropic.replies import (
    BlockDelta,
    BlockStart,
    BlockStop,
    Event,
    InputDelta,
    ReplyBlock,
    SignatureDelta,
    TextDelta,
    TextReplyBlock,
    ThinkingDelta,
    ThinkingReplyBlock,
    ToolUseReplyBlock,
)
from microscale.server.anthropic.thinking import Display, carrying
from microscale.server.anthropic.to_chat import INVALID
from microscale.server.http.encoding import encode
from microscale.text.events import TextKind
from microscale.text.output import Delta

MALFORMED = "malformed_tool_input"
"""The flaw reported for input that is not a JSON object."""


class MessageBlocks:
    """The blocks of one message."""

    def __init__(self, display: Display, eager: Collection[str] = ()) -> None:
        self.content: list[ReplyBlock] = []
        self.flaws: list[str] = []
        self._display = display
        self._eager = eager
        self._open: ReplyBlock | None = None
        self._pieces: list[str] = []
        self._seen: set[type[ReplyBlock]] = set()

    @property
    def index(self) -> int:
        """The index of the open block, or of the last one."""
        return len(self.content) - 1

    def add(self, delta: Delta) -> Iterator[Event]:
        """The events of a delta. Encode each before taking the next: the blocks grow meanwhile."""
        if delta.reasoning and self._display != "hidden":
            yield from self._text(ThinkingReplyBlock, delta.reasoning)
        if delta.content:
            yield from self._text(TextReplyBlock, delta.content)
        for call in delta.calls:
            if call.function is not None:
                yield from self.close()
                yield self._begin(ToolUseReplyBlock(f"toolu_{secrets.token_hex(12)}", call.function, {}))
            if call.arguments and isinstance(self._open, ToolUseReplyBlock):
                self._pieces.append(call.arguments)
                if self._open.name in self._eager:
                    yield BlockDelta(self.index, InputDelta(call.arguments))

    def takes_plain(self, kind: TextKind, text: str) -> bool:
        """Take a token's text if it only adds to the open block. The caller makes its event."""
        wanted = ThinkingReplyBlock if kind is TextKind.REASONING else TextReplyBlock
        if not isinstance(self._open, wanted):
            return False
        self._pieces.append(text)
        return True

    def hides(self, kind: TextKind) -> bool:
        """Whether text of this kind is hidden from the client."""
        return kind is TextKind.REASONING and self._display != "shown"

    def close(self) -> Iterator[Event]:
        """The last events of the open block."""
        block, self._open = self._open, None
        if block is None:
            return
        text = "".join(self._pieces)
        self._pieces = []
        if isinstance(block, TextReplyBlock):
            block.text = text
        elif isinstance(block, ThinkingReplyBlock):
            omitted = self._display == "omitted"
            block.thinking = "" if omitted else text
            block.signature = carrying(text) if omitted else secrets.token_urlsafe(24)
            yield BlockDelta(self.index, SignatureDelta(block.signature))
        else:
            block.input, is_object = input_of(text)
            if not is_object:
                self.flaws.append(MALFORMED)
            if block.name not in self._eager:
                whole = text if is_object and text.strip() else encode(block.input).decode()
                yield BlockDelta(self.index, InputDelta(whole))
        yield BlockStop(self.index)

    def _text(self, kind: type[TextReplyBlock] | type[ThinkingReplyBlock], text: str) -> Iterator[Event]:
        if not isinstance(self._open, kind):
            yield from self.close()
            if kind in self._seen:
                # Messages of one kind are separated by a line break; here they are separate blocks.
                text = text.removeprefix("\n")
            self._seen.add(kind)
            yield self._begin(TextReplyBlock("") if kind is TextReplyBlock else ThinkingReplyBlock("", ""))
        self._pieces.append(text)
        if kind is TextReplyBlock:
            yield BlockDelta(self.index, TextDelta(text))
        elif self._display == "shown":
            yield BlockDelta(self.index, ThinkingDelta(text))

    def _begin(self, block: ReplyBlock) -> Event:
        self._open = block
        self.content.append(block)
        return BlockStart(self.index, block)


def input_of(arguments: str) -> tuple[dict[str, Any], bool]:
    """A call's arguments as an object, and whether they were one."""
    if not arguments.strip():
        return {}, True
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return (value, True) if isinstance(value, dict) else ({INVALID: arguments}, False)
