"""Answers ``/v1/chat/completions``: an output's messages become reasoning, content and tool calls."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from microscale.engine.request import Finish
from microscale.server import errors
from microscale.server.generation.chat_prompt import ChatPrompt, output_of, render
from microscale.server.generation.choice import ChoiceOutput, ChoiceStep, flaws_of
from microscale.server.generation.engine_requests import PromptParams, num_choices, requests, sampling_params
from microscale.server.generation.stream import FastPath, generate
from microscale.server.host import Host
from microscale.server.http.encoding import TextSlot, encode
from microscale.server.http.exchange import Exchange, event_bytes
from microscale.server.openai.chat.schema import (
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    ChatReply,
    ChatRequest,
    ChatToolCall,
)
from microscale.server.openai.logprobs import ChatLogprobs, ChatLogprobSorter, joined
from microscale.server.openai.usage import Usage, usage
from microscale.server.structured.output_format import read_output_format
from microscale.server.structured.turn_grammar import turn_grammar
from microscale.text.events import TextKind
from microscale.text.output import CallDelta, ChatOutput, Delta, PlainOutput


@dataclass
class WholeChoice:
    """A choice that is returned as a whole."""

    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[list[CallDelta]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[ChatLogprobs] = field(default_factory=list)
    finish: str = ""

    def add(self, step: ChoiceStep) -> None:
        self.reasoning.append(step.delta.reasoning)
        self.content.append(step.delta.content)
        self.token_ids += step.delta.token_ids
        for call in step.delta.calls:
            if call.function is not None:
                self.calls.append([])
            self.calls[-1].append(call)


class Chat:
    """One request to ``/v1/chat/completions``."""

    def __init__(self, host: Host, request: ChatRequest, exchange: Exchange) -> None:
        self._host = host
        self._request = request
        self._exchange = exchange
        self._record = exchange.record
        self._record.request_id = f"chatcmpl-{secrets.token_hex(12)}"
        self._name = host.check_model(request.model)
        self._created = int(time.time())
        self._num_reasoning = 0
        if request.top_logprobs is not None and not request.logprobs:
            raise errors.needs("top_logprobs", "logprobs: true")

    async def run(self, num_bytes: int) -> None:
        host, request = self._host, self._request
        n = num_choices(request, 1, host)
        if _most(request) == 0:
            raise errors.out_of_range("max_tokens", "at least 1")
        output_format = await read_output_format(host, request)
        prompt = await host.off_loop(
            num_bytes, lambda: render(host, request, None if output_format is None else output_format.prompt_format)
        )
        self._prompt = prompt.tokens
        grammar = await turn_grammar(host, request, output_format, request, prompt.begun)
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        params = sampling_params(request, len(prompt.tokens), host, _most(request), logprobs)
        if not params.ignore_eos:
            # These end a turn; the checkpoint may not list them all.
            stops = {*params.stop_token_ids, *prompt.stops}
            params = replace(params, stop_token_ids=tuple(sorted(stops)), grammar=grammar)
        choices = [ChoiceOutput(index, self._output(prompt), keep_outputs=logprobs is not None) for index in range(n)]
        if logprobs is not None:
            self._sorters = [ChatLogprobSorter(host.tokenizer, choice.output) for choice in choices]
        asked = requests(self._record, request, [PromptParams(prompt.tokens, params)], n)
        steps = generate(host, self._record, asked, choices, self._fast_path(choices[0]))
        async with aclosing(steps):
            if not request.stream:
                gathered = [WholeChoice() for _ in choices]
                async for choice, step in steps:
                    self._count(step)
                    gathered[choice.index].add(step)
                    if request.logprobs:
                        gathered[choice.index].logprobs.append(self._sorters[choice.index].sort(step))
                    if step.finish is not None:
                        gathered[choice.index].finish = self._finish(choice, step.finish)
                replies = [self._choice(choice, whole) for choice, whole in zip(choices, gathered, strict=True)]
                await self._exchange.json(encode(self._reply(replies)))
                return
            async for choice, step in steps:
                self._count(step)
                if self._hides(step):
                    continue
                await self._exchange.event(encode(self._chunk([self._piece(choice, step)], step.first)))
        if request.include_usage:
            await self._exchange.event(encode(self._chunk([], False, final=True)))
        await self._exchange.end_events()

    def _output(self, prompt: ChatPrompt) -> ChatOutput | PlainOutput:
        request, host = self._request, self._host
        keep_stop = bool(request.include_stop_str_in_output)
        if request.skip_special_tokens is False:
            return PlainOutput(host.tokenizer, stops=request.stops, keep_stop=keep_stop, show_control=True)
        return output_of(host, prompt, request.stops, keep_stop=keep_stop)

    def _hides(self, step: ChoiceStep) -> bool:
        """Whether a step has only reasoning, and the client wants none."""
        if self._request.include_reasoning is not False or self._request.return_token_ids:
            return False
        return not (step.first or step.finish or step.delta.content or step.delta.calls)

    def _count(self, step: ChoiceStep) -> None:
        if step.delta.reasoning:
            self._num_reasoning += len(step.delta.token_ids)

    def _finish(self, choice: ChoiceOutput, finish: Finish) -> str:
        reason = finish.value
        output = choice.output
        if finish is Finish.STOP and output.stopped is None and isinstance(output, ChatOutput) and output.num_calls:
            reason = "tool_calls"
        self._record.finishes.append(reason)
        self._host.metrics.finished(reason)
        return reason

    # ---- whole -------------------------------------------------------------------------------------------------------

    def _choice(self, choice: ChoiceOutput, whole: WholeChoice) -> ChatChoice:
        calls = [_called(pieces) for pieces in whole.calls]
        content: str | None = "".join(whole.content)
        reasoning = self._shown("".join(whole.reasoning))
        # OpenAI sends null for a turn that only calls tools; a missing answer is empty, and has a flaw.
        message = ChatMessage(
            content or (None if calls else ""),
            reasoning=reasoning,
            reasoning_content=reasoning,
            tool_calls=calls or UNSET,
        )
        return ChatChoice(
            choice.index,
            message,
            whole.finish,
            self._shown_logprobs(joined(whole.logprobs)) if self._request.logprobs else None,
            tuple(whole.token_ids) if self._request.return_token_ids else UNSET,
            choice.output.stopped or UNSET,
            flaws_of(choice, whole.finish) or UNSET,
        )

    def _shown(self, reasoning: str) -> str | UnsetType:
        return UNSET if self._request.include_reasoning is False else reasoning or UNSET

    def _shown_logprobs(self, logprobs: ChatLogprobs) -> ChatLogprobs:
        return ChatLogprobs(logprobs.content) if self._request.include_reasoning is False else logprobs

    def _reply(self, choices: list[ChatChoice]) -> ChatReply:
        return ChatReply(
            self._record.request_id,
            self._created,
            self._name,
            choices,
            usage(self._record, self._num_reasoning),
            prompt_token_ids=self._prompt if self._request.return_token_ids else UNSET,
        )

    # ---- streamed ----------------------------------------------------------------------------------------------------

    def _fast_path(self, choice: ChoiceOutput) -> FastPath | None:
        """Chunks for plain tokens, encoded once: they differ only by their text."""
        request, wire = self._request, self._exchange.wire
        has_extras = request.logprobs or request.return_token_ids or request.usage_on_every_chunk
        if not request.stream or has_extras or request.include_reasoning is False or wire is None:
            return None
        reasoning = TextSlot(lambda mark: self._event(choice, ChoiceStep(Delta((), reasoning=mark), (), False, None)))
        content = TextSlot(lambda mark: self._event(choice, ChoiceStep(Delta((), content=mark), (), False, None)))

        def event(kind: TextKind, text: str) -> bytes:
            if kind is TextKind.REASONING:
                self._num_reasoning += 1
                return reasoning.filled(text)
            return content.filled(text)

        return FastPath(wire, event)

    def _event(self, choice: ChoiceOutput, step: ChoiceStep) -> bytes:
        return event_bytes(encode(self._chunk([self._piece(choice, step)], step.first)))

    def _piece(self, choice: ChoiceOutput, step: ChoiceStep) -> ChatChunkChoice:
        finish = None if step.finish is None else self._finish(choice, step.finish)
        ended = finish is not None
        return ChatChunkChoice(
            choice.index,
            _delta(step.delta, step.first, self._shown(step.delta.reasoning)),
            finish,
            self._shown_logprobs(self._sorters[choice.index].sort(step)) if self._request.logprobs else None,
            step.delta.token_ids if self._request.return_token_ids else UNSET,
            (choice.output.stopped or UNSET) if ended else UNSET,
            (flaws_of(choice, finish) or UNSET) if ended else UNSET,
        )

    def _chunk(self, choices: list[ChatChunkChoice], first: bool, *, final: bool = False) -> ChatChunk:
        reported: Usage | UnsetType | None = None if self._request.include_usage else UNSET
        if final or self._request.usage_on_every_chunk:
            reported = usage(self._record, self._num_reasoning)
        shows_prompt = first and bool(self._request.return_token_ids)
        return ChatChunk(
            self._record.request_id,
            self._created,
            self._name,
            choices,
            reported,
            prompt_token_ids=self._prompt if shows_prompt else UNSET,
        )


def _most(request: ChatRequest) -> int | None:
    return request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens


def _delta(delta: Delta, first: bool, reasoning: str | UnsetType) -> ChatDelta:
    calls = [
        ChatToolCall(CalledFunction(call.arguments), index=call.call_idx)
        if call.function is None
        else ChatToolCall(CalledFunction(call.arguments, call.function), _call_id(), "function", call.call_idx)
        for call in delta.calls
    ]
    return ChatDelta(
        "assistant" if first else UNSET,
        # The first chunk has content even if it is empty, like OpenAI's.
        delta.content if delta.content or first else UNSET,
        reasoning,
        reasoning,
        calls or UNSET,
    )


def _called(pieces: Sequence[CallDelta]) -> ChatToolCall:
    function = CalledFunction("".join(piece.arguments for piece in pieces), pieces[0].function or "")
    return ChatToolCall(function, _call_id(), "function")


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


async def chat(host: Host, body: bytes, exchange: Exchange) -> None:
    host.check_open()
    request = await host.read_request(ChatRequest, body, exchange)
    await Chat(host, request, exchange).run(len(body))
