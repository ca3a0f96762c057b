"""Tokens per second to expect: the sum over all layers of the chosen kernels' estimates.

Decode is one step of ``batch`` sequences, each with one new token over ``context`` cached ones, and with drafts after
it where they are verified (``drafts``). Prefill is one prompt
of ``context`` tokens from an empty cache, in steps; only the last token of a prompt goes through lm_head and through
what follows the keys and values of the last layer. The ceiling is the same work at the card's full rates: its bytes
over the bandwidth, or its operations over the peak where they take longer.

CUDA graphs hold steps of up to ``PROMPT_GRAPH_TOKENS`` tokens. The kernels of larger ones are started one by one, and
may wait for the host.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from microscale.backends import registry
from microscale.backends.decision import Plan
from microscale.backends.drafted import verified
from microscale.backends.estimate import DECODING_TOKENS
from microscale.backends.forecast import Forecast, forecast, total
from microscale.backends.measured_as import FUSED_SEQUENCES
from microscale.backends.paths import Asked, ask
from microscale.backends.plan import BUCKETS, Setup, Use
from microscale.engine.limits import PROMPT_GRAPH_TOKENS
from microscale.models.outline import Outline

HOST_US = {"moe": 330.0, "dense": 60.0, "attention": 80.0, "small": 150.0, "sampling": 100.0}
"""What starting one use of an op takes on the host, where no graph holds a prompt. From 120b's prompt of 512 tokens
before graphs did: 27 ms on an H200, whose kernels take 24. Hosts differ by a third."""


@dataclass(frozen=True)
class Part:
    """One layer kind's share of a step, over all layers of the kind."""

    layer: str
    chosen: str
    forecast: Forecast


@dataclass(frozen=True)
class Prediction:
    """What a step of decoding takes part by part, and a prompt in all."""

    batch: int
    context: int
    decode: tuple[Part, ...]
    prefill: Forecast
    step_tokens: int

    @property
    def step(self) -> Forecast:
        """One step of decoding."""
        return total([part.forecast for part in self.decode])

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
    return Prediction(batch, context, decode, predict_prompt(outline, plan, setup, context, step_tokens), step_tokens)


def predict_prompt(outline: Outline, plan: Plan, setup: Setup, context: int, step_tokens: int) -> Forecast:
    """One prompt of ``context`` tokens to its first token."""
    host_us = sum(use.count * HOST_US.get(use.op, 60.0) for use in outline.uses)
    steps = []
    for cached in range(0, context, step_tokens):
        tokens = min(step_tokens, context - cached)
        last = cached + tokens == context
        parts = total([part.forecast for part in prompt_parts(outline, plan, setup, tokens, cached, last)])
        in_graph = tokens <= PROMPT_GRAPH_TOKENS
        steps.append(parts if in_graph or setup.gpu.is_cpu else _with_host(parts, host_us))
    return total(steps)


def _with_host(kernels: Forecast, host_us: float) -> Forecast:
    """The longer of both, and somewhat more where they are alike: host and card wait for each other now and then."""
    us = math.hypot(kernels.us**2, host_us**2) ** 0.5
    return replace(kernels, us=us, fixed_us=kernels.fixed_us + us - kernels.us)


def decode_parts(
    outline: Outline, plan: Plan, setup: Setup, batch: int, context: int, drafts: int = 0
) -> Iterator[Part]:
    """One step in which ``batch`` sequences decode, each with so many drafts: all of them give logits."""
    tokens = batch * (1 + drafts)
    beside = _runs_mlp(outline, plan, setup, tokens)
    for use in outline.uses:
        spec, name = _chosen(plan, use, tokens)
        if use.op == "attention" and drafts:
            part = _forecast(setup, use, name, verified(spec, batch, drafts, context, setup.kv_size == 1))
        elif use.op == "attention" and batch > DECODING_TOKENS:
            # More sequences than are told from a prompt: as often as it takes.
            part = _forecast(setup, use, name, replace(spec, tokens=1, context=context)).times(batch)
        elif use.op == "attention":
            part = _forecast(setup, use, name, replace(spec, tokens=batch, context=context))
        elif use.op == "small" and drafts:
            # Several tokens of a sequence are rotated in a launch of their own, as those of many sequences are.
            part = _forecast(setup, use, name, replace(spec, tokens=max(tokens, FUSED_SEQUENCES + 1)))
        else:
            part = _forecast(setup, use, name, replace(spec, tokens=tokens))
        if beside and use.layer.startswith("mlp"):
            part = replace(part, us=part.us - part.fixed_us, fixed_us=0.0)
        yield Part(use.layer, name, part.times(use.count))


def _runs_mlp(outline: Outline, plan: Plan, setup: Setup, tokens: int) -> bool:
    """Whether the experts' kernels run the dense MLP beside them too: it has no launches of its own then."""
    for use in outline.uses:
        if use.op == "moe":
            spec, name = _chosen(plan, use, tokens)
            entry = registry.find(use.op, name)
            return ask(entry, Asked.WITH_MLP, replace(spec, tokens=tokens), setup.gpu).path is not None
    return False


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
                parts.append((name, _forecast(setup, use, name, replace(spec, **changes)).times(count)))
        if parts:
            yield Part(use.layer, parts[0][0], total([part for _, part in parts]))


def use_time(plan: Plan, setup: Setup, use: Use, tokens: int, context: int) -> Forecast:
    """All layers of one use, for so many sequences that decode a token each."""
    spec, name = _chosen(plan, use, tokens)
    changes = {"tokens": tokens} | ({"context": context} if use.op == "attention" else {})
    return _forecast(setup, use, name, replace(spec, **changes)).times(use.count)


def _chosen(plan: Plan, use: Use, tokens: int) -> tuple[Any, str]:
    """The spec and the implementation that run this many tokens."""
    decision = plan.of(use.op, use.layer)[min(bisect_left(BUCKETS, tokens), len(BUCKETS) - 1)]
    return decision.spec, decision.chosen


def _forecast(setup: Setup, use: Use, name: str, spec: Any) -> Forecast:
    return forecast(registry.find(use.op, name), spec, setup.gpu, setup.kv_size, use.layer)
