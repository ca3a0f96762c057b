"""Deltas of one output to blocks, and to the events that tell of them.

    content_block_start ── text_delta …                        ── content_block_stop
    content_block_start ── thinking_delta … ── signature_delta ── content_block_stop
    content_block_start ── input_json_delta …                  ── content_block_stop

One block is open at a time. Text of another kind closes it, and so does the end. A tool's input is held back until it
is whole and known to be JSON, unless the tool asks for it as it is written: clients fail on input that is no JSON.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator

from microscale.server.anthropic.replies import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    Event,
    InputDelta,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from microscale.server.anthropic.thinking import Display, carrying
from microscale.server.anthropic.tools import input_of
from microscale.server.http.encoding import encode
from microscale.text.events import Kind
from microscale.text.output import Delta

MALFORMED = "malformed_tool_input"
"""The flaw of input that is no JSON object."""


class Blocks:
    """The blocks of one message."""

    def __init__(self, display: Display, eager: Collection[str] = ()) -> None:
        self.content: list[Block] = []
        self.flaws: list[str] = []
        self._display = display
        self._eager = eager
        self._open: Block | None = None
        self._pieces: list[str] = []
        self._seen: set[type[Block]] = set()

    @property
    def index(self) -> int:
        """Of the open block, or of the last one."""
        return len(self.content) - 1

    def add(self, delta: Delta) -> Iterator[Event]:
        """The events of a delta. Run through them, and encode each before the next: the blocks grow meanwhile."""
        if delta.reasoning and self._display != "hidden":
            yield from self._text(ThinkingBlock, delta.reasoning)
        if delta.content:
            yield from self._text(TextBlock, delta.content)
        for call in delta.calls:
            if call.function is not None:
                yield from self.close()
                yield self._begin(ToolUseBlock(f"toolu_{secrets.token_hex(12)}", call.function, {}))
            if call.arguments and isinstance(self._open, ToolUseBlock):
                self._pieces.append(call.arguments)
                if self._open.name in self._eager:
                    yield BlockDelta(self.index, InputDelta(call.arguments))

    def takes_plain(self, kind: Kind, text: str) -> bool:
        """Take the text of a token if it only adds to the open block. Its event is the caller's."""
        wanted = ThinkingBlock if kind is Kind.REASONING else TextBlock
        if not isinstance(self._open, wanted):
            return False
        self._pieces.append(text)
        return True

    def hides(self, kind: Kind) -> bool:
        """Whether the client gets no text of this kind."""
        return kind is Kind.REASONING and self._display != "shown"

    def close(self) -> Iterator[Event]:
        """The last events of the open block."""
        block, self._open = self._open, None
        if block is None:
            return
        text = "".join(self._pieces)
        self._pieces = []
        if isinstance(block, TextBlock):
            block.text = text
        elif isinstance(block, ThinkingBlock):
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

    def _text(self, kind: type[TextBlock] | type[ThinkingBlock], text: str) -> Iterator[Event]:
        if not isinstance(self._open, kind):
            yield from self.close()
            if kind in self._seen:
                # The break that parts messages of one kind: here they are blocks of their own.
                text = text.removeprefix("\n")
            self._seen.add(kind)
            yield self._begin(TextBlock("") if kind is TextBlock else ThinkingBlock("", ""))
        self._pieces.append(text)
        if kind is TextBlock:
            yield BlockDelta(self.index, TextDelta(text))
        elif self._display == "shown":
            yield BlockDelta(self.index, ThinkingDelta(text))

    def _begin(self, block: Block) -> Event:
        self._open = block
        self.content.append(block)
        return BlockStart(self.index, block)
