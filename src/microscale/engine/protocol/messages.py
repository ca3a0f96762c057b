"""What the engine process and its owner say to each other.

    owner                                engine process
      Hello ───────────────────────────────►
      ◄─────────────────────────────── Hello      versions differ: both sides say so and stop
      Load ────────────────────────────────►
      ◄─────────────── Loading … Ready | Failed
      Submit ──────────────────────────────►
      ◄─────────────────── Accepted | Refused      in the order of the Submits
      ◄──────────────────────── Tokens …           one message a step, also for steps without outputs
      Abort, GetStats, Drain ──────────────►
      ◄────────────────── StatsReply, Drained

Options, sampling parameters, outputs and statistics travel as the records that both sides use (``EngineConfig``,
``SamplingParams``, ``Output``, ``Stats``). Every message is bounded, and unknown fields are refused. Nothing here needs
torch: versions are compared before either side waits for its import.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from microscale import errors
from microscale.engine.config import MAX_TEXT, EngineConfig, Natural, Positive, Seconds, Token
from microscale.engine.output import Output, Stats
from microscale.engine.protocol.frames import frame
from microscale.engine.sampling_params import SamplingParams
from microscale.errors import BadMessage, MicroscaleError

T = TypeVar("T")
VERSION = 10
"""Counts up with every change of a message that an older peer would misread."""
MAX_ID = 256
MAX_PROMPT = 2**20
MAX_OUTPUTS = 1024
"""Outputs in one ``Tokens``; a larger step sends several."""

Id = Annotated[str, Meta(min_length=1, max_length=MAX_ID)]


class EngineMessage(Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """The root of all messages; the class's name is the tag."""


class Hello(Struct, frozen=True):
    """The first message either way. Its shape never changes, and unknown fields are let through: a peer of any version
    can read which version this one speaks."""

    microscale: int


# ---- owner to engine -------------------------------------------------------------------------------------------------


class LoadEngine(EngineMessage, frozen=True):
    """Make an engine."""

    config: EngineConfig


class Submit(EngineMessage, frozen=True):
    """A new request. The owner never uses a ``request_id`` twice on one connection."""

    request_id: Id
    prompt: Annotated[tuple[Token, ...], Meta(max_length=MAX_PROMPT)]
    params: SamplingParams
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Annotated[str, Meta(max_length=MAX_ID)] = ""


class Abort(EngineMessage, frozen=True):
    """Forget a request. An unknown id is no error: the request's end may be on its way."""

    request_id: Id


class GetStats(EngineMessage, frozen=True):
    pass


class Drain(EngineMessage, frozen=True):
    """Take nothing new, finish what there is within ``deadline_s``, abort the rest, answer ``Drained``, exit."""

    deadline_s: Seconds


# ---- engine to owner -------------------------------------------------------------------------------------------------


class Loading(EngineMessage, frozen=True):
    """Progress in bytes of the weights, or in kernels that had to be compiled."""

    done: Natural
    total: Natural
    kernels: bool = False


class Ready(EngineMessage, frozen=True):
    """The model is loaded."""

    vocab_size: Positive
    max_model_len: Positive
    eos_token_ids: Annotated[tuple[Token, ...], Meta(max_length=1024)]
    plan: Annotated[str, Meta(max_length=2**20)]
    """Which kernel runs what, as a table."""


class Accepted(EngineMessage, frozen=True):
    request_id: Id


class Refused(EngineMessage, frozen=True):
    request_id: Id
    error: MicroscaleError


class Tokens(EngineMessage, frozen=True):
    """What one step made."""

    outputs: Annotated[tuple[Output, ...], Meta(max_length=MAX_OUTPUTS)]


class StatsReply(EngineMessage, frozen=True):
    stats: Stats


class Drained(EngineMessage, frozen=True):
    """The last message of an engine that ends as asked."""

    num_aborted: Natural


class Failed(EngineMessage, frozen=True):
    """The last message of an engine that fails."""

    error: MicroscaleError


ToEngine: TypeAlias = LoadEngine | Submit | Abort | GetStats | Drain
FromEngine: TypeAlias = Loading | Ready | Accepted | Refused | Tokens | StatsReply | Drained | Failed


def _encode_error(value: object) -> tuple[str, str]:
    if not isinstance(value, MicroscaleError):
        raise TypeError(f"{type(value).__name__} cannot be sent.")
    return failure(value)


def _decode_error(kind: type, value: Any) -> MicroscaleError:
    return error_of(*msgspec.convert(value, tuple[str, str]))


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_error)
_hello = msgspec.msgpack.Decoder(Hello)
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine, dec_hook=_decode_error)


def encode(message: ToEngine | FromEngine | Hello) -> bytes:
    """A message as it goes onto the stream. Bounds are the receiver's to check; a size that cannot be sent is not."""
    return frame(_encoder.encode(message))


def decode_for_engine(payload: bytes) -> ToEngine:
    return _decode(_to_engine, payload)


def decode_for_owner(payload: bytes) -> FromEngine:
    return _decode(_from_engine, payload)


def check_hello(payload: bytes) -> None:
    """Refuse a peer that speaks another version."""
    theirs = _decode(_hello, payload).microscale
    if theirs != VERSION:
        raise BadMessage(
            f"The other process speaks version {theirs} of Microscale's messages and this one version {VERSION}; "
            f"run both from one installation."
        )


def _decode(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, MicroscaleError) as error:
        reason = str(error).removesuffix(".")
        raise BadMessage(f"A message of {len(payload)} bytes cannot be read: {reason}.") from None


def failure(error: BaseException) -> tuple[str, str]:
    """The class and the sentence of an error, as they are sent."""
    if isinstance(error, MicroscaleError):
        kind, text = type(error).__name__, str(error)
    else:
        kind, text = MicroscaleError.__name__, f"{type(error).__name__}: {error}"
    return kind, text[:MAX_TEXT]


def error_of(kind: str, text: str) -> MicroscaleError:
    """The error of which ``failure`` gave the parts."""
    error = getattr(errors, kind, None)
    known = isinstance(error, type) and issubclass(error, MicroscaleError)
    return error(text) if known else MicroscaleError(text)  # type: ignore[misc]
