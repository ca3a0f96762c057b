"""``/plan``: what the engine's document says, field by field, with its predictions; and another engine's text."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from microscale.engine.speculation.config import SpeculativeConfig
from microscale.engine.speculation.length import DraftCosts
from microscale.engine.speculation.speculation import describe_drafts
from microscale.hardware.draft_costs import StepCurve
from microscale.server.host import Host
from microscale.server.monitoring.routes import plan_reply

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


def test_a_drafter_is_told_with_what_it_costs() -> None:
    """As the engine describes it; the costs are made up."""
    costs = DraftCosts(StepCurve("any", (1, 2, 4, 8), (100.0, 140.0, 200.0, 900.0)), head_ms=10.0)
    told = describe_drafts(SpeculativeConfig("ngram", 3), costs, 2)
    said = reply(json.dumps({**TOLD, "speculative": told}))["speculative"]
    assert (said["method"], said["num_speculative_tokens"], said["length"]) == ("ngram", 3, "auto")
    assert said["decisions"] == []
    assert [(row["sequences"], row["drafts"], row["ratio"]) for row in said["predicted"]] == [
        (1, 1, 1.5), (1, 3, 2.3), (2, 1, 1.5), (2, 3, 6.643),
    ]  # fmt: skip
    assert [row["pays_from_acceptance"] for row in said["predicted"]] == [0.5, 0.639, 0.5, None]
    fixed = describe_drafts(SpeculativeConfig("ngram", 3, num_speculative_tokens_per_batch_size=((1, 3),)), None)
    assert (fixed["length"], fixed["predicted"]) == ("fixed", [])
    assert "speculative" not in reply(json.dumps(TOLD))


def test_an_engine_that_predicts_nothing_and_one_that_is_not_ours() -> None:
    assert reply(json.dumps(TOLD))["predicted"] == []
    assert reply("any text")["plan"] == "any text"
    assert not {"gpu", "precision", "decisions", "memory", "predicted"} & reply("any text").keys()
