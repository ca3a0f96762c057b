<<<<<<< HEAD
"""``/plan``: what the engine told of itself, with its predictions; also of an engine that makes none."""
=======
"""``/plan``: what the engine's document says, field by field, and another engine's text as it is."""
>>>>>>> ship

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from microscale.server.host import Host
from microscale.server.plan import plan_reply

<<<<<<< HEAD
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
=======

def told(plan: str) -> Any:
    ready = SimpleNamespace(vocab_size=600, max_model_len=1024, plan=plan)
    host = SimpleNamespace(engine=SimpleNamespace(ready=ready), names=("model", "alias"), start_s={"weights": 1.5})
    return json.loads(msgspec.json.encode(plan_reply(cast(Host, host))))


def test_the_engines_document_is_told_field_by_field() -> None:
    document = {"table": "experts  triton_w4a16", "gpu": "NVIDIA GB10", "precision": "exact"}
    document |= {"decisions": [{"op": "moe"}], "memory": {"weights": 7}}  # type: ignore[dict-item]
    reply = told(json.dumps(document))
    assert reply["plan"] == "experts  triton_w4a16"
    assert {key: reply[key] for key in ("gpu", "precision", "decisions", "memory")} == {
        key: document[key] for key in ("gpu", "precision", "decisions", "memory")
    }
    assert reply["max_model_len"] == 1024


def test_another_engines_text_is_all_there_is() -> None:
    reply = told("scripted")
    assert reply["plan"] == "scripted"
    assert not {"gpu", "precision", "decisions", "memory"} & reply.keys()
>>>>>>> ship
