"""A large model on a CPU: how slow it is, before anything is loaded. The rates are fixed here, and real elsewhere."""

from __future__ import annotations

import logging

import pytest

from microscale.engine.config import EngineConfig
from microscale.engine.loading.prepare import prepare
from microscale.errors import Unsupported
from microscale.models import embedded
from microscale.planning import cpu_rates


def two_layers(*, allow_slow: bool) -> EngineConfig:
    return EngineConfig(
        "gpt-oss-20b", "dummy", device="cpu", moe_backend="reference", hf_overrides={"num_hidden_layers": 2},
        max_num_seqs=1, max_model_len=128, allow_slow=allow_slow,
    )  # fmt: skip


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_rates, "read_rate", lambda: 10e9)
    monkeypatch.setattr(cpu_rates, "decode_rate", lambda name: 10e6)


def test_a_slow_model_is_refused_unless_the_user_agrees(rates: None, caplog: pytest.LogCaptureFixture) -> None:
    # Two layers with four experts of 13.2 MB each, decoded at 10 MB/s, and 2.9 GB read at 10 GB/s: 10.9 s.
    speed = "gpt-oss-20b makes at most 0.092 tokens per second on this CPU"
    with pytest.raises(Unsupported, match=f"^{speed}.*--yes"):
        prepare(two_layers(allow_slow=False))
    with caplog.at_level(logging.INFO):
        prepare(two_layers(allow_slow=True))
    assert f"{speed}." in caplog.messages


def test_a_small_model_is_not_measured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(cpu_rates, "read_rate", lambda: 1.0)
    with caplog.at_level(logging.INFO):
        prepare(EngineConfig(embedded.NAME, device="cpu", allow_slow=False))
    assert not caplog.messages
