"""What decides whether and how a server runs: options, keys, the address, the self-test."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from microscale.cli import app
from microscale.cli.serve import serve
from microscale.errors import BadCheckpoint, BadSetting
from microscale.server.monitoring.metrics import Metrics
from microscale.server.options import RequestLimits, read_keys
from microscale.server.run import bind
from microscale.text.byte_tokenizer import byte_tokenizer
from microscale.text.formats import chat_format_for, self_test
from support.scripted_service import VOCAB
from support.tiny_tokenizers import tiny


def test_every_limit_is_an_option() -> None:
    options = set(inspect.signature(serve).parameters)
    assert {limit.name for limit in fields(RequestLimits)} <= options
    known = "host port served_model_name api_key max_model_len max_num_seqs max_num_batched_tokens kv_cache_dtype"
    assert set(known.split()) <= options


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
        RequestLimits(max_n=0)
    with pytest.raises(BadSetting, match="metrics-prefix"):
        Metrics("m", "a b")
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(BadSetting, match="is not available"):
            bind("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(BadSetting, match="not an address"):
        bind("no such host.invalid", 80)


def test_a_wrong_config_is_refused_before_anything_is_loaded() -> None:
    wrong = '{"method": "magic", "num_speculative_tokens": 2}'
    with pytest.raises(BadSetting, match="no method 'magic'; use ngram"):
        CliRunner().invoke(app, ["serve", "demo", "--speculative-config", wrong], catch_exceptions=False)
