"""The engine's records as messages, and back: requests, outputs, statistics."""

from __future__ import annotations

from dataclasses import asdict, fields

import msgspec

from microscale.engine.output import Output, Stats
from microscale.engine.process.frames import HEADER
from microscale.engine.process.messages import (
    MAX_REASON,
    EngineConfig,
    RequestOutput,
    Sampling,
    StatsReply,
    Submit,
    decode_for_engine,
    encode,
    error_of,
    failure,
    finite,
)
from microscale.engine.request import Finish, Request
from microscale.engine.sampling_params import SamplingParams
from microscale.errors import BadMessage, MicroscaleError


def submit_of(number: int, request: Request) -> Submit:
    params = {name.name: getattr(request.params, name.name) for name in fields(request.params)}
    params["logit_bias"] = dict(request.params.logit_bias)
    return Submit(
        number, request.request_id, tuple(request.prompt), Sampling(**params), request.priority, request.cache_salt
    )


def request_of(message: Submit) -> Request:
    params = SamplingParams(**msgspec.structs.asdict(message.params))
    return Request(message.request_id, message.prompt, params, message.priority, message.cache_salt)


def checked(message: Submit | EngineConfig, error: type[MicroscaleError]) -> bytes:
    """A message that the engine process will be able to read: it is read here first. 10 us for 1000 tokens."""
    try:
        data = encode(message)
        decode_for_engine(data[HEADER:])
    except (BadMessage, TypeError, OverflowError) as caught:
        raise error(f"This cannot be asked of the engine: {caught}") from None
    return data


def to_wire(number: int, output: Output) -> RequestOutput:
    return RequestOutput(
        number,
        output.token,
        None if output.logprob is None else finite(output.logprob),
        tuple((token, finite(logprob)) for token, logprob in output.top_logprobs),
        None if output.finish is None else output.finish.value,
        None if output.error is None else _cut(failure(output.error)),
        output.num_cached,
        tuple((t, finite(p), tuple((u, finite(q)) for u, q in top)) for t, p, top in output.prompt_logprobs),
        output.drafted,
        output.accepted,
    )


def from_wire(request_id: str, output: RequestOutput) -> Output:
    return Output(
        request_id,
        output.token,
        output.logprob,
        output.top_logprobs,
        None if output.finish is None else Finish(output.finish),
        None if output.error is None else error_of(*output.error),
        output.num_cached,
        output.prompt_logprobs,
        output.drafted,
        output.accepted,
    )


def stats_reply(stats: Stats) -> StatsReply:
    return StatsReply(**asdict(stats))


def stats_of(message: StatsReply) -> Stats:
    return Stats(**msgspec.structs.asdict(message))


def _cut(told: tuple[str, str]) -> tuple[str, str]:
    return told[0], told[1][:MAX_REASON]
