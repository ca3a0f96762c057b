"""``profile``: parts of a step of the tiny model on a CPU, and a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from microscale.engine.config import EngineConfig
from microscale.models.outline import outline
from microscale.planning.plan import Setup
from microscale_lab.model_bench.profile import fit_gaps, run, table
from microscale_lab.model_bench.trace import HOST_GAP, LAUNCH_GAP, name_parts, read, times
from support.loading import load_model


def test_parts_of_a_step_add_up(tmp_path: Path) -> None:
    model = load_model(EngineConfig("gpt-oss-tiny", load_format="dummy", device="cpu"))
    ops = model.ops
    shape = outline("gpt-oss-tiny", model.config, ops.activations, model.page_size, model.config.max_context)
    trace = tmp_path / "trace.json"
    decode, prompt = run(model, shape, Setup(ops.gpu, ops.activations), 2, 9, 20, trace)
    layers = len(model.layers)
    for profile in (decode, prompt):
        parts = {part.name: part for part in profile.parts}
        assert {
            "embed",
            "qkv",
            "o",
            "experts",
            "norms",
            "lm_head",
            "sampling",
            "full_attention",
            HOST_GAP,
        } <= parts.keys()
        assert (parts["qkv"].calls, parts["experts"].calls, parts["lm_head"].calls) == (layers, layers, 1)
        assert sum(part.us for part in profile.parts) == pytest.approx(profile.total_us, rel=0.01)
        assert all(part.us > 0 for part in profile.parts if part.name != HOST_GAP)
        assert parts["qkv"].floor_us is not None
    assert len(table([decode, prompt]).splitlines()) == 2 * 2 + len(decode.parts) + len(prompt.parts)
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert "microscale: experts" in names


def test_the_profilers_own_gaps_are_not_the_steps() -> None:
    assert fit_gaps({"experts": 70.0, LAUNCH_GAP: 5.0, HOST_GAP: 2.0}, 100.0)[LAUNCH_GAP] == 5.0
    assert fit_gaps({"experts": 70.0, LAUNCH_GAP: 90.0, HOST_GAP: 2.0}, 100.0)[LAUNCH_GAP] == 28.0
    assert fit_gaps({"experts": 120.0, LAUNCH_GAP: 90.0}, 100.0)[LAUNCH_GAP] == 0.0


def launch(name: str, cpu: float, start: float, end: float, number: int) -> list[dict[str, object]]:
    """A kernel and the call that launched it, as torch's trace has them."""
    args = {"correlation": number}
    return [
        {"cat": "cuda_driver", "name": "cuLaunchKernelEx", "ts": cpu, "dur": 1.0, "args": args},
        {"cat": "kernel", "name": name, "ts": start, "dur": end - start, "args": args},
    ]


def span(name: str, start: float, end: float) -> dict[str, object]:
    return {"cat": "user_annotation", "name": f"mine: {name}", "ts": start, "dur": end - start}


def test_graphs_get_their_parts_from_single_launches(tmp_path: Path) -> None:
    single, graph = tmp_path / "single.json", tmp_path / "graph.json"
    events = [span("step", 0, 50), span("qkv", 5, 10), span("o", 20, 25), *launch("before", 2, 3, 4, 9)]
    events += [*launch("small", 6, 11, 16, 1), *launch("small", 21, 26, 29, 2)]
    single.write_text(json.dumps({"traceEvents": [{"ph": "M"}, *events]}))
    # Two steps: the last kernel begins 1 before the one before it ends, the second step 4 after the first's end.
    events = []
    for step in (0, 10):
        events.append(span("step", step, step + 2))
        events += launch("before", step + 1, step + 2, step + 3, step)
        events += launch("small", step + 1, step + 3.5, step + 6, step)
        events += launch("small", step + 1, step + 5, step + 8, step)
    graph.write_text(json.dumps({"traceEvents": [*events, *launch("elsewhere", 500, 501, 502, 77)]}))
    found = times(name_parts(read(graph, "mine: "), read(single, "mine: ")))
    assert found == {"other": 2.0, "qkv": 5.0, "o": 4.0, LAUNCH_GAP: 1.0, HOST_GAP: 4.0}


def test_branches_of_a_graph_keep_their_parts(tmp_path: Path) -> None:
    """Beside each other kernels begin in another order than one after the other."""
    single, graph = tmp_path / "single.json", tmp_path / "graph.json"
    events = [span("step", 0, 90), span("mlp", 5, 30), span("experts", 40, 60)]
    events += [*launch("small", 6, 11, 16, 1), *launch("gated", 7, 17, 18, 2), *launch("pairs", 41, 45, 50, 3)]
    single.write_text(json.dumps({"traceEvents": events}))
    events = [span("step", 0, 2), *launch("small", 1, 10, 14, 1), *launch("pairs", 1, 11, 16, 1)]
    graph.write_text(json.dumps({"traceEvents": [*events, *launch("gated", 1, 16, 17, 1)]}))
    found = times(name_parts(read(graph, "mine: "), read(single, "mine: ")))
    assert found == {"mlp": 5.0, "experts": 2.0}


def test_one_copy_too_many_does_not_hide_a_steps_parts(tmp_path: Path) -> None:
    single, graph = tmp_path / "single.json", tmp_path / "graph.json"
    events = [
        span("step", 0, 90),
        span("experts", 40, 60),
        *launch("copy", 2, 3, 4, 1),
        *launch("pairs", 41, 45, 50, 2),
    ]
    single.write_text(json.dumps({"traceEvents": events}))
    events = [span("step", 0, 2), *launch("copy", 1, 10, 11, 1), *launch("pairs", 1, 11, 16, 1)]
    graph.write_text(json.dumps({"traceEvents": [*events, *launch("copy", 1, 16, 17, 1)]}))
    found = times(name_parts(read(graph, "mine: "), read(single, "mine: ")))
    assert found == {"other": 2.0, "experts": 5.0}
