"""Builds the engine's requests from a request's fields: sampling parameters, limits, one request per choice."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.server import error_texts
from microscale.server.generation.chat_prompt import ChatPrompt
from microscale.server.host import Host
from microscale.server.http.exchange import Record
from microscale.server.options import SamplingDefaults
from microscale.server.requests.chat import ChatFields
from microscale.server.requests.sampling import SamplingFields
from microscale.server.structured.output_format import OutputFormat
from microscale.server.structured.turn_grammar import turn_grammar


def sampling_params(
    fields: SamplingFields,
    num_prompt: int,
    host: Host,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The request's parameters, with no more tokens than fit. The defaults are the model's or OpenAI's, not the
    engine's."""
    room = host.max_model_len - num_prompt
    # A request that only scores its prompt needs no room for an answer.
    if room < (0 if max_tokens == 0 else 1):
        raise error_texts.context_length_exceeded(num_prompt, host.max_model_len)
    bias = fields.logit_bias or {}
    if len(bias) > host.limits.max_logit_bias:
        raise error_texts.too_long("logit_bias", len(bias), "tokens", host.limits.max_logit_bias)
    num_tokens = room if max_tokens is None else min(max_tokens, room)
    least = fields.min_tokens or 0
    if max_tokens is not None and least > max_tokens:
        raise error_texts.min_tokens_above_max(least, max_tokens)
    return SamplingParams(
        max_tokens=num_tokens,
        seed=fields.seed,
        ignore_eos=bool(fields.ignore_eos),
        **_chosen(fields, host.sampling),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=bias,
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        min_tokens=min(least, num_tokens),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


async def turn_params(
    host: Host,
    chat: ChatFields,
    prompt: ChatPrompt,
    output_format: OutputFormat | None,
    fields: SamplingFields,
    max_tokens: int | None,
    logprobs: int | None = None,
) -> SamplingParams:
    """The parameters of one turn of a conversation, which may have to follow a grammar."""
    grammar = await turn_grammar(host, chat, output_format, fields, prompt.begun)
    params = sampling_params(fields, len(prompt.tokens), host, max_tokens, logprobs)
    if params.ignore_eos:
        return params
    # The checkpoint may not list all tokens that end a turn.
    stops = {*params.stop_token_ids, *prompt.stops}
    return replace(params, stop_token_ids=tuple(sorted(stops)), grammar=grammar)


def _chosen(fields: SamplingFields, defaults: SamplingDefaults) -> dict[str, Any]:
    """How the next token is chosen: by the request, else by the model's defaults."""
    chosen = {name: getattr(fields, name) for name in SamplingDefaults.__dataclass_fields__}
    if chosen["repetition_penalty"] is None:
        chosen["repetition_penalty"] = fields.repeat_penalty
    return {name: getattr(defaults, name) if value is None else value for name, value in chosen.items()}


def num_choices(fields: SamplingFields, num_prompts: int, host: Host) -> int:
    """``n``, after checking it and the number of stop strings against the limits."""
    limits = host.limits
    n = fields.n or 1
    if n > limits.max_n:
        raise error_texts.out_of_range("n", f"at most {limits.max_n}")
    if n * num_prompts > limits.max_choices:
        raise error_texts.too_many(
            f"choices ({num_prompts} prompts times n = {n})", n * num_prompts, limits.max_choices, "prompt"
        )
    if len(fields.stops) > limits.max_stop_strings:
        raise error_texts.too_long("stop", len(fields.stops), "strings", limits.max_stop_strings)
    return n


def requests(
    record: Record, fields: SamplingFields, prompts: Sequence[tuple[list[int], SamplingParams]], n: int
) -> list[Request]:
    """``n`` requests for each prompt and its parameters, in order. Within a prompt the seed counts up."""
    # API keys share no cache: a reply says how much was cached, which would reveal what others have sent.
    salt = record.owner + (fields.cache_salt or "")
    if fields.cache_prompt is False:
        salt = secrets.token_hex(16)
    made: list[Request] = []
    for prompt, params in prompts:
        for number in range(n):
            seed = None if params.seed is None else (params.seed + number) % 2**63
            name = f"{record.request_id}-{len(made)}"
            made.append(Request(name, prompt, replace(params, seed=seed), fields.priority or 0, salt))
    return made
