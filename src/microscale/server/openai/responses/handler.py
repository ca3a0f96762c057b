"""Answers ``/v1/responses`` and ``/v1/responses/input_tokens``."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from msgspec import UNSET

from microscale.engine.request import Finish
from microscale.errors import MicroscaleError
from microscale.server.error_texts import SlowReader
from microscale.server.generation.chat_prompt import output_of
from microscale.server.generation.choice import ChoiceOutput, ChoiceStep, flaws_of
from microscale.server.generation.engine_requests import requests, turn_params
from microscale.server.generation.stream import generate
from microscale.server.host import Host
from microscale.server.http.encoding import encode
from microscale.server.http.error_replies import code_of, status_of
from microscale.server.http.exchange import Exchange
from microscale.server.openai.logprobs import ChatLogprobSorter
from microscale.server.openai.responses.output_items import Items
from microscale.server.openai.responses.prompt import named_as_sent, response_prompt
from microscale.server.openai.responses.replies import (
    Event,
    IncompleteDetails,
    InputTokens,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponseEvent,
    ResponseUsage,
)
from microscale.server.openai.responses.request import SEALED_THOUGHTS, ResponsesRequest
from microscale.server.openai.responses.store import StoredResponse
from microscale.server.openai.responses.to_chat import reply_items
from microscale.server.openai.responses.tool_specs import PassedTool
from microscale.server.openai.responses.toolbox import Toolbox
from microscale.server.requests.base import Body


class Responses:
    """One request to ``/v1/responses``."""

    def __init__(self, host: Host, request: ResponsesRequest, exchange: Exchange) -> None:
        self._host = host
        self._request = request
        self._exchange = exchange
        self._record = exchange.record
        self._record.request_id = f"resp_{secrets.token_hex(24)}"
        self._toolbox = Toolbox(request.tools or [], request.tool_choice, host.limits.max_tools)
        self._items = Items(self._toolbox, seals=request.includes(SEALED_THOUGHTS))
        self._num_events = 0
        self._response = self._begun(host.check_model(request.model))

    async def run(self, num_bytes: int) -> None:
        steps = await self._start(num_bytes)
        async with aclosing(steps):
            if self._request.stream:
                await self._stream(steps)
                return
            async for _, step in steps:
                for _event in self._advance(step):
                    pass
        data = encode(self._response)
        self._store(data)
        await self._exchange.json(data)

    # ---- start -------------------------------------------------------------------------------------------------------

    async def _start(self, num_bytes: int) -> AsyncGenerator[tuple[ChoiceOutput, ChoiceStep], None]:
        host, request = self._host, self._request
        made = await response_prompt(host, request, self._toolbox, self._record.owner, num_bytes)
        self._conversation, prompt = made.items, made.prompt
        fields = request.sampling(ignore_eos=request.ignore_eos)
        logprobs = (request.top_logprobs or 0) if request.wants_logprobs else None
        with named_as_sent(self._toolbox):
            most = request.max_output_tokens
            params = await turn_params(host, made.chat, prompt, made.output_format, fields, most, logprobs)
        asked = requests(self._record, fields, [(prompt.tokens, params)], 1)
        output = output_of(host, prompt)
        self._choice = ChoiceOutput(0, output, keep_outputs=logprobs is not None)
        self._sorter = None if logprobs is None else ChatLogprobSorter(host.tokenizer, output)
        return generate(host, self._record, asked, [self._choice])

    def _begun(self, name: str) -> Response:
        request, defaults = self._request, self._host.sampling
        thinks, text = request.reasoning, request.text
        wanted = None if text is None else text.format
        choice = request.tool_choice
        marks = request.model_extra or {}
        return Response(
            id=self._record.request_id,
            created_at=int(time.time()),
            model=name,
            status="in_progress",
            output=[],
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            previous_response_id=request.previous_response_id,
            reasoning={
                "effort": (None if thinks is None else thinks.effort) or "medium",
                "summary": None if thinks is None else thinks.summary,
            },
            store=request.store is not False,
            temperature=defaults.temperature if request.temperature is None else request.temperature,
            text={
                "format": {"type": "text"} if wanted is None else _sent(wanted),
                "verbosity": (None if text is None else text.verbosity) or "medium",
            },
            tool_choice=choice or "auto" if choice is None or isinstance(choice, str) else _sent(choice),
            tools=[_sent(tool) for tool in request.tools or [] if not isinstance(tool, PassedTool)],
            top_p=defaults.top_p if request.top_p is None else request.top_p,
            truncation=request.truncation or "disabled",
            parallel_tool_calls=request.parallel_tool_calls is not False,
            max_tool_calls=request.max_tool_calls,
            top_logprobs=request.top_logprobs or 0,
            user=_word(marks.get("user")),
            safety_identifier=_word(marks.get("safety_identifier")),
            prompt_cache_key=_word(marks.get("prompt_cache_key")),
        )

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _advance(self, step: ChoiceStep) -> Iterator[Event]:
        logprobs = () if self._sorter is None else self._sorter.sort(step).content
        yield from self._items.add(step.delta, logprobs)
        if step.finish is not None:
            cut = step.finish is Finish.LENGTH
            yield from self._items.close("incomplete" if cut else "completed")
            self._end(cut)

    def _end(self, cut: bool) -> None:
        response = self._response
        finish = "length" if cut else "stop"
        self._host.finished(self._record, finish)
        response.status = "incomplete" if cut else "completed"
        response.completed_at = None if cut else int(time.time())
        response.incomplete_details = IncompleteDetails("max_output_tokens") if cut else None
        response.output = self._items.items
        response.usage = self._usage()
        response.flaws = flaws_of(self._choice, finish) or UNSET

    def _usage(self) -> ResponseUsage:
        record = self._record
        return ResponseUsage(
            record.prompt_tokens,
            InputTokensDetails(record.cached_tokens),
            record.completion_tokens,
            OutputTokensDetails(record.reasoning_tokens),
            record.prompt_tokens + record.completion_tokens,
        )

    async def _stream(self, steps: AsyncGenerator[tuple[ChoiceOutput, ChoiceStep], None]) -> None:
        try:
            async for _, step in steps:
                if step.first:
                    for name in ("response.created", "response.in_progress"):
                        await self._send(ResponseEvent(type=name, response=self._response))
                for event in self._advance(step):
                    await self._send(event)
        except SlowReader:
            raise
        except MicroscaleError as error:
            if not self._num_events:
                raise
            self._fail(error)
        else:
            # Before the last event is sent: the client may continue it immediately.
            self._store(encode(self._response))
        await self._send(ResponseEvent(type=f"response.{self._response.status}", response=self._response))
        await self._exchange.end_events(b"")

    def _fail(self, error: MicroscaleError) -> None:
        status = status_of(error).status
        self._host.metrics.failed(code_of(error))
        self._response.status = "failed"
        self._response.output = self._items.items
        # OpenAI's type has few codes; the message says what happened.
        self._response.error = ResponseError("server_error" if status >= 500 else "invalid_prompt", str(error))
        self._response.usage = self._usage()

    async def _send(self, event: Event) -> None:
        event.sequence_number = self._num_events
        self._num_events += 1
        await self._exchange.event(encode(event), event.type.encode())

    # ---- store -------------------------------------------------------------------------------------------------------

    def _store(self, data: bytes) -> None:
        if self._request.store is False:
            return
        whole = (*self._conversation, *reply_items(self._items.items))
        stored = StoredResponse(data, whole, len(self._conversation), self._record.owner)
        self._host.stored.put(self._response.id, stored, self._host.limits)


def _sent(part: Body) -> dict[str, Any]:
    """A part of the request, as it was sent."""
    return part.model_dump(mode="json", by_alias=True, exclude_unset=True)


def _word(value: object) -> str | None:
    return value if isinstance(value, str) else None


async def respond(host: Host, body: bytes, exchange: Exchange) -> None:
    host.check_open()
    request = await host.read_request(ResponsesRequest, body, exchange)
    await Responses(host, request, exchange).run(len(body))


async def count_input(host: Host, body: bytes, exchange: Exchange) -> None:
    """``/v1/responses/input_tokens``: the number of tokens in a request's prompt."""
    host.check_open()
    request = await host.read_request(ResponsesRequest, body, exchange)
    host.check_model(request.model)
    toolbox = Toolbox(request.tools or [], request.tool_choice, host.limits.max_tools)
    made = await response_prompt(host, request, toolbox, exchange.record.owner, len(body))
    await exchange.json(encode(InputTokens(len(made.prompt.tokens))))
