"""Tokens per second to expect: the sum over all layers of the chosen kernels' estimates.

Decode is one step of ``batch`` sequences, each with one new token over ``context`` cached ones. Prefill is one prompt
of ``context`` tokens from an empty cache, in steps; only the last token of a prompt goes through lm_head and through
what follows the keys and values of the last layer. The ceiling is the same work at the card's full rates: its bytes
over the bandwidth, or its operations over the peak where they take longer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from microscale.backends import registry
from microscale.backends.decision import Plan
from microscale.backends.estimate import DECODING_TOKENS, Estimate, estimate, total
from microscale.backends.plan import BUCKETS, Setup, Use
from microscale.models.outline import Outline


@dataclass(frozen=True)
class Part:
    """One layer kind's share of a step, over all layers of the kind."""

    layer: str
    chosen: str
    estimate: Estimate


@dataclass(frozen=True)
class Prediction:
    """What a step of decoding takes part by part, and a prompt in all."""

    batch: int
    context: int
    decode: tuple[Part, ...]
    prefill: Estimate
    step_tokens: int

    @property
    def step(self) -> Estimate:
        """One step of decoding."""
        return total([part.estimate for part in self.decode])

    @property
    def decode_tok_s(self) -> float:
        return self.batch / self.step.us * 1e6

    @property
    def decode_ceiling_tok_s(self) -> float:
        return self.batch / self.step.floor_us * 1e6

    @property
    def prefill_tok_s(self) -> float:
        return self.context / self.prefill.us * 1e6


def predict(outline: Outline, plan: Plan, setup: Setup, batch: int, context: int, step_tokens: int) -> Prediction:
    """Both predictions for decisions that were made."""
    decode = tuple(decode_parts(outline, plan, setup, batch, context))
    chunks = []
    for cached in range(0, context, step_tokens):
        tokens = min(step_tokens, context - cached)
        last = cached + tokens == context
        chunks += [part.estimate for part in prompt_parts(outline, plan, setup, tokens, cached, last)]
    return Prediction(batch, context, decode, total(chunks), step_tokens)


def decode_parts(outline: Outline, plan: Plan, setup: Setup, batch: int, context: int) -> Iterator[Part]:
    """One step in which ``batch`` sequences decode."""
    for use in outline.uses:
        spec, name = _chosen(plan, use, batch)
        changes = {"tokens": batch} | ({"context": context} if use.op == "attention" else {})
        if use.op == "attention" and batch > DECODING_TOKENS:
            # More sequences than are told from a prompt: as often as it takes.
            part = _estimate(setup, use, name, replace(spec, tokens=1, context=context)).times(batch)
        else:
            part = _estimate(setup, use, name, replace(spec, **changes))
        yield Part(use.layer, name, part.times(use.count))


def prompt_parts(outline: Outline, plan: Plan, setup: Setup, tokens: int, cached: int, last: bool) -> Iterator[Part]:
    """One step in which ``tokens`` tokens of one prompt run, ``cached`` of them being there already."""
    for use in outline.uses:
        closing = int(use.layer in outline.closing)
        work = [(tokens, use.count - closing), (1, closing if last else 0)]
        parts = []
        for rows, count in work:
            if count:
                spec, name = _chosen(plan, use, rows)
                changes = {"tokens": rows} | ({"context": cached + tokens} if use.op == "attention" else {})
                parts.append((name, _estimate(setup, use, name, replace(spec, **changes)).times(count)))
        if parts:
            yield Part(use.layer, parts[0][0], total([part for _, part in parts]))


def _chosen(plan: Plan, use: Use, tokens: int) -> tuple[Any, str]:
    """The spec and the implementation that run this many tokens."""
    decision = plan.of(use.op, use.layer)[min(bisect_left(BUCKETS, tokens), len(BUCKETS) - 1)]
    return decision.spec, decision.chosen


def _estimate(setup: Setup, use: Use, name: str, spec: Any) -> Estimate:
    return estimate(registry.find(use.op, name), spec, setup.gpu, setup.kv_size)
