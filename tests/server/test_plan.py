"""``/plan``: what the engine told of itself, with its predictions; also of an engine that makes none."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from microscale.server.host import Host
from microscale.server.plan import plan_reply

TOLD = {"table": "experts triton_w4a16", "gpu": "NVIDIA GB10", "precision": "exact", "decisions": [], "memory": {}}
POINT = {"batch": 1, "context": 4096, "tok_s": 42.0, "low": 38.0, "high": 47.0, "basis": "fitted", "kind": "decode"}


def reply(plan: str) -> dict[str, Any]:
    ready = SimpleNamespace(vocab_size=10, max_model_len=20, plan=plan)
    host = SimpleNamespace(names=["m"], engine=SimpleNamespace(ready=ready), start_s={"load": 1.0})
    found: dict[str, Any] = json.loads(msgspec.json.encode(plan_reply(cast(Host, host))))
    return found


def test_predictions_are_passed_on_with_their_intervals() -> None:
    said = reply(json.dumps({**TOLD, "predicted": [POINT]}))
    assert said["predicted"] == [POINT]
    assert (said["plan"], said["gpu"]) == (TOLD["table"], TOLD["gpu"])


def test_an_engine_that_predicts_nothing_and_one_that_is_not_ours() -> None:
    assert reply(json.dumps(TOLD))["predicted"] == []
    assert reply("any text")["plan"] == "any text"
    assert "predicted" not in reply("any text")
