"""What the engine process and its owner say to each other.

    owner                                engine process
      Hello ───────────────────────────────►
      ◄─────────────────────────────── Hello      versions differ: both sides say so and stop
      Load ────────────────────────────────►
      ◄─────────────── Loading … Ready | Failed
      Submit ──────────────────────────────►
      ◄─────────────────── Accepted | Refused      in the order of the Submits
      ◄──────────────────────── Tokens …           one message a step, also of steps that gave none
      Abort, GetStats, Drain ──────────────►
      ◄────────────────────── Stats, Drained

Every message is bounded and refuses what it does not know. ``Submit`` numbers its request, the engine speaks of it by
that number, so that an id can be used again at once after an abort. Nothing here imports torch: versions are compared
before either side waits for that.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from microscale import errors
from microscale.engine.process.frames import frame
from microscale.errors import BadMessage, MicroscaleError

T = TypeVar("T")
VERSION = 9
"""Counts up with every change of a message that an older peer would misread."""
MAX_ID = 256
MAX_PROMPT = 2**20
MAX_TEXT = 4096
MAX_GRAMMAR = 2**20
MAX_TOP = 64
MAX_REASON = 1024
MAX_OUTPUTS = 1024
"""Outputs in one ``Tokens``; a larger step sends several. With all that they may carry they have 6 MiB."""
MAX_SCORED = 1024
"""Prompt tokens that one output tells the log-probabilities of. Such an output has a ``Tokens`` to itself, of 1 MiB."""
FLOOR = -9999.0
"""Stands for the logarithm of nothing: JSON knows no infinity, and OpenAI's API says it so."""

Natural = Annotated[int, Meta(ge=0, le=2**62)]
Positive = Annotated[int, Meta(ge=1, le=2**62)]
Token = Annotated[int, Meta(ge=0, lt=2**31)]
Number = Annotated[int, Meta(ge=0, lt=2**62)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e6)]
Logprob = Annotated[float, Meta(ge=FLOOR, le=0.0)]
Real = Annotated[float, Meta(ge=-1e6, le=1e6)]
Id = Annotated[str, Meta(min_length=1, max_length=MAX_ID)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
FinishName: TypeAlias = Literal["stop", "length", "abort", "error"]


class Message(Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """The root of all messages; the class's name is the tag."""


class Hello(Struct, frozen=True):
    """The first message either way. Its shape never changes, and unknown fields are let through: a peer of any version
    can read which version this one speaks."""

    microscale: int


# ---- owner to engine -------------------------------------------------------------------------------------------------


class EngineConfig(Message, frozen=True, tag="Load"):
    """What decides which engine is made, in the command line's names."""

    model: Text
    load_format: Text = "auto"
    device: Text = "auto"
    dtype: Text = "auto"
    backend: Text | None = None
    moe_backend: Text | None = None
    precision: Text = "exact"
    layer_format: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()
    moe_activations: Text = "auto"
    kv_cache_dtype: Text = "auto"
    hf_overrides: Annotated[dict[str, Any], Meta(max_length=256)] = {}
    max_model_len: Positive | None = None
    max_num_seqs: Positive = 64
    max_num_batched_tokens: Positive = 2048
    max_queue: Positive = 1024
    prefix_caching: bool = True
    enforce_eager: bool = False
    gpu_memory_utilization: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.9
    reserve_memory: Natural | None = None
    """In bytes."""
    block_size: Positive = 16
    offline: bool = False
    seed: Natural = 0
    threads: Positive | None = None
    tensor_parallel_size: Positive = 1
    nnodes: Positive = 1
    master_addr: Text = ""
    master_port: Annotated[int, Meta(ge=0, lt=2**16)] = 0
    rank_secret_file: Text = ""
    """A file that both machines have, each at a place of its own."""
    kernel_cache: Text | None = None
    """The folder of compiled kernels; Triton's own without."""
    speculative_config: Text | None = None
    """JSON, as the option has it."""
    drain_s: Seconds = 30.0
    """How long requests may go on after SIGTERM."""
    vocabulary: Annotated[tuple[Annotated[bytes, Meta(max_length=1024)], ...], Meta(max_length=2**20)] = ()
    """What the tokens stand for, control tokens by name; grammars need it, and nothing else does."""
    control_tokens: Annotated[tuple[Token, ...], Meta(max_length=2**16)] = ()
    split_pattern: Text = ""
    """What the tokenizer cuts text into before it merges bytes."""


class Sampling(Message, frozen=True):
    """``SamplingParams``, field by field; what the values may be is decided there."""

    max_tokens: Natural = 16
    temperature: Real = 0.0
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    ignore_eos: bool = False
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] = 0
    top_p: Real = 1.0
    min_p: Real = 0.0
    repetition_penalty: Real = 1.0
    presence_penalty: Real = 0.0
    frequency_penalty: Real = 0.0
    logit_bias: Annotated[dict[Token, Real], Meta(max_length=1024)] = {}
    stop_token_ids: Annotated[tuple[Token, ...], Meta(max_length=1024)] = ()
    min_tokens: Natural = 0
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP)] | None = None
    grammar: Annotated[str, Meta(max_length=MAX_GRAMMAR)] | None = None


class Submit(Message, frozen=True):
    """A new request. ``number`` is the owner's, never used twice on one connection."""

    number: Number
    request_id: Id
    prompt: Annotated[tuple[Token, ...], Meta(max_length=MAX_PROMPT)]
    params: Sampling
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Annotated[str, Meta(max_length=MAX_ID)] = ""


class Abort(Message, frozen=True):
    """Forget a request. One that is done or unknown is no error: its end may be on its way."""

    number: Number


class GetStats(Message, frozen=True):
    pass


class Drain(Message, frozen=True):
    """Take nothing new, finish what there is within ``deadline_s``, abort the rest, answer ``Drained``, exit."""

    deadline_s: Seconds


# ---- engine to owner -------------------------------------------------------------------------------------------------


class Loading(Message, frozen=True):
    """So many bytes of the weights are there, of all; or so many of the kernels that were not compiled."""

    done: Natural
    total: Natural
    kernels: bool = False


class Ready(Message, frozen=True):
    """The model is loaded."""

    vocab_size: Positive
    max_model_len: Positive
    eos_token_ids: Annotated[tuple[Token, ...], Meta(max_length=1024)]
    plan: Annotated[str, Meta(max_length=2**20)]
    """Which kernel runs what, as a table."""


class Accepted(Message, frozen=True):
    number: Number


class Refused(Message, frozen=True):
    """``kind`` is a class of ``microscale.errors``, ``text`` its sentence."""

    number: Number
    kind: Id
    text: Text


class RequestOutput(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``Output`` of one request in one step; a list on the wire, since there are thousands a second."""

    number: Number
    token: Token | None
    logprob: Logprob | None = None
    top_logprobs: Annotated[tuple[tuple[Token, Logprob], ...], Meta(max_length=MAX_TOP)] = ()
    finish: FinishName | None = None
    error: tuple[Id, Annotated[str, Meta(max_length=MAX_REASON)]] | None = None
    """Class and sentence, as ``failure`` gives them, cut."""
    num_cached: Natural = 0
    prompt_logprobs: Annotated[
        tuple[tuple[Token, Logprob, Annotated[tuple[tuple[Token, Logprob], ...], Meta(max_length=MAX_TOP)]], ...],
        Meta(max_length=MAX_SCORED),
    ] = ()
    drafted: Natural = 0
    accepted: Natural = 0


class Tokens(Message, frozen=True):
    """What one step made."""

    outputs: Annotated[tuple[RequestOutput, ...], Meta(max_length=MAX_OUTPUTS)]


class StatsReply(Message, frozen=True, tag="Stats"):
    """``Stats``, field by field."""

    num_waiting: Natural
    num_running: Natural
    num_preemptions: Natural
    prefix_queries: Natural
    prefix_hits: Natural
    pages: Annotated[dict[str, tuple[Natural, Natural]], Meta(max_length=16)]
    kernels_compiled_late: Natural = 0
    kernels_loaded_late: Natural = 0
    graphs: Natural = 0
    graphs_waited_for: Natural = 0
    graph_stand_ins: Natural = 0
    num_drafts: Natural = 0
    num_draft_tokens: Natural = 0
    num_accepted_tokens: Natural = 0
    drafted_per_pos: Annotated[tuple[Natural, ...], Meta(max_length=64)] = ()
    accepted_per_pos: Annotated[tuple[Natural, ...], Meta(max_length=64)] = ()
    draft_length: Real = 0.0


class Drained(Message, frozen=True):
    """The last message of an engine that ends well."""

    num_aborted: Natural


class Failed(Message, frozen=True):
    """The last message of one that does not."""

    kind: Id
    text: Text


ToEngine: TypeAlias = EngineConfig | Submit | Abort | GetStats | Drain
FromEngine: TypeAlias = Loading | Ready | Accepted | Refused | Tokens | StatsReply | Drained | Failed

_encoder = msgspec.msgpack.Encoder()
_hello = msgspec.msgpack.Decoder(Hello)
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


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
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadMessage(f"A message of {len(payload)} bytes cannot be read: {error}.") from None


def failure(error: BaseException) -> tuple[str, str]:
    """The class and the sentence of an error, as ``Refused`` and ``Failed`` carry them."""
    if isinstance(error, MicroscaleError):
        kind, text = type(error).__name__, str(error)
    else:
        kind, text = MicroscaleError.__name__, f"{type(error).__name__}: {error}"
    return kind, text[:MAX_TEXT]


def error_of(kind: str, text: str) -> MicroscaleError:
    """The error that ``failure`` took apart."""
    found = getattr(errors, kind, None)
    known = isinstance(found, type) and issubclass(found, MicroscaleError)
    return found(text) if known else MicroscaleError(text)  # type: ignore[misc]


def finite(logprob: float) -> float:
    """A log-probability that may be sent; NaN, which no answer should hold, becomes ``FLOOR`` too."""
    return min(logprob, 0.0) if logprob >= FLOOR else FLOOR
