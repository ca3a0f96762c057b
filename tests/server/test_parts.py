"""The server's parts that need no server: tables that must be whole, the self-test, token ids on chunks."""

from __future__ import annotations

import contextlib
import inspect
import json
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from microscale import errors
from microscale.cli.serve import read_keys, serve
from microscale.engine.output import Output
from microscale.engine.request import Finish
from microscale.errors import BadCheckpoint, BadSetting, MicroscaleError
from microscale.server import faults
from microscale.server.body import Body
from microscale.server.choice import Choice
from microscale.server.demo_tokenizer import byte_tokenizer
from microscale.server.limits import Limits
from microscale.server.metrics import BETWEEN_TOKENS, Metrics
from microscale.server.parsing import parse
from microscale.server.protocol import MARKS, ONLY, ChatRequest, CompletionRequest
from microscale.server.run import bind
from microscale.server.selftest import self_test
from microscale.text.formats import chat_format_for
from microscale.text.harmony.parser import HarmonyParser
from microscale.text.harmony.tokens import HarmonyTokens
from microscale.text.output import ChatOutput, PlainOutput
from support.scripted_service import VOCAB
from support.tiny_tokenizers import tiny

FIELDS = [*ChatRequest.model_fields, "prompt", "role", "content", "type", "text", "name", "function", "unknown"]


@pytest.mark.parametrize("module", [errors, faults])
def test_every_error_has_a_row_of_its_own(module: object) -> None:
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, MicroscaleError)]
    assert kinds
    assert not [kind.__name__ for kind in kinds if kind not in faults.FAULTS]


def test_every_limit_is_an_option() -> None:
    options = set(inspect.signature(serve).parameters)
    assert {limit.name for limit in fields(Limits)} <= options
    known = "host port served_model_name api_key max_model_len max_num_seqs max_num_batched_tokens kv_cache_dtype"
    assert set(known.split()) <= options


def test_no_field_is_both_read_and_passed_over() -> None:
    read = set(ChatRequest.model_fields) | set(CompletionRequest.model_fields)
    assert not read & (set(MARKS) | set(ONLY))
    assert not set(MARKS) & set(ONLY)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["user", "text"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6), st.sampled_from([ChatRequest, CompletionRequest]))
def test_any_json_is_a_request_or_a_named_fault(body: object, kind: type[Body]) -> None:
    with contextlib.suppress(faults.BadField):
        parse(kind, json.dumps(body).encode())


def test_the_self_test_knows_a_wrong_tokenizer() -> None:
    tokenizer = byte_tokenizer()
    chat_format = chat_format_for(tokenizer)
    end = tokenizer.control["<|return|>"]
    self_test(chat_format, 264, [end])
    with pytest.raises(BadCheckpoint, match="vocabulary of 263"):
        self_test(chat_format, 263)
    with pytest.raises(BadCheckpoint, match="do not belong together"):
        self_test(chat_format, 264, [5])
    self_test(chat_format_for(tiny()), VOCAB)


@given(
    tokens=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60),
    cuts=st.lists(st.integers(1, 5), min_size=60, max_size=60),
    plain=st.booleans(),
)
def test_every_token_id_is_on_one_step_in_order(tokens: list[int], cuts: list[int], plain: bool) -> None:
    ids = HarmonyTokens.of(tiny())
    output = PlainOutput(tiny(), stops=["e"]) if plain else ChatOutput(HarmonyParser(ids), stops=["e"])
    choice = Choice(0, output, keep_outputs=True)
    steps = []
    rest = [Output("r", token, finish=None) for token in tokens]
    rest[-1] = Output("r", tokens[-1], finish=Finish.LENGTH)
    fed = 0
    for cut in cuts:
        piece, rest = rest[:cut], rest[cut:]
        if not piece or choice.done:
            break
        fed += len(piece)
        step = choice.advance(piece)
        if step is not None:
            steps.append(step)
    assert choice.done
    assert steps[0].first
    assert not any(step.first for step in steps[1:])
    assert [token for step in steps for token in step.delta.token_ids] == tokens[:fed]
    assert [output.token for step in steps for output in step.outputs] == tokens[:fed]
    assert [step.finish is not None for step in steps] == [False] * (len(steps) - 1) + [True]


def test_keys_come_from_both_options(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n two \n")
    assert read_keys(["zero"], file) == (b"zero", b"one", b"two")
    file.write_text("\n")
    for keys, path in (([""], None), (["Schlüssel"], None), ([], file), ([], tmp_path / "none")):
        with pytest.raises(BadSetting):
            read_keys(keys, path)


def test_bad_settings_are_one_sentence() -> None:
    with pytest.raises(BadSetting, match="max-n"):
        Limits(max_n=0)
    with pytest.raises(BadSetting, match="metrics-prefix"):
        Metrics("m", "a b")
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(BadSetting, match="cannot be bound"):
            bind("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(BadSetting, match="no address"):
        bind("no such host.invalid", 80)


@given(st.lists(st.floats(0, 20) | st.sampled_from(BETWEEN_TOKENS), max_size=20))
def test_gaps_between_tokens_are_counted_as_prometheus_does(gaps: list[float]) -> None:
    registry, metrics = CollectorRegistry(), Metrics("m", "x")
    truth = Histogram("x:inter_token_latency_seconds", "", ["model_name"], buckets=BETWEEN_TOKENS, registry=registry)
    metrics.between_tokens.observe_all(gaps)
    for gap in gaps:
        truth.labels("m").observe(gap)
    truth.labels("m")
    name = b"x:inter_token_latency_seconds_"
    ours, theirs = (
        [line for line in text.splitlines() if line.startswith(name) and b"_created" not in line]
        for text in (metrics.text(None), generate_latest(registry))
    )
    assert ours == theirs
