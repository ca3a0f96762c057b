"""``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

from msgspec import UNSET

from microscale.engine.request import Finish
from microscale.server import error_texts
from microscale.server.anthropic import to_chat
from microscale.server.anthropic.output_blocks import MessageBlocks
from microscale.server.anthropic.replies import (
    BlockDelta,
    Event,
    MessageDelta,
    MessageEnding,
    MessageReply,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    TextDelta,
    ThinkingDelta,
    ThinkingTokens,
    TokenCount,
)
from microscale.server.anthropic.request import CountRequest, MessagesRequest
from microscale.server.anthropic.thinking import display_of
from microscale.server.error_texts import BadField
from microscale.server.generation.chat_prompt import ChatPrompt, output_of, render
from microscale.server.generation.choice import ChoiceOutput, ChoiceStep, flaws_of
from microscale.server.generation.engine_requests import num_choices, requests, turn_params
from microscale.server.generation.stream import FastPath, generate
from microscale.server.host import Host
from microscale.server.http.encoding import TextSlot, encode
from microscale.server.http.exchange import Exchange, event_bytes
from microscale.server.requests.chat import ChatFields
from microscale.server.structured.output_format import OutputFormat
from microscale.text.events import TextKind
from microscale.text.output import ChatOutput, Delta

PING_S = 5.0
"""How long a stream may be silent while reasoning is hidden or tool input is held back."""
COMMENT = b":\n\n"
"""Sent for a token that the client does not see; clients skip comments in event streams."""


class Messages:
    """One request to ``/v1/messages``."""

    def __init__(self, host: Host, request: MessagesRequest, exchange: Exchange) -> None:
        self._host = host
        self._request = request
        self._exchange = exchange
        self._record = exchange.record
        self._name = host.check_model(request.model)
        self._blocks = MessageBlocks(
            display_of(request), {tool.name for _, tool in to_chat.custom_tools(request) if tool.eager_input_streaming}
        )
        self._ending = MessageEnding()
        self._sent_s = 0.0
        """When the last event was sent."""

    async def run(self, num_bytes: int) -> None:
        try:
            steps = await self._start(num_bytes)
        except BadField as error:
            raise to_chat.renamed(error, self._request) from None
        async with aclosing(steps):
            if self._request.stream:
                await self._stream(steps)
                return
            async for _, step in steps:
                for _event in self._advance(step):
                    pass
        await self._exchange.json(encode(self._message()))

    async def _start(self, num_bytes: int) -> AsyncGenerator[tuple[ChoiceOutput, ChoiceStep], None]:
        host, request = self._host, self._request
        fields = request.sampling(stop=request.stop_sequences)
        num_choices(fields, 1, host)
        chat, output_format, prompt = await _prompt(host, request, num_bytes)
        room = host.max_model_len - len(prompt.tokens)
        if room < 1:
            raise error_texts.anthropic_context_length_exceeded(len(prompt.tokens), host.max_model_len - 1)
        self._is_cut_short = request.max_tokens > room
        params = await turn_params(host, chat, prompt, output_format, fields, max(1, request.max_tokens))
        asked = requests(self._record, fields, [(prompt.tokens, params)], 1)
        output = output_of(host, prompt, fields.stops)
        self._choice = ChoiceOutput(0, output)
        return generate(host, self._record, asked, [self._choice], self._fast_path())

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _advance(self, step: ChoiceStep) -> Iterator[Event]:
        if self._request.max_tokens:
            yield from self._blocks.add(step.delta)
        if step.finish is not None:
            yield from self._blocks.close()
            self._ending = self._end(step.finish)

    def _end(self, finish: Finish) -> MessageEnding:
        output = self._choice.output
        assert isinstance(output, ChatOutput)
        reason, logged = "end_turn", finish.value
        if output.stopped is not None:
            reason = "stop_sequence"
        elif finish is Finish.LENGTH:
            reason = "model_context_window_exceeded" if self._is_cut_short else "max_tokens"
        elif output.num_calls:
            reason, logged = "tool_use", "tool_calls"
        self._host.finished(self._record, logged)
        flaws = [*flaws_of(self._choice, logged), *self._blocks.flaws]
        return MessageEnding(reason, output.stopped, flaws or UNSET)

    def _usage(self, *, final: bool = True) -> MessageUsage:
        record = self._record
        return MessageUsage(
            record.prompt_tokens - record.cached_tokens,
            record.cached_tokens,
            record.completion_tokens if self._request.max_tokens else 0,
            ThinkingTokens(record.reasoning_tokens) if final else UNSET,
        )

    def _message(self, *, final: bool = True) -> MessageReply:
        content = self._blocks.content if final else []
        end = self._ending
        usage = self._usage(final=final)
        return MessageReply(
            self._record.request_id, self._name, content, usage, end.stop_reason, end.stop_sequence, end.flaws
        )

    # ---- streamed ----------------------------------------------------------------------------------------------------

    async def _stream(self, steps: AsyncGenerator[tuple[ChoiceOutput, ChoiceStep], None]) -> None:
        async for _, step in steps:
            if step.first:
                await self._send(MessageStart(self._message(final=False)))
            for event in self._advance(step):
                await self._send(event)
            if time.monotonic() - self._sent_s > PING_S:
                await self._send(Ping())
        await self._send(MessageDelta(self._ending, self._usage()))
        await self._send(MessageStop())
        await self._exchange.end_events(b"")

    async def _send(self, event: Event) -> None:
        self._sent_s = time.monotonic()
        await self._exchange.event(encode(event), event.type.encode())

    def _fast_path(self) -> FastPath | None:
        """Events for plain tokens: within a block they differ only by their text."""
        wire = self._exchange.wire
        if not self._request.stream or not self._request.max_tokens or wire is None:
            return None
        slots: dict[int, TextSlot] = {}

        def event(kind: TextKind, text: str) -> bytes:
            is_thought = kind is TextKind.REASONING
            blocks = self._blocks
            if blocks.takes_plain(kind, text):
                if blocks.hides(kind):
                    return COMMENT
                index = blocks.index
                if index not in slots:
                    make = ThinkingDelta if is_thought else TextDelta
                    slots[index] = TextSlot(lambda mark: _event_bytes(BlockDelta(index, make(mark))))
                return slots[index].filled(text)
            delta = Delta((), reasoning=text) if is_thought else Delta((), content=text)
            return b"".join(map(_event_bytes, blocks.add(delta))) or COMMENT

        return FastPath(wire, event)


def _event_bytes(event: Event) -> bytes:
    return event_bytes(encode(event), event.type.encode())


async def _prompt(
    host: Host, request: CountRequest, num_bytes: int
) -> tuple[ChatFields, OutputFormat | None, ChatPrompt]:
    def made() -> tuple[ChatFields, OutputFormat | None, ChatPrompt]:
        output_format = to_chat.output_format_of(request, host.limits)
        chat = to_chat.chat_fields(request, host.limits)
        return chat, output_format, render(host, chat, None if output_format is None else output_format.prompt_format)

    return await host.off_loop(num_bytes, made)


async def messages(host: Host, body: bytes, exchange: Exchange) -> None:
    host.check_open()
    request = await host.read_request(MessagesRequest, body, exchange)
    await Messages(host, request, exchange).run(len(body))


async def count_tokens(host: Host, body: bytes, exchange: Exchange) -> None:
    """The number of prompt tokens, as in ``usage`` of the same request, including cached ones."""
    request = await host.read_request(CountRequest, body, exchange)
    host.check_model(request.model)
    try:
        _, _, prompt = await _prompt(host, request, len(body))
    except BadField as error:
        raise to_chat.renamed(error, request) from None
    await exchange.json(encode(TokenCount(len(prompt.tokens))))
