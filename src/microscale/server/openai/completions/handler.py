"""Answers ``/v1/completions``: continues a raw prompt, given as text or token ids."""

from __future__ import annotations

import secrets
import time
from contextlib import aclosing

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from microscale.server import error_texts
from microscale.server.generation.choice import ChoiceOutput, ChoiceStep, whole_steps
from microscale.server.generation.engine_requests import num_choices, requests, sampling_params
from microscale.server.generation.stream import FastPath, generate
from microscale.server.host import Host
from microscale.server.http.encoding import TextSlot, encode
from microscale.server.http.exchange import Exchange, event_bytes
from microscale.server.openai.completions.logprobs import (
    LogprobWriter,
    ScoredToken,
    echoed,
    generated,
    prompt_logprobs,
)
from microscale.server.openai.completions.schema import CompletionRequest, PromptLogprob, TextChoice, TextReply
from microscale.server.openai.usage import Usage, usage
from microscale.server.structured.turn_grammar import completion_grammar
from microscale.text.output import Delta, PlainOutput

DEFAULT_TOKENS = 16
"""OpenAI's default."""


class Completions:
    """One request to ``/v1/completions``."""

    def __init__(self, host: Host, request: CompletionRequest, exchange: Exchange) -> None:
        self._host = host
        self._request = request
        self._exchange = exchange
        self._record = exchange.record
        self._record.request_id = f"cmpl-{secrets.token_hex(12)}"
        self._name = host.check_model(request.model)
        self._created = int(time.time())
        self._writers: dict[int, LogprobWriter] = {}
        """By choice."""

    async def run(self) -> None:
        host, request = self._host, self._request
        prompts = await self._prompts()
        n = num_choices(request, len(prompts), host)
        max_tokens = DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens
        all_params = [
            sampling_params(request, len(prompt), host, max_tokens, request.logprobs, _scored(request))
            for prompt in prompts
        ]
        grammar = await completion_grammar(host, request, request)
        if grammar is not None:
            ends = tuple(sorted({*host.chat_format.stops, *(request.stop_token_ids or ())}))
            all_params = [replace(params, stop_token_ids=ends, grammar=grammar) for params in all_params]
        choices = [
            ChoiceOutput(
                index,
                PlainOutput(
                    host.tokenizer,
                    stops=request.stops,
                    keep_stop=bool(request.include_stop_str_in_output),
                    show_control=request.skip_special_tokens is False,
                ),
                keep_outputs=request.logprobs is not None,
            )
            for index in range(n * len(prompts))
        ]
        self._prompt_of = [prompts[index // n] for index in range(len(choices))]
        asked = requests(self._record, request, list(zip(prompts, all_params, strict=True)), n)
        steps = generate(host, self._record, asked, choices, self._fast_path(choices[0]))
        async with aclosing(steps):
            if request.stream:
                async for choice, step in steps:
                    await self._exchange.event(encode(self._reply([self._choice(choice, step)])))
            else:
                whole = zip(choices, await whole_steps(steps, len(choices)), strict=True)
                done = [self._choice(choice, step) for choice, step in whole]
                await self._exchange.json(encode(self._reply(done, final=True)))
                return
        if request.include_usage:
            await self._exchange.event(encode(self._reply([], final=True)))
        await self._exchange.end_events()

    def _fast_path(self, choice: ChoiceOutput) -> FastPath | None:
        """Replies for plain tokens, encoded once: they differ only by their text."""
        request, wire = self._request, self._exchange.wire
        has_extras = request.logprobs is not None or request.return_token_ids or request.usage_on_every_chunk
        if not request.stream or has_extras or wire is None:
            return None
        slot = TextSlot(
            lambda mark: event_bytes(
                encode(self._reply([self._choice(choice, ChoiceStep(Delta((), content=mark), (), False, None))]))
            )
        )
        return FastPath(wire, lambda kind, text: slot.filled(text))

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
                raise error_texts.empty("prompt")
            return lists
        num_choices(self._request, len(texts), host)
        size = sum(map(len, texts))
        adds = self._request.add_special_tokens is not False
        return await host.off_loop(
            size, lambda: [host.chat_format.encode_text(text, add_special_tokens=adds) for text in texts]
        )

    def _choice(self, choice: ChoiceOutput, step: ChoiceStep) -> TextChoice:
        finish = None
        if step.finish is not None:
            finish = step.finish.value
            self._host.finished(self._record, finish)
        request = self._request
        wants_ids = bool(request.return_token_ids)
        echo = step.first and bool(request.echo)
        logprobs = None
        if request.logprobs is not None:
            scored = self._echoed(choice) if echo else []
            logprobs = self._writer(choice).write([*scored, *map(generated, step.outputs)])
        return TextChoice(
            choice.index,
            self._text_of(choice) + step.delta.content if echo else step.delta.content,
            finish,
            logprobs,
            step.delta.token_ids if wants_ids else UNSET,
            self._prompt_of[choice.index] if wants_ids and step.first else UNSET,
            UNSET if choice.output.stopped is None or finish is None else choice.output.stopped,
            self._prompt_logprobs(choice) if step.first else UNSET,
        )

    def _text_of(self, choice: ChoiceOutput) -> str:
        """The prompt of a choice as text."""
        text = self._sent(choice)
        return self._host.tokenizer.decode(self._prompt_of[choice.index], show_control=True) if text is None else text

    def _sent(self, choice: ChoiceOutput) -> str | None:
        """The prompt of a choice, if it was sent as text."""
        prompt = self._request.prompt
        text = prompt if isinstance(prompt, str) else prompt[choice.index // (self._request.n or 1)]
        return text if isinstance(text, str) else None

    def _writer(self, choice: ChoiceOutput) -> LogprobWriter:
        if choice.index not in self._writers:
            shows_control = self._request.skip_special_tokens is False or bool(self._request.echo)
            self._writers[choice.index] = LogprobWriter(self._host.tokenizer, shows_control=shows_control)
        return self._writers[choice.index]

    def _echoed(self, choice: ChoiceOutput) -> list[ScoredToken]:
        prompt = self._prompt_of[choice.index]
        return echoed(prompt, choice.scored, self._request.logprobs or 0, self._num_added(choice))

    def _prompt_logprobs(self, choice: ChoiceOutput) -> list[dict[str, PromptLogprob] | None] | UnsetType:
        most = self._request.prompt_logprobs
        return UNSET if most is None else prompt_logprobs(self._host.tokenizer, choice.scored, most)

    def _num_added(self, choice: ChoiceOutput) -> int:
        """How many tokens the chat format has added before a text prompt."""
        text = self._sent(choice)
        if text is None or self._request.add_special_tokens is False:
            return 0
        return len(self._host.chat_format.added_to(text))

    def _reply(self, choices: list[TextChoice], *, final: bool = False) -> TextReply:
        reported: Usage | UnsetType | None = None if self._request.include_usage else UNSET
        if final or self._request.usage_on_every_chunk:
            reported = usage(self._record)
        return TextReply(self._record.request_id, self._created, self._name, choices, reported)


def _scored(request: CompletionRequest) -> int | None:
    """How many top tokens to return per position of the prompt; ``None`` if the prompt is not scored."""
    wanted = [] if request.prompt_logprobs is None else [request.prompt_logprobs]
    if request.echo and (request.logprobs is not None or request.max_tokens == 0):
        wanted.append(request.logprobs or 0)
    return max(wanted, default=None)


async def complete(host: Host, body: bytes, exchange: Exchange) -> None:
    host.check_open()
    request = await host.read_request(CompletionRequest, body, exchange)
    await Completions(host, request, exchange).run()
