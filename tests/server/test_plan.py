"""``/plan``: what the engine's document says, field by field, with its predictions; and another engine's text."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from microscale.server.host import Host
from microscale.server.plan import plan_reply

TOLD: dict[str, Any] = {
    "table": "experts triton_w4a16",
    "gpu": "NVIDIA GB10",
    "precision": "exact",
    "decisions": [{"op": "moe"}],
    "memory": {"weights": 7},
}
POINT = {"batch": 1, "context": 4096, "tok_s": 42.0, "low": 38.0, "high": 47.0, "basis": "fitted", "kind": "decode"}


def reply(plan: str) -> dict[str, Any]:
    ready = SimpleNamespace(vocab_size=600, max_model_len=1024, plan=plan)
    host = SimpleNamespace(names=("model", "alias"), engine=SimpleNamespace(ready=ready), start_s={"load": 1.0})
    found: dict[str, Any] = json.loads(msgspec.json.encode(plan_reply(cast(Host, host))))
    return found


def test_the_engines_document_is_told_field_by_field() -> None:
    said = reply(json.dumps({**TOLD, "predicted": [POINT]}))
    assert (said["plan"], said["max_model_len"]) == (TOLD["table"], 1024)
    assert said.items() >= {key: TOLD[key] for key in ("gpu", "precision", "decisions", "memory")}.items()
    assert said["predicted"] == [POINT]


def test_an_engine_that_predicts_nothing_and_one_that_is_not_ours() -> None:
    assert reply(json.dumps(TOLD))["predicted"] == []
    assert reply("any text")["plan"] == "any text"
    assert not {"gpu", "precision", "decisions", "memory", "predicted"} & reply("any text").keys()
