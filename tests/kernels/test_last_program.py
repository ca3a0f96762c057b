"""Counters that graphs replay are never given back."""

from __future__ import annotations

import weakref

import pytest
import torch

from microscale.kernels import last_program
from microscale.kernels.last_program import LEAST, last_program_counters


def test_counters_stay_where_more_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_program, "_KEPT", {})
    cpu = torch.device("cpu")
    few = weakref.ref(last_program_counters(cpu, 1))
    assert last_program_counters(cpu, LEAST) is few()
    many = last_program_counters(cpu, LEAST + 1)
    assert many.numel() > LEAST
    assert few() is not None, "a graph that was captured before counts in them"
    assert last_program_counters(cpu, 1) is many
