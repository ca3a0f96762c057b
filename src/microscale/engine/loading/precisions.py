"""What each precision would give on this GPU and what it costs in quality, and which one ``--precision auto`` takes.

``auto`` takes the fastest precision whose cost was measured for this very model and is at most ``MAX_KL``. The only
model that was measured is the embedded one, so published models stay with ``exact``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from microscale.engine.loading.fit import plan_and_size
from microscale.engine.loading.memory import Workload
from microscale.engine.predictions import SHORT_CONTEXT, Phase, predict
from microscale.engine.quality_costs import PAGE, QualityCost, cost_of, quality_costs, table_name
from microscale.errors import Unsupported
from microscale.models.outline import Outline
from microscale.planning.decision import Plan
from microscale.planning.ops import Activations
from microscale.planning.option_values import AUTO
from microscale.planning.plan import Setup
from microscale.planning.precision import EXACT, PRECISIONS

MAX_KL = 1e-3
"""Nats per token that ``auto`` may cost."""


@dataclass(frozen=True)
class PrecisionOffer:
    """One precision for one model on one GPU."""

    name: str
    tok_s: float | None
    """Decoding one sequence; ``None`` if the model does not run or fit that way, or on a CPU."""
    why_not: str | None
    """Why there is no speed."""
    cost: QualityCost | None
    unknown_because: str | None
    """Why there is no cost."""

    @property
    def is_acceptable(self) -> bool:
        """Whether ``auto`` may take it."""
        return self.tok_s is not None and self.cost is not None and self.cost.kl <= MAX_KL

    def to_json(self) -> dict[str, Any]:
        cost = {"kl": None if self.cost is None else self.cost.kl, "kl_unknown_because": self.unknown_because}
        speed = {"tok_s": None if self.tok_s is None else round(self.tok_s, 1), "why_no_speed": self.why_not}
        return {"precision": self.name, **speed, **cost}


def precision_offers(
    outline: Outline, setup: Setup, workload: Workload, available: int | None = None, context: int | None = None
) -> tuple[PrecisionOffer, ...]:
    """All precisions. ``context``: cached tokens for the speed; ``None``: a short context."""
    tokens = min(SHORT_CONTEXT, outline.max_context) if context is None else context
    return tuple(_offer(name, outline, setup, workload, available, tokens) for name in PRECISIONS)


def _offer(
    name: str, outline: Outline, setup: Setup, workload: Workload, available: int | None, context: int
) -> PrecisionOffer:
    setup = replace(setup, precision=setup.precision.named(name))
    try:
        plan, memory = plan_and_size(outline, setup, workload, available)
    except Unsupported as error:
        return PrecisionOffer(name, None, str(error), None, "it does not run")
    cost, unknown = _cost(name, outline.name, setup, plan)
    if setup.gpu.is_cpu:
        return PrecisionOffer(name, None, "speeds are not predicted for a CPU", cost, unknown)
    if not memory.fits:
        return PrecisionOffer(name, None, "does not fit", cost, unknown)
    point = predict(outline, plan, setup, Phase.DECODE, 1, context, workload.step_tokens)
    return PrecisionOffer(name, point.tok_s, None, cost, unknown)


def _cost(name: str, model: str, setup: Setup, plan: Plan) -> tuple[QualityCost | None, str | None]:
    cost = cost_of(model, name)
    if cost is None:
        return None, f"not measured for {table_name(model)}"
    if replace(setup.precision, weights_only=False) != PRECISIONS[name]:
        return None, "not measured together with other format options"
    if not cost.on_gpu and _has_narrow_activations(plan):
        return None, "measured only without the 8-bit or 4-bit activations that it has on this GPU"
    return cost, None


def _has_narrow_activations(plan: Plan) -> bool:
    return any(getattr(d.spec, "activations", Activations.BF16).narrow for d in plan.decisions.values())


# ---- auto ------------------------------------------------------------------------------------------------------------


def choose(offers: Sequence[PrecisionOffer]) -> tuple[str, str]:
    """The precision that ``auto`` takes, and one sentence with the reason."""
    exact, others = offers[0], offers[1:]
    best = max((offer for offer in offers if offer.is_acceptable), key=lambda offer: offer.tok_s or 0.0, default=exact)
    if best is not exact and best.cost is not None:
        return best.name, (
            f"--precision auto takes {best.name}, the fastest whose measured cost is at most {MAX_KL:g} nats per token "
            f"({best.cost.kl:.1e})."
        )
    reasons: dict[str, list[str]] = {}
    for offer in others:
        reasons.setdefault(_why_not(offer, exact), []).append(offer.name)
    listed = "; ".join(f"{' and '.join(names)}: {reason}" for reason, names in reasons.items())
    return exact.name, f"--precision auto stays with {exact.name}. {listed}."


def _why_not(offer: PrecisionOffer, exact: PrecisionOffer) -> str:
    if offer.cost is None:
        return f"cost in quality {offer.unknown_because}" if offer.unknown_because else "unknown cost"
    if offer.cost.kl > MAX_KL:
        return f"costs {offer.cost.kl:.1e} nats per token, more than {MAX_KL:g}"
    return offer.why_not or "not faster"


def settle_precision(
    outline: Outline, setup: Setup, workload: Workload, available: int | None = None
) -> tuple[Setup, str | None]:
    """The setup for this checkpoint with ``auto`` replaced, and the sentence that says by what; ``None`` if the user
    named a precision."""
    setup = replace(setup, precision=replace(setup.precision, weights_only=outline.weights_only))
    if setup.precision.name != AUTO:
        return setup, None
    name, sentence = choose(precision_offers(outline, setup, workload, available))
    return replace(setup, precision=setup.precision.named(name)), sentence


# ---- in one line -----------------------------------------------------------------------------------------------------


def speeds_text(offers: Sequence[PrecisionOffer]) -> str:
    """``exact 41.0, balanced 56.1, fast 70.8 tokens per second``."""
    known = [f"{offer.name} {_rate(offer.tok_s)}" for offer in offers if offer.tok_s is not None]
    if not known:
        return f"no speed: {_short(offers[0].why_not)}"
    missing = [f"{offer.name}: {_short(offer.why_not)}" for offer in offers if offer.tok_s is None]
    return "; ".join([f"{', '.join(known)} tokens per second", *missing])


def _rate(tok_s: float) -> str:
    return f"{tok_s:.0f}" if tok_s >= 99.5 else f"{tok_s:.1f}"


def _short(reason: str | None) -> str:
    return (reason or "").split(";")[0].rstrip(".")


def costs_text(model: str, offers: Sequence[PrecisionOffer]) -> str:
    """What the precisions other than ``exact`` cost; if nothing was measured, what they cost another model."""
    unit = f"KL divergence per token, {PAGE}"
    costs = [offer.cost for offer in offers[1:] if offer.cost is not None]
    measured = {cost.model for cost in quality_costs()}
    if not costs and table_name(model) not in measured:
        toys = [cost for cost in quality_costs() if cost.precision != EXACT.name]
        toy = f"the toy {', '.join(sorted(measured))}: {_kls(toys)}"
        return f"cost in quality not measured for {table_name(model)}; {toy} ({unit})"
    unknown: dict[str, list[str]] = {}
    for offer in offers[1:]:
        if offer.unknown_because is not None:
            unknown.setdefault(offer.unknown_because, []).append(offer.name)
    parts = [f"{_kls(costs)} ({unit})"] if costs else []
    parts += [f"{' and '.join(names)} {reason}" for reason, names in unknown.items()]
    return "cost in quality: " + "; ".join(parts)


def _kls(costs: Sequence[QualityCost]) -> str:
    return ", ".join(f"{cost.precision} {cost.kl:.1e}" for cost in costs)


def precisions_line(model: str, gpu: str, offers: Sequence[PrecisionOffer]) -> str:
    """For the start-up log, ``/plan`` and the web page."""
    return f"Predicted for one sequence on {gpu}: {speeds_text(offers)}; {costs_text(model, offers)}."
