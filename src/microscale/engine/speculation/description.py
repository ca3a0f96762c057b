"""What a server says of its drafter in ``/plan``."""

from __future__ import annotations

from typing import Any

from microscale.backends.decision import Decision, Plan
from microscale.engine.prediction.drafts import acceptance_for
from microscale.engine.speculation.config import SpeculativeConfig
from microscale.engine.speculation.costs import Prior


def describe_drafts(config: SpeculativeConfig, prior: Prior | None, plan: Plan | None = None) -> dict[str, Any]:
    """``prior``: what steps are predicted to cost, where predictions are worth telling. ``plan``: the kernels of a
    drafter that is a model."""
    fixed = config.num_speculative_tokens_per_batch_size
    sizes, lengths = (0, 0) if prior is None else (len(prior.sequences), len(prior.drafts))
    return {
        "method": config.method,
        "num_speculative_tokens": config.num_speculative_tokens,
        "length": "auto" if fixed is None else "fixed",
        "predicted": [
            _step(prior, row, column) for row in range(sizes) for column in range(1, lengths) if prior is not None
        ],
        "decisions": [] if plan is None else [_decision(decision) for decision in plan.decisions.values()],
    }


def _decision(decision: Decision) -> dict[str, Any]:
    return decision.to_json() | {"format": getattr(decision.spec, "weight_format", "")}


def _step(prior: Prior, row: int, column: int) -> dict[str, Any]:
    """What a step with drafts is predicted to cost against one without, and from which acceptance on it pays."""
    ratio = (prior.step[row][column] + prior.draft[row][column]) / prior.step[row][0]
    pays = acceptance_for(max(ratio, 1.0), prior.drafts[column])
    return {
        "sequences": prior.sequences[row],
        "drafts": prior.drafts[column],
        "ratio": round(ratio, 3),
        "pays_from_acceptance": None if pays is None else round(pays, 3),
    }
