"""``/plan``: the engine's document, field by field, with its predictions; or another engine's text."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from microscale.server.host import Host
from microscale.server.monitoring.routes import plan_reply

DOCUMENT: dict[str, Any] = {
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


def test_the_engines_document_is_returned_field_by_field() -> None:
    found = reply(json.dumps({**DOCUMENT, "predicted": [POINT]}))
    assert (found["plan"], found["max_model_len"]) == (DOCUMENT["table"], 1024)
    assert found.items() >= {key: DOCUMENT[key] for key in ("gpu", "precision", "decisions", "memory")}.items()
    assert found["predicted"] == [POINT]
    assert "speculative" not in found
    offers = [{"precision": "fast", "tok_s": 71.0, "kl": None}]
    told = reply(json.dumps({**DOCUMENT, "precisions": offers, "precisions_line": "exact 41.0, fast 71.0"}))
    assert (told["precisions"], told["precisions_line"]) == (offers, "exact 41.0, fast 71.0")
    drafts = {"method": "ngram", "length": "auto"}
    assert reply(json.dumps({**DOCUMENT, "speculative": drafts}))["speculative"] == drafts


def test_an_engine_that_predicts_nothing_and_one_that_is_not_ours() -> None:
    assert reply(json.dumps(DOCUMENT))["predicted"] == []
    assert reply("any text")["plan"] == "any text"
    assert not {"gpu", "precision", "decisions", "memory", "predicted"} & reply("any text").keys()
