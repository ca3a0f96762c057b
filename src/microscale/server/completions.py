"""``/v1/completions``: a raw prompt, text or token ids, and its continuation."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

from msgspec import UNSET, UnsetType

from microscale.engine.engine import Output
from microscale.server.answer import Exchange, event_bytes
from microscale.server.choice import Choice, Step
from microscale.server.faults import BadField
from microscale.server.generation import Ask, ShortWay, generate, num_choices, requests, sampling_params, usage
from microscale.server.host import Host
from microscale.server.logprobs import token_text
from microscale.server.parsing import read_request
from microscale.server.protocol import CompletionRequest
from microscale.server.replies import TextChoice, TextLogprobs, TextReply, TextSlot, encode
from microscale.server.structured import completion_grammar
from microscale.text.output import Delta, PlainOutput
from microscale.text.tokenizer import Tokenizer

DEFAULT_TOKENS = 16
"""OpenAI's."""


class Completions:
    """One request's."""

    def __init__(self, host: Host, request: CompletionRequest, exchange: Exchange) -> None:
        self._host = host
        self._request = request
        self._exchange = exchange
        self._record = exchange.record
        self._record.request_id = f"cmpl-{secrets.token_hex(12)}"
        self._name = host.check_model(request.model)
        self._created = int(time.time())
        self._offsets: dict[int, int] = {}
        """Choice → characters of the tokens that it has had."""

    async def run(self) -> None:
        host, request = self._host, self._request
        prompts = await self._prompts()
        n = num_choices(request, len(prompts), host)
        max_tokens = request.max_tokens or DEFAULT_TOKENS
        all_params = [sampling_params(request, len(prompt), host, max_tokens, request.logprobs) for prompt in prompts]
        grammar = await completion_grammar(host, request, request)
        if grammar is not None:
            ends = tuple(sorted({*host.renderer.tokens.stops, *(request.stop_token_ids or ())}))
            all_params = [replace(params, stop_token_ids=ends, grammar=grammar) for params in all_params]
        asks = [Ask(prompt, params) for prompt, params in zip(prompts, all_params, strict=True)]
        choices = [
            Choice(
                index,
                PlainOutput(host.tokenizer, stops=request.stops),
                keep_outputs=request.logprobs is not None,
            )
            for index in range(n * len(asks))
        ]
        self._prompt_of = [asks[index // n].prompt for index in range(len(choices))]
        asked = requests(self._record, request, asks, n)
        steps = generate(host, self._record, asked, choices, self._short_way(choices[0]))
        async with aclosing(steps):
            if request.stream:
                async for choice, step in steps:
                    await self._exchange.event(encode(self._reply([self._choice(choice, step)])))
            else:
                whole: list[list[TextChoice]] = [[] for _ in choices]
                async for choice, step in steps:
                    whole[choice.index].append(self._choice(choice, step))
                done = [_whole(pieces) for pieces in whole]
                await self._exchange.json(encode(self._reply(done, final=True)))
                return
        if request.include_usage:
            await self._exchange.event(encode(self._reply([], final=True)))
        await self._exchange.end_events()

    def _short_way(self, choice: Choice) -> ShortWay | None:
        """A reply of a plain token, made once: later ones differ by the text alone."""
        request, wire = self._request, self._exchange.wire
        if not request.stream or request.logprobs is not None or request.return_token_ids or wire is None:
            return None
        slot = TextSlot(
            lambda mark: event_bytes(
                encode(self._reply([self._choice(choice, Step(Delta((), content=mark), (), False, None))]))
            )
        )
        return ShortWay(wire, lambda kind, text: slot.filled(text))

    async def _prompts(self) -> list[list[int]]:
        prompt, host = self._request.prompt, self._host
        if isinstance(prompt, str):
            texts: list[str] = [prompt]
        elif prompt and isinstance(prompt[0], str):
            texts = [text for text in prompt if isinstance(text, str)]
        elif prompt and isinstance(prompt[0], int):
            return [[token for token in prompt if isinstance(token, int)]]
        else:
            lists = [tokens for tokens in prompt if isinstance(tokens, list)]
            if not lists:
                raise BadField("prompt is empty.", "prompt")
            return lists
        num_choices(self._request, len(texts), host)
        size = sum(map(len, texts))
        return await host.off_loop(size, lambda: [host.tokenizer.encode_with_control(text) for text in texts])

    def _choice(self, choice: Choice, step: Step) -> TextChoice:
        finish = None
        if step.finish is not None:
            finish = step.finish.value
            self._record.finishes.append(finish)
            self._host.metrics.finished(finish)
        wants_ids = bool(self._request.return_token_ids)
        return TextChoice(
            choice.index,
            step.delta.content,
            finish,
            self._logprobs(choice, step.outputs) if self._request.logprobs is not None else None,
            step.delta.token_ids if wants_ids else UNSET,
            self._prompt_of[choice.index] if wants_ids and step.first else UNSET,
            UNSET if choice.output.stopped is None or finish is None else choice.output.stopped,
        )

    def _logprobs(self, choice: Choice, outputs: Sequence[Output]) -> TextLogprobs:
        offset = self._offsets.get(choice.index, 0)
        logprobs = TextLogprobs([], [], [], [])
        tokenizer = self._host.tokenizer
        for output in outputs:
            text = token_text(tokenizer, output.token or 0)
            logprobs.tokens.append(text)
            logprobs.token_logprobs.append(output.logprob or 0.0)
            logprobs.top_logprobs.append(_top(tokenizer, output))
            logprobs.text_offset.append(offset)
            offset += len(tokenizer.token_bytes(output.token or 0).decode("utf-8", "replace"))
        self._offsets[choice.index] = offset
        return logprobs

    def _reply(self, choices: list[TextChoice], *, final: bool = False) -> TextReply:
        said = usage(self._record) if final else None if self._request.include_usage else UNSET
        return TextReply(self._record.request_id, self._created, self._name, choices, said)


def _top(tokenizer: Tokenizer, output: Output) -> dict[str, float]:
    top = {token_text(tokenizer, token): logprob for token, logprob in output.top_logprobs}
    # The chosen one is always there, as OpenAI has it.
    return top | {token_text(tokenizer, output.token or 0): output.logprob or 0.0}


def _whole(pieces: Sequence[TextChoice]) -> TextChoice:
    """The pieces of one choice as one."""
    first, last = pieces[0], pieces[-1]
    logprobs = None
    if first.logprobs is not None:
        logprobs = TextLogprobs([], [], [], [])
        for piece in pieces:
            if piece.logprobs is not None:
                for name in TextLogprobs.__struct_fields__:
                    getattr(logprobs, name).extend(getattr(piece.logprobs, name))
    ids: tuple[int, ...] | UnsetType = UNSET
    if first.token_ids is not UNSET:
        ids = tuple(token for piece in pieces for token in piece.token_ids or ())
    text = "".join(piece.text for piece in pieces)
    return TextChoice(first.index, text, last.finish_reason, logprobs, ids, first.prompt_token_ids, last.stop_reason)


async def complete(host: Host, body: bytes, exchange: Exchange) -> None:
    host.check_open()
    request = await read_request(host, CompletionRequest, body, exchange)
    await Completions(host, request, exchange).run()
