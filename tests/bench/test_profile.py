"""``profile``: parts of a step of the tiny model on a CPU, and a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from microscale.backends.plan import Setup
from microscale.bench.profile import GAP, run, table
from microscale.engine.load import LoadOptions, load_model
from microscale.models.outline import outline


def test_parts_of_a_step_add_up(tmp_path: Path) -> None:
    model = load_model(LoadOptions("gpt-oss-tiny", load_format="dummy", device="cpu"))
    ops = model.ops
    shape = outline("gpt-oss-tiny", model.config, ops.activations, model.page_size, model.config.max_context)
    trace = tmp_path / "trace.json"
    decode, prompt = run(model, shape, Setup(ops.gpu, ops.activations), 2, 9, 20, trace)
    layers = len(model.layers)
    for profile in (decode, prompt):
        parts = {part.name: part for part in profile.parts}
        assert {"embed", "qkv", "o", "experts", "norms", "lm_head", "sampling", "full_attention", GAP} <= parts.keys()
        assert (parts["qkv"].calls, parts["experts"].calls, parts["lm_head"].calls) == (layers, layers, 1)
        assert sum(part.us for part in profile.parts) == pytest.approx(profile.total_us, rel=0.01)
        assert all(part.us > 0 for part in profile.parts if part.name != GAP)
        assert parts["qkv"].floor_us is not None
    assert len(table([decode, prompt]).splitlines()) == 2 * 2 + len(decode.parts) + len(prompt.parts)
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert "microscale: experts" in names
