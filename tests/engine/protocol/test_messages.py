"""Frames and messages between the engine process and its owner: bounds, round trips, versions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from microscale import errors
from microscale.engine.config import MAX_TEXT, EngineConfig
from microscale.engine.limits import SCORED_TOKENS
from microscale.engine.output import Output, Stats
from microscale.engine.protocol import messages
from microscale.engine.protocol.frames import HEADER, MAX_FRAME, FrameReader, frame
from microscale.engine.protocol.messages import (
    MAX_ID,
    MAX_OUTPUTS,
    MAX_PROMPT,
    VERSION,
    Abort,
    Accepted,
    Drain,
    Drained,
    Failed,
    FromEngine,
    GetStats,
    Hello,
    LoadEngine,
    Loading,
    Ready,
    Refused,
    StatsReply,
    Submit,
    Tokens,
    check_hello,
    decode_for_engine,
    decode_for_owner,
    encode,
    error_of,
    failure,
)
from microscale.engine.request import Finish
from microscale.engine.sampling_params import MAX_BIAS, SamplingParams
from microscale.errors import BadCheckpoint, BadMessage, MicroscaleError, QueueFull
from microscale.planning import MAX_TOP_LOGPROBS

# ---- frames ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=8), st.data())
def test_frames_survive_any_cut(payloads: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(frame(payload) for payload in payloads)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=20).map(sorted))
    reader = FrameReader()
    found: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += reader.feed(stream[start:end])
    assert found == payloads


@pytest.mark.parametrize("size", [0, MAX_FRAME + 1, 2**32 - 1])
def test_a_length_is_judged_before_what_follows(size: int) -> None:
    reader = FrameReader()
    assert list(reader.feed(frame(b"good") + size.to_bytes(HEADER, "big")[:3])) == [b"good"]
    with pytest.raises(BadMessage, match=f"A message has {size} bytes; it must have 1 to {MAX_FRAME}"):
        list(reader.feed(size.to_bytes(HEADER, "big")[3:]))


def test_what_is_too_large_is_not_sent() -> None:
    with pytest.raises(BadMessage, match="it must have 1 to"):
        frame(bytes(MAX_FRAME + 1))


# ---- messages --------------------------------------------------------------------------------------------------------

PARAMS = SamplingParams(max_tokens=3, temperature=0.5, seed=2**63 - 1, logit_bias={7: -100.0}, stop_token_ids=(1, 2))
TO_ENGINE = [
    LoadEngine(EngineConfig("gpt-oss-20b", layer_format=("lm_head=mxfp8",), hf_overrides={"a": {"b": [1, None]}})),
    Submit("r", (1, 2, 3), PARAMS, priority=-1, cache_salt="tenant"),
    Submit("r", (), SamplingParams()),
    Abort("r"),
    GetStats(),
    Drain(1.5),
]
FROM_ENGINE = [
    Loading(1, 2),
    Loading(3, 4, kernels=True),
    Ready(97, 512, (1, 2), "plan"),
    Accepted("r"),
    Tokens(()),
    Tokens((Output("r", 5, -0.5, ((5, -0.5), (6, -math.inf)), Finish.STOP, num_cached=3, drafted=2, accepted=1),)),
    Tokens((Output("r", None, prompt_logprobs=((5, -0.5, ((6, -0.25),)), (7, -math.inf, ()))),)),
    StatsReply(Stats(1, 2, 3, 4, 5, {"full": (1, 2)}, 6, 7)),
    Drained(0),
]


@pytest.mark.parametrize("message", TO_ENGINE + FROM_ENGINE, ids=lambda m: type(m).__name__)
def test_messages_round_trip(message: object) -> None:
    decode = decode_for_engine if message in TO_ENGINE else decode_for_owner
    (payload,) = FrameReader().feed(encode(message))  # type: ignore[arg-type]
    assert decode(payload) == message
    if message != Tokens(()):
        # Neither side takes the other's messages for its own, nor one with something more in it.
        other = decode_for_owner if message in TO_ENGINE else decode_for_engine
        with pytest.raises(BadMessage, match="cannot be read"):
            other(payload)
    with pytest.raises(BadMessage, match="unknown field `more`"):
        decode(msgspec.msgpack.encode(msgspec.msgpack.decode(payload) | {"more": 1}))


def test_every_message_is_tested() -> None:
    tested = {type(message) for message in TO_ENGINE + FROM_ENGINE}
    assert tested | {Refused, Failed} == {*get_args(messages.ToEngine), *get_args(messages.FromEngine)}


@pytest.mark.parametrize(
    "make",
    [
        lambda error: Refused("r", error),
        Failed,
        lambda error: Tokens((Output("r", None, finish=Finish.ERROR, error=error),)),
    ],
)
def test_errors_keep_their_class_and_sentence(make: Callable[[MicroscaleError], FromEngine]) -> None:
    for sent in (BadCheckpoint("why"), MicroscaleError("why"), QueueFull("w" * 10**6)):
        message = decode_for_owner(encode(make(sent))[HEADER:])
        assert isinstance(message, Refused | Failed | Tokens)
        error = message.outputs[0].error if isinstance(message, Tokens) else message.error
        assert type(error) is type(sent)
        assert str(error) == str(sent)[:MAX_TEXT]


def submit(**changes: object) -> dict[str, object]:
    return msgspec.to_builtins(Submit("r", (1,), SamplingParams())) | changes  # type: ignore[no-any-return]


def params(**changes: object) -> dict[str, object]:
    return submit(params=changes)


@pytest.mark.parametrize(
    "fields",
    [
        submit(request_id=""),
        submit(request_id="r" * (MAX_ID + 1)),
        submit(prompt=[0] * (MAX_PROMPT + 1)),
        submit(prompt=[-1]),
        submit(prompt=[2**31]),
        submit(prompt=["1"]),
        submit(priority=2**31),
        submit(cache_salt="s" * (MAX_ID + 1)),
        params(temperature=math.nan),
        params(temperature=math.inf),
        params(logit_bias={1: math.nan}),
        params(logit_bias=dict.fromkeys(range(MAX_BIAS + 1), 0.0)),
        params(stop_token_ids=list(range(MAX_BIAS + 1))),
        params(seed=2**63),
        params(beam_width=4),
        {"type": "Drain", "deadline_s": math.inf},
        {"type": "Drain"},
        {"type": "Shutdown"},
        {},
    ],
    ids=lambda fields: str(fields)[:80],
)
def test_what_is_out_of_bounds_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(BadMessage, match="cannot be read"):
        decode_for_engine(msgspec.msgpack.encode(fields))


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    for decode in (decode_for_engine, decode_for_owner, check_hello):
        with pytest.raises(BadMessage):
            decode(noise)


def test_the_largest_messages_can_be_sent() -> None:
    prompt = (2**31 - 1,) * MAX_PROMPT
    most = SamplingParams(logit_bias=dict.fromkeys(range(10**6, 10**6 + 512), 0.5), stop_token_ids=(10**6,) * 512)
    output = Output("1" * 19, 10**6, -0.5, ((10**6, -0.5),) * MAX_TOP_LOGPROBS)
    asked = Submit("\N{PILE OF POO}" * MAX_ID, prompt, most)
    assert decode_for_engine(encode(asked)[HEADER:]) == asked
    told = Tokens((output,) * MAX_OUTPUTS)
    assert decode_for_owner(encode(told)[HEADER:]) == told
    scored = ((10**6, -0.5, ((10**6, -0.5),) * MAX_TOP_LOGPROBS),) * SCORED_TOKENS
    told = Tokens((Output("1" * 19, None, prompt_logprobs=scored),))
    assert decode_for_owner(encode(told)[HEADER:]) == told


def test_only_our_own_errors_are_made_of_names() -> None:
    bug = error_of(*failure(ZeroDivisionError("division by zero")))
    assert (type(bug), str(bug)) == (MicroscaleError, "ZeroDivisionError: division by zero")
    assert type(error_of("annotations", "x")) is type(error_of("__builtins__", "x")) is MicroscaleError
    for name, found in vars(errors).items():
        if isinstance(found, type):
            assert type(error_of(name, "x")) is found


def test_another_version_is_one_clear_error() -> None:
    check_hello(encode(Hello(VERSION))[HEADER:])
    later = msgspec.msgpack.encode({"microscale": VERSION + 1, "and": "more"})
    with pytest.raises(BadMessage, match=rf"speaks version {VERSION + 1} .* this one version {VERSION}; run both from"):
        check_hello(later)
