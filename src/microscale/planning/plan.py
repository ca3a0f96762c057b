"""From what a model uses to a plan: one decision per op, layer kind and batch size.

``explain`` makes the plan of a model that is not loaded and the loader that of one that is, through the same
``decide_use``: what runs is what was printed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar

from microscale.errors import Unsupported
from microscale.hardware import Gpu
from microscale.kernels.op import Activations, Implementation
from microscale.planning import registry
from microscale.planning.choose_kernel import Freedom, Preference, decide_layer
from microscale.planning.decision import Decision, Plan, Rejected
from microscale.planning.estimate import Estimate, estimate
from microscale.planning.option_values import LAYER_FORMATS
from microscale.planning.precision import BITS, EXACT, Precision

BUCKETS = (1, 4, 16, 64, 256, 1024, 8192)
"""Batch sizes for which a decision is made; a batch takes the decision of the next size up, the largest beyond that."""


@dataclass(frozen=True)
class Use:
    """One op as a model uses it: in how many layers, in the checkpoint's own format."""

    op: str
    layer: str
    """The layer kind: ``qkv``, ``experts``, ``full_attention`` … What follows a dot tells apart layers that
    ``--layer-format`` takes together: ``qkv.sliding``, ``mlp.down``."""
    spec: Any
    count: int = 1


@dataclass(frozen=True)
class Setup:
    """All that decisions depend on apart from the model."""

    gpu: Gpu
    activations: Activations
    """The type in which activations travel between ops."""
    preference: Preference = field(default_factory=Preference)
    precision: Precision = EXACT

    @property
    def activation_size(self) -> int:
        """Bytes of one number between ops."""
        return self.activations.itemsize

    @property
    def kv_size(self) -> int:
        """Bytes of one number in the KV cache."""
        return 1 if self.precision.kv_format == "fp8" else self.activation_size


T = TypeVar("T", bound=Estimate)
TimeOf = Callable[[Implementation[Any], Any, Setup, str], T]
"""The time of an implementation for a spec, in a setup, as the layer of this name."""


def estimated(entry: Implementation[Any], spec: Any, setup: Setup, layer: str) -> Estimate:
    return estimate(entry, spec, setup.gpu, setup.kv_size)


def make_plan(model: str, uses: Sequence[Use], setup: Setup) -> Plan:
    """Every decision for ``model``."""
    setup.preference.check()
    setup.precision.check_layers(model, [use.layer for use in uses])
    plan = Plan()
    for use in uses:
        plan.add(decide_use(use, setup))
    return plan


def uncapturable(plan: Plan, tokens: int) -> str | None:
    """Why no CUDA graph can hold a step of the model with up to this many tokens, or ``None``. Sampling is no part of
    the step."""
    last = min(bisect_left(BUCKETS, tokens), len(BUCKETS) - 1)
    for op, layer in plan.layers():
        for decision in plan.of(op, layer)[: last + 1]:
            reason = registry.find(op, decision.chosen).uncapturable
            if reason is not None and op != "sampling":
                return f"{decision.chosen}, which runs {layer}, {reason}"
    return None


def decide_use(use: Use, setup: Setup) -> list[Decision]:
    """One decision per bucket. A precision that cannot be met is an error with the option and the nearest that can."""
    try:
        return list(_decide(use, setup))
    except Unsupported as error:
        works = _nearest(use, setup)
        if works is None:
            raise
        asked, fix = works
        text = str(error).rstrip(".")
        raise Unsupported(f"{text if text.startswith('--') else f'{asked}: {text}'}; {fix} works.") from None


@lru_cache(maxsize=1024)  # advice on what fits, and each precision on offer, ask about the same layers again
def _decide(use: Use, setup: Setup) -> tuple[Decision, ...]:
    precision = setup.precision
    spec = precision.applied(use.layer, use.spec)
    specs = [replace(spec, tokens=tokens) for tokens in BUCKETS]
    weighted = use.op in ("moe", "dense")
    activations = precision.activations(use.op, setup.activations, spec.weight_format) if weighted else ()
    freedom = Freedom(activations, use.count, setup.kv_size)
    decisions = decide_layer(use.op, use.layer, specs, setup.gpu, setup.preference, freedom)
    kept = precision.keeps_own(use.layer, use.spec)
    if kept is None:
        return tuple(decisions)
    wanted = Rejected(precision.format_of(use.layer, use.spec.weight_format), kept)
    return tuple(replace(decision, rejected=(wanted, *decision.rejected)) for decision in decisions)


def _nearest(use: Use, setup: Setup) -> tuple[str, str] | None:
    """The option that prevents the use and its nearest value with which the use can run."""
    precision = setup.precision
    tries: list[tuple[str, str, Precision]] = []
    if use.op == "moe" and precision.moe_activations not in ("auto", "bf16"):
        other = replace(precision, moe_activations="bf16")
        tries.append((f"--moe-activations {precision.moe_activations}", "--moe-activations bf16", other))
    if use.op == "moe" and setup.preference.moe_backend is not None and precision.moe_activations == "auto":
        asked = f"--moe-backend {setup.preference.moe_backend}"
        for narrow in ("mxfp8", "nvfp4"):
            other = replace(precision, moe_activations=narrow)
            tries.append((asked, f"{asked} --moe-activations {narrow}", other))
    own = getattr(use.spec, "weight_format", None)
    # A BF16 checkpoint's experts run in no format of their own.
    if own is not None and (precision.format_of(use.layer, own) != own or (use.op, own) == ("moe", "bf16")):
        layer, held = use.layer.partition(".")[0], precision.format_of(use.layer, own)
        for fmt in sorted(LAYER_FORMATS, key=lambda fmt: abs(BITS[fmt] - BITS[held])):
            chosen = {**dict(precision.chosen), layer: fmt}
            other = replace(precision, chosen=tuple(chosen.items()))
            tries.append((precision.option(layer), f"--layer-format {layer}={fmt}", other))
    for asked, fix, other in tries:
        try:
            _decide(use, replace(setup, precision=other))
        except Unsupported:
            continue
        return asked, fix
    return None
