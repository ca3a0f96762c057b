"""What a loaded engine is, as JSON for whoever watches it: the plan with its reasons, and where memory goes.

It travels in ``Ready.plan``. An engine that is not ours may say any text there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from microscale.engine.loading.memory import Memory
from microscale.engine.predictions import Point
from microscale.models.config import LayerKind
from microscale.planning.decision import Decision, Plan
from microscale.planning.precision import Precision


def describe(
    plan: Plan, precision: Precision, memory: Memory, pages: Mapping[LayerKind, int], points: Sequence[Point] = (),
    drafts: Mapping[str, Any] | None = None, ranks: Sequence[Mapping[str, int]] = (),
) -> str:  # fmt: skip
    """``points``: predicted speeds. ``drafts``: the drafter, if there is one. ``ranks``: bytes that each rank needs, by
    purpose, where several share the model."""
    return json.dumps(
        {
            **({"ranks": [dict(memory) for memory in ranks]} if ranks else {}),
            "table": plan.table(),
            "gpu": memory.gpu.name,
            "precision": str(precision),
            "decisions": [_decision(decision) for decision in plan.decisions.values()],
            "memory": _memory(memory, pages),
            "predicted": [point.to_json() | {"kind": point.kind.value} for point in points],
            **({} if drafts is None else {"speculative": drafts}),
        }
    )


def _decision(decision: Decision) -> dict[str, Any]:
    return decision.to_json() | {"format": getattr(decision.spec, "weight_format", "")}


def _memory(memory: Memory, pages: Mapping[LayerKind, int]) -> dict[str, Any]:
    """Bytes by what they hold; the KV cache as it was made, which is more than the least that must fit."""
    kv = memory.kv
    full = pages[LayerKind.FULL] * kv.page_size * kv.full_per_token
    sliding = pages[LayerKind.SLIDING] * kv.page_size * kv.sliding_per_position
    return {
        "weights": dict(memory.weights),
        "kv_cache": {"full": full, "sliding": sliding},
        "activations": memory.activations,
        "graphs": memory.graphs,
        "runtime": memory.runtime,
        "usable": memory.usable,
        "usable_because": memory.usable_because,
        "full_positions": pages[LayerKind.FULL] * kv.page_size,
    }
