"""Submits requests to the engine, merges the streams that come back, and counts tokens. All APIs share this."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from microscale.engine.client.client import EngineClient
from microscale.engine.client.stream import Stream
from microscale.engine.output import Output
from microscale.engine.request import Request
from microscale.errors import EngineDied
from microscale.server import error_texts
from microscale.server.generation.choice import ChoiceOutput, ChoiceStep
from microscale.server.host import Host
from microscale.server.http.exchange import Record
from microscale.server.http.wire import Wire
from microscale.text.events import TextKind

MAX_QUEUED = 4
"""Batches of outputs per choice that may wait for a slow client."""

FLUSH_TOKENS = 64
FLUSH_S = 0.5
"""Tokens and seconds between two updates of the metrics: rare enough to be cheap, often enough for a dashboard."""


@dataclass(frozen=True)
class FastPath:
    """Sends tokens that only add text: from the engine's message to the client's socket in one call."""

    wire: Wire
    event: Callable[[TextKind, str], bytes]
    """Returns the bytes to send for a text. Call it once per text, and send the result."""


async def generate(
    host: Host,
    record: Record,
    asked: Sequence[Request],
    choices: Sequence[ChoiceOutput],
    fast_path: FastPath | None = None,
) -> AsyncGenerator[tuple[ChoiceOutput, ChoiceStep], None]:
    """The steps of all choices as they come. Closing the generator early aborts what still runs.

    If there is one choice and a ``fast_path``, plain tokens take it and appear in no step.
    """
    streams = await _submit_all(host, asked)
    clock = _Clock(host, record, len(choices))
    if fast_path is not None and len(streams) == 1:
        streams[0].tap(partial(_take_plain, fast_path, choices[0], clock))
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
                    raise error_texts.slow_reader(len(outputs))
                if clock.is_first(at):
                    prompt = id(asked[at].prompt)
                    cached[prompt] = max(cached.get(prompt, 0), outputs[0].num_cached)
                    record.cached_tokens = sum(cached.values())
                # A request that only scores its prompt ends without a token.
                num_tokens = len(outputs) - (outputs[-1].token is None)
                if num_tokens or clock.is_first(at):
                    clock.tick(at, num_tokens)
                for step in choice.advance_all(outputs):
                    if step.finish is not None:
                        streams[at].close()
                        record.drafts = _sum_drafts(streams) if host.drafts else None
                    if step.delta.reasoning:
                        record.reasoning_tokens += len(step.delta.token_ids)
                    yield choice, step
    finally:
        clock.flush()
        for stream in streams:
            stream.close()


def _sum_drafts(streams: Sequence[Stream]) -> tuple[int, int]:
    """The numbers of drafted and of accepted tokens, over all choices."""
    drafted, accepted = zip(*(stream.drafts for stream in streams), strict=True)
    return sum(drafted), sum(accepted)


class _Clock:
    """Times the tokens. Metrics are updated for many tokens at once, to keep locks off each token's path."""

    def __init__(self, host: Host, record: Record, num_choices: int) -> None:
        self._metrics = host.metrics
        self._record = record
        self._last = [0.0] * num_choices
        self._gaps: list[float] = []
        self._num_flushed = 0
        self._flushed_s = 0.0

    def is_first(self, at: int) -> bool:
        return not self._last[at]

    def tick(self, at: int, num_tokens: int, *, is_reasoning: bool = False) -> None:
        now = time.perf_counter()
        last = self._last[at]
        if last:
            if num_tokens == 1:
                self._gaps.append(now - last)
            else:
                self._gaps += [(now - last) / num_tokens] * num_tokens
            if len(self._gaps) >= FLUSH_TOKENS or now - self._flushed_s >= FLUSH_S:
                self.flush()
                self._flushed_s = now
        elif self._record.first_token_s is None:
            self._record.first_token_s = now - self._record.started
            self._metrics.first_token.observe(self._record.first_token_s)
        self._last[at] = now
        self._record.completion_tokens += num_tokens
        self._record.reasoning_tokens += num_tokens * is_reasoning

    def flush(self) -> None:
        self._metrics.between_tokens.observe_all(self._gaps)
        self._gaps.clear()
        self._metrics.generated_tokens.inc(self._record.completion_tokens - self._num_flushed)
        self._num_flushed = self._record.completion_tokens


def _take_plain(fast_path: FastPath, choice: ChoiceOutput, clock: _Clock, tokens: list[int]) -> int:
    """Send tokens in one event, up to the first that must take the slow path; return how many."""
    if not fast_path.wire.writable:
        return 0
    texts = []
    kind = None
    for token in tokens:
        plain = choice.advance_plain(token)
        if plain is None:
            break
        kind, text = plain  # all of one kind: only a control token begins another
        texts.append(text)
    if kind is not None:
        clock.tick(0, len(texts), is_reasoning=kind is TextKind.REASONING)
        fast_path.wire.write_chunk(fast_path.event(kind, "".join(texts)))
    return len(texts)


async def _submit_all(host: Host, asked: Sequence[Request]) -> list[Stream]:
    """Submit to the engine, or to the one that replaces it if it dies before it has taken them."""
    while True:
        engine = await host.running_engine()
        try:
            return await _submit_to(engine, asked)
        except EngineDied:
            if not host.restarts_left:
                raise


async def _submit_to(engine: EngineClient, asked: Sequence[Request]) -> list[Stream]:
    """Submit all or none: if one is refused, the others are withdrawn."""
    if len(asked) == 1:
        return [await engine.submit(asked[0])]
    # In parallel: the engine answers between steps, so each one in sequence would wait for a step.
    results = await asyncio.gather(*map(engine.submit, asked), return_exceptions=True)
    streams = [result for result in results if isinstance(result, Stream)]
    for result in results:
        if isinstance(result, BaseException):
            for stream in streams:
                stream.close()
            raise result
    return streams


async def _taken(stream: Stream) -> AsyncGenerator[list[Output], None]:
    """A stream's outputs, with the first token alone: clients measure prefill by the first chunk."""
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
        # Without ``_taken``: one generator less per token.
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
