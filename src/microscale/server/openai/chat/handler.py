"""Answers ``/v1/chat/completions``: an output's messages become reasoning, content and tool calls."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import aclosing

from msgspec import UNSET, UnsetType

from microscale.engine.request import Finish
from microscale.server import error_texts
from microscale.server.generation.chat_prompt import ChatPrompt, output_of, render
from microscale.server.generation.choice import ChoiceOutput, ChoiceStep, flaws_of, whole_steps
from microscale.server.generation.engine_requests import num_choices, requests, turn_params
from microscale.server.generation.stream import FastPath, generate
from microscale.server.host import Host
from microscale.server.http.encoding import TextSlot, encode
from microscale.server.http.exchange import Exchange, event_bytes
from microscale.server.openai.chat.schema import (
    CalledFunction,
    ChatChoice,
    ChatMessage,
    ChatReply,
    ChatRequest,
    ChatToolCall,
)
from microscale.server.openai.logprobs import ChatLogprobs, ChatLogprobSorter
from microscale.server.openai.usage import Usage, usage
from microscale.server.structured.output_format import read_output_format
from microscale.text.events import TextKind
from microscale.text.output import CallDelta, ChatOutput, Delta, PlainOutput


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
        if request.top_logprobs is not None and not request.logprobs:
            raise error_texts.needs("top_logprobs", "logprobs: true")

    async def run(self, num_bytes: int) -> None:
        host, request = self._host, self._request
        n = num_choices(request, 1, host)
        if request.most_tokens == 0:
            raise error_texts.out_of_range("max_tokens", "at least 1")
        output_format = await read_output_format(host, request)
        prompt = await host.off_loop(
            num_bytes, lambda: render(host, request, None if output_format is None else output_format.prompt_format)
        )
        self._prompt = prompt.tokens
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        params = await turn_params(host, request, prompt, output_format, request, request.most_tokens, logprobs)
        choices = [ChoiceOutput(index, self._output(prompt), keep_outputs=logprobs is not None) for index in range(n)]
        if logprobs is not None:
            self._sorters = [ChatLogprobSorter(host.tokenizer, choice.output) for choice in choices]
        asked = requests(self._record, request, [(prompt.tokens, params)], n)
        steps = generate(host, self._record, asked, choices, self._fast_path(choices[0]))
        async with aclosing(steps):
            if not request.stream:
                whole = zip(choices, await whole_steps(steps, n), strict=True)
                replies = [self._choice(choice, step) for choice, step in whole]
                await self._exchange.json(encode(self._reply(replies, first=True, final=True)))
                return
            async for choice, step in steps:
                if not self._hides(step):
                    await self._exchange.event(self._chunk(choice, step))
        if request.include_usage:
            await self._exchange.event(encode(self._reply([], first=False, final=True)))
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

    def _fast_path(self, choice: ChoiceOutput) -> FastPath | None:
        """Chunks for plain tokens, encoded once: they differ only by their text."""
        request, wire = self._request, self._exchange.wire
        has_extras = request.logprobs or request.return_token_ids or request.usage_on_every_chunk
        if not request.stream or has_extras or request.include_reasoning is False or wire is None:
            return None

        def slot(delta_of: Callable[[str], Delta]) -> TextSlot:
            return TextSlot(lambda mark: event_bytes(self._chunk(choice, ChoiceStep(delta_of(mark), (), False, None))))

        reasoning = slot(lambda mark: Delta((), reasoning=mark))
        content = slot(lambda mark: Delta((), content=mark))
        return FastPath(wire, lambda kind, text: (reasoning if kind is TextKind.REASONING else content).filled(text))

    # ---- replies -----------------------------------------------------------------------------------------------------

    def _chunk(self, choice: ChoiceOutput, step: ChoiceStep) -> bytes:
        return encode(self._reply([self._choice(choice, step)], first=step.first))

    def _reply(self, choices: list[ChatChoice], *, first: bool, final: bool = False) -> ChatReply:
        request = self._request
        reported: Usage | UnsetType | None = None if request.include_usage else UNSET
        if final or request.usage_on_every_chunk:
            reported = usage(self._record, reasoning=True)
        return ChatReply(
            self._record.request_id,
            self._created,
            self._name,
            choices,
            reported,
            "chat.completion.chunk" if request.stream else "chat.completion",
            self._prompt if first and request.return_token_ids else UNSET,
        )

    def _choice(self, choice: ChoiceOutput, step: ChoiceStep) -> ChatChoice:
        """What a step adds to a choice; without a stream, all of it."""
        request, is_whole = self._request, not self._request.stream
        finish = None if step.finish is None else self._finish(choice, step.finish)
        message = (_message if is_whole else _delta)(step, self._shown(step.delta.reasoning))
        return ChatChoice(
            choice.index,
            message if is_whole else UNSET,
            UNSET if is_whole else message,
            finish,
            self._shown_logprobs(self._sorters[choice.index].sort(step)) if request.logprobs else None,
            step.delta.token_ids if request.return_token_ids else UNSET,
            UNSET if finish is None else choice.output.stopped or UNSET,
            UNSET if finish is None else flaws_of(choice, finish) or UNSET,
        )

    def _finish(self, choice: ChoiceOutput, finish: Finish) -> str:
        reason = finish.value
        output = choice.output
        if finish is Finish.STOP and output.stopped is None and isinstance(output, ChatOutput) and output.num_calls:
            reason = "tool_calls"
        self._host.finished(self._record, reason)
        return reason

    def _shown(self, reasoning: str) -> str | UnsetType:
        return UNSET if self._request.include_reasoning is False else reasoning or UNSET

    def _shown_logprobs(self, logprobs: ChatLogprobs) -> ChatLogprobs:
        return ChatLogprobs(logprobs.content) if self._request.include_reasoning is False else logprobs


def _message(step: ChoiceStep, reasoning: str | UnsetType) -> ChatMessage:
    calls = [_called(call) for call in step.delta.calls]
    # OpenAI sends null for a turn that only calls tools; a missing answer is empty, and has a flaw.
    content = step.delta.content or (None if calls else "")
    return ChatMessage("assistant", content, reasoning, reasoning, calls or UNSET)


def _delta(step: ChoiceStep, reasoning: str | UnsetType) -> ChatMessage:
    delta, first = step.delta, step.first
    # The first chunk has content even if it is empty, like OpenAI's.
    content = delta.content if delta.content or first else UNSET
    calls = [_called(call, call.call_idx) for call in delta.calls]
    return ChatMessage("assistant" if first else UNSET, content, reasoning, reasoning, calls or UNSET)


def _called(call: CallDelta, index: int | UnsetType = UNSET) -> ChatToolCall:
    if call.function is None:
        return ChatToolCall(CalledFunction(call.arguments), index=index)
    call_id = f"call_{secrets.token_hex(12)}"
    return ChatToolCall(CalledFunction(call.arguments, call.function), call_id, "function", index)


async def chat(host: Host, body: bytes, exchange: Exchange) -> None:
    host.check_open()
    request = await host.read_request(ChatRequest, body, exchange)
    await Chat(host, request, exchange).run(len(body))
