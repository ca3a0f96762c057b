"""From prompts to outputs: submits choices to the engine, merges what comes back, keeps count.

Chat and plain completions share this; what a choice looks like to the client is theirs.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from microscale.engine.output import Output
from microscale.engine.process.client import EngineClient
from microscale.engine.process.stream import Stream
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.server.answer import Record
from microscale.server.choice import Choice, Step
from microscale.server.faults import BadField, SlowReader
from microscale.server.host import Host
from microscale.server.http.connection import Wire
from microscale.server.protocol import SamplingFields
from microscale.server.replies import CachedTokens, ReasoningTokens, Usage
from microscale.text.events import Kind

MAX_QUEUED = 4
"""Batches of outputs that wait, for each choice, until the client has taken those before."""

TOLD_TOGETHER = 64
TOLD_AFTER_S = 0.5
"""Tokens, and time, between two updates of the metrics: few for what they cost, and often enough to be watched."""


@dataclass(frozen=True)
class Ask:
    """What the choices of one prompt share."""

    prompt: list[int]
    params: SamplingParams


def sampling_params(
    fields: SamplingFields,
    num_prompt: int,
    host: Host,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The request's wishes, with no more tokens than fit. OpenAI's defaults, not the engine's."""
    room = host.max_model_len - num_prompt
    # A prompt whose own log-probabilities are all that is wanted needs no room for an answer.
    if room < (0 if max_tokens == 0 else 1):
        raise BadField(
            f"The prompt has {num_prompt} tokens, and this model's maximum context length is {host.max_model_len} "
            "tokens, with room for an answer: shorten the prompt.",
            "prompt",
            "context_length_exceeded",
        )
    bias = fields.logit_bias or {}
    if len(bias) > host.limits.max_logit_bias:
        raise BadField(
            f"logit_bias has {len(bias)} tokens; at most {host.limits.max_logit_bias} are taken.", "logit_bias"
        )
    num_tokens = room if max_tokens is None else min(max_tokens, room)
    least = fields.min_tokens or 0
    if max_tokens is not None and least > max_tokens:
        raise BadField(f"min_tokens is {least}, more than the most, {max_tokens}.", "min_tokens")
    return SamplingParams(
        max_tokens=num_tokens,
        temperature=1.0 if fields.temperature is None else fields.temperature,
        seed=fields.seed,
        ignore_eos=bool(fields.ignore_eos),
        top_k=fields.top_k or 0,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        min_p=fields.min_p or 0.0,
        repetition_penalty=_repetition_penalty(fields),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=bias,
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        min_tokens=min(least, num_tokens),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _repetition_penalty(fields: SamplingFields) -> float:
    given = fields.repeat_penalty if fields.repetition_penalty is None else fields.repetition_penalty
    return 1.0 if given is None else given


def num_choices(fields: SamplingFields, num_prompts: int, host: Host) -> int:
    """``n``, if it and the number of stop strings are within bounds."""
    limits = host.limits
    n = fields.n or 1
    if n > limits.max_n:
        raise BadField(f"n is {n}; at most {limits.max_n} choices are made.", "n")
    if n * num_prompts > limits.max_choices:
        raise BadField(f"{num_prompts} prompts times n = {n} is more than {limits.max_choices} choices.", "prompt")
    if len(fields.stops) > limits.max_stop_strings:
        raise BadField(f"stop has {len(fields.stops)} strings; at most {limits.max_stop_strings} are taken.", "stop")
    return n


def requests(record: Record, fields: SamplingFields, asks: Sequence[Ask], n: int) -> list[Request]:
    """One for each choice: all choices of the first prompt, then of the second. Seeds count up over a prompt's own."""
    # Who shares no key shares no cache: whether a prompt was there before is told, and would tell on others.
    salt = record.owner + (fields.cache_salt or "")
    if fields.cache_prompt is False:
        salt = secrets.token_hex(16)
    made: list[Request] = []
    for ask in asks:
        for number in range(n):
            seed = ask.params.seed
            params = ask.params if seed is None or not number else replace(ask.params, seed=(seed + number) % 2**63)
            name = f"{record.request_id}-{len(made)}"
            made.append(Request(name, ask.prompt, params, fields.priority or 0, salt))
    return made


@dataclass(frozen=True)
class ShortWay:
    """Of a token that is its own text and nothing else: from the engine's message to the client's in one call."""

    wire: Wire
    event: Callable[[Kind, str], bytes]
    """What the client gets for it. Who asks sends it: tokens are counted by this."""


async def generate(
    host: Host,
    record: Record,
    asked: Sequence[Request],
    choices: Sequence[Choice],
    short: ShortWay | None = None,
) -> AsyncGenerator[tuple[Choice, Step], None]:
    """Steps of all choices as they come. Leaving it early aborts what still runs.

    Plain tokens of an only choice go the ``short`` way, if there is one, and are in no step.
    """
    host.check_open()
    streams = await _submit_all(host.engine, asked)
    clock = _Clock(host, record, len(choices))
    if short is not None and len(streams) == 1:
        streams[0].tap(partial(_take_plain, short, choices[0], clock))
    try:
        record.prompt_tokens = sum(len(prompt) for prompt in {id(r.prompt): r.prompt for r in asked}.values())
        host.metrics.prompt_tokens.inc(record.prompt_tokens)
        cached: dict[int, int] = {}
        async with aclosing(_merged(streams)) as arrivals:
            async for at, arrived in arrivals:
                choice = choices[at]
                if choice.done:
                    continue
                scores = asked[at].params.prompt_logprobs is not None
                outputs = choice.take_scores(arrived) if scores else arrived
                if not outputs:
                    continue
                if len(outputs) > host.limits.max_unread_tokens:
                    raise SlowReader(f"The client is {len(outputs)} tokens behind.")
                if clock.is_first(at):
                    prompt = id(asked[at].prompt)
                    cached[prompt] = max(cached.get(prompt, 0), outputs[0].num_cached)
                    record.cached_tokens = sum(cached.values())
                # The end of a prompt that was only scored has no token.
                num_tokens = len(outputs) - (outputs[-1].token is None)
                if num_tokens or clock.is_first(at):
                    clock.tick(at, num_tokens)
                step = choice.advance(outputs)
                if step is None:
                    continue
                if step.finish is not None:
                    streams[at].close()
                yield choice, step
    finally:
        clock.tell()
        for stream in streams:
            stream.close()


class _Clock:
    """When tokens came. Told to the metrics many together, to keep locks and buckets out of each token's way."""

    def __init__(self, host: Host, record: Record, num_choices: int) -> None:
        self._metrics = host.metrics
        self._record = record
        self._last = [0.0] * num_choices
        self._gaps: list[float] = []
        self._num_told = 0
        self._told_s = 0.0

    def is_first(self, at: int) -> bool:
        return not self._last[at]

    def tick(self, at: int, num_tokens: int) -> None:
        now = time.perf_counter()
        last = self._last[at]
        if last:
            if num_tokens == 1:
                self._gaps.append(now - last)
            else:
                self._gaps += [(now - last) / num_tokens] * num_tokens
            if len(self._gaps) >= TOLD_TOGETHER or now - self._told_s >= TOLD_AFTER_S:
                self.tell()
                self._told_s = now
        elif self._record.first_token_s is None:
            self._record.first_token_s = now - self._record.started
            self._metrics.first_token.observe(self._record.first_token_s)
        self._last[at] = now
        self._record.completion_tokens += num_tokens

    def tell(self) -> None:
        self._metrics.between_tokens.observe_all(self._gaps)
        self._gaps.clear()
        self._metrics.generated_tokens.inc(self._record.completion_tokens - self._num_told)
        self._num_told = self._record.completion_tokens


def _take_plain(short: ShortWay, choice: Choice, clock: _Clock, token: int) -> bool:
    """Whether a token could go the short way, and has gone."""
    if not short.wire.writable:
        return False
    plain = choice.advance_plain(token)
    if plain is None:
        return False
    clock.tick(0, 1)
    short.wire.write_chunk(short.event(*plain))
    return True


async def _submit_all(engine: EngineClient, asked: Sequence[Request]) -> list[Stream]:
    """All or none: one that is refused takes the others with it."""
    if len(asked) == 1:
        return [await engine.submit(asked[0])]
    # Together: the engine answers between steps, and one after the other would wait for a step each.
    results = await asyncio.gather(*map(engine.submit, asked), return_exceptions=True)
    streams = [result for result in results if isinstance(result, Stream)]
    for result in results:
        if isinstance(result, BaseException):
            for stream in streams:
                stream.close()
            raise result
    return streams


async def _taken(stream: Stream) -> AsyncGenerator[list[Output], None]:
    """What a stream gives, the first token by itself: clients time prefill by the first chunk."""
    first = True
    while outputs := await stream.take():
        if first and len(outputs) > 1:
            yield outputs[:1]
            outputs = outputs[1:]
        first = False
        yield outputs


async def _merged(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, list[Output]], None]:
    """Outputs of all streams as they arrive, until all have ended."""
    if len(streams) == 1:
        # Without ``_taken``: one generator less on the way of every token.
        [stream] = streams
        if outputs := await stream.take():
            yield 0, outputs[:1]
            outputs = outputs[1:] or await stream.take()
        while outputs:
            yield 0, outputs
            outputs = await stream.take()
        return
    queue: asyncio.Queue[tuple[int, list[Output]] | BaseException | None] = asyncio.Queue(MAX_QUEUED * len(streams))

    async def read(at: int, stream: Stream) -> None:
        try:
            async with aclosing(_taken(stream)) as taken:
                async for outputs in taken:
                    await queue.put((at, outputs))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    readers = [asyncio.create_task(read(at, stream)) for at, stream in enumerate(streams)]
    try:
        open_streams = len(readers)
        while open_streams:
            match await queue.get():
                case None:
                    open_streams -= 1
                case BaseException() as error:
                    raise error
                case arrival:
                    yield arrival
    finally:
        for reader in readers:
            reader.cancel()


def usage(record: Record, num_reasoning: int | None = None) -> Usage:
    cached = CachedTokens(record.cached_tokens)
    total = record.prompt_tokens + record.completion_tokens
    if num_reasoning is None:
        return Usage(record.prompt_tokens, record.completion_tokens, total, cached)
    return Usage(record.prompt_tokens, record.completion_tokens, total, cached, ReasoningTokens(num_reasoning))
