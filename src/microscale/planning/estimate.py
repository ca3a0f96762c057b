"""How long a kernel will take: its cost over the card's ceilings and the efficiency measured for the card's family.

The oracle ranks implementations by this, and it is the time that ``explain`` shows for each layer.

Attention needs more than its spec says, and gets it here: how the new tokens divide into sequences, and the bytes of a
cached number. Up to ``DECODING_TOKENS`` tokens are as many sequences with one new token each; more are prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from microscale.hardware import LAUNCH_US, UNCHAINED_US, Feature, Gpu, speeds
from microscale.kernels.attention.spec import AttentionSpec, BatchShape
from microscale.kernels.moe.cost import expected_experts
from microscale.kernels.moe.spec import MoeSpec
from microscale.kernels.op import Cost, Implementation
from microscale.kernels.recurrent.spec import RecurrentSpec, StepShape

DECODING_TOKENS = 256
"""The most sequences that are expected to decode together; a larger batch is counted as one prompt."""


@dataclass(frozen=True)
class Estimate:
    """The time of one call, or of several together."""

    us: float
    floor_us: float
    bytes: int
    flops: int
    tuned: bool
    """The efficiency was measured on a card of this family, for work of about this size."""
    launch_us: float = 0.0
    """The part of ``us`` that is launches."""

    def __add__(self, other: Self) -> Self:
        return replace(
            self,
            us=self.us + other.us,
            floor_us=self.floor_us + other.floor_us,
            bytes=self.bytes + other.bytes,
            flops=self.flops + other.flops,
            tuned=self.tuned and other.tuned,
            launch_us=self.launch_us + other.launch_us,
        )

    def times(self, count: int) -> Self:
        names = ("us", "floor_us", "bytes", "flops", "launch_us")
        return replace(self, **{name: getattr(self, name) * count for name in names})

    def without_launches(self) -> Self:
        """For work that runs inside another kernel."""
        return replace(self, us=max(self.us - self.launch_us, self.floor_us), launch_us=0.0)


def estimate(entry: Implementation[Any], spec: Any, gpu: Gpu, kv_size: int = 2) -> Estimate:
    """What ``entry`` will take for ``spec`` on ``gpu``; ``kv_size`` is the bytes of one cached number."""
    cost = cost_of(entry, spec, gpu, kv_size)
    work = (cost.bytes, cost.flops, cost.unit.value, gpu)
    floor, ideal = speeds.floor_us(*work), speeds.ideal_us(*work)
    launches = 0.0 if gpu.is_cpu else cost.launches * LAUNCH_US
    measured = speeds.efficiency(gpu.family, entry.op, cost.runs_as or entry.name, cost.bytes, cost.flops)
    us = ideal / cost.efficiency + launches if measured is None else ideal / measured
    if gpu.has(Feature.PDL) and not cost.chained:
        us += UNCHAINED_US
    return Estimate(us, floor, cost.bytes, cost.flops, measured is not None, min(launches, us))


def cost_of(entry: Implementation[Any], spec: Any, gpu: Gpu, kv_size: int = 2) -> Cost:
    """What ``entry`` must move and compute for ``spec``."""
    return _attention_cost(entry, spec, gpu, kv_size) if isinstance(spec, AttentionSpec) else entry.cost(spec, gpu)


def _attention_cost(entry: Implementation[Any], spec: AttentionSpec, gpu: Gpu, kv_size: int) -> Cost:
    """``cost`` counts each token as a sequence. Tokens of one prompt share the keys that they read, and a token sees
    those before it: the bytes are of one token that sees all, the operations of all tokens that see the mean."""
    cost = entry.cost(spec, gpu)
    if spec.batch is not None and spec.batch.verify:
        # A sequence's next token and its drafts read the same keys, once.
        cost = replace(cost, bytes=entry.cost(replace(spec, tokens=spec.batch.sequences), gpu).bytes)
    elif spec.tokens > DECODING_TOKENS and (spec.batch is None or spec.batch.longest_query > 1):
        cached = max(spec.context - spec.tokens, 0)
        mean = replace(spec, context=cached + (spec.tokens + 1) // 2)
        # A window slides over the prompt: all of its keys are read, once.
        last = replace(spec, tokens=1, context=spec.context, window=_reach(spec))
        cost = replace(entry.cost(mean, gpu), bytes=entry.cost(last, gpu).bytes)
    # The spec does not say how the cache stores its numbers; cost counts them in the activations' type.
    return replace(cost, bytes=cost.bytes * kv_size // spec.activations.itemsize)


def _reach(spec: AttentionSpec) -> int | None:
    return None if spec.window is None else min(spec.context, spec.tokens + spec.window)


def decoding(spec: AttentionSpec, sequences: int, context: int, kv_fp8: bool) -> AttentionSpec:
    """The attention spec of a decoding step: one new token of each sequence."""
    shape = None
    if sequences > DECODING_TOKENS:  # otherwise they would count as one prompt
        shape = BatchShape(sequences, 1, -(-context // spec.page_size), kv_fp8)
    return replace(spec, tokens=sequences, context=context, batch=shape)


def verified(spec: AttentionSpec, sequences: int, drafts: int, context: int, kv_fp8: bool) -> AttentionSpec:
    """Sequences that verify drafts: each reads its keys once for its next token and all of them."""
    pages = -(-(context + drafts) // spec.page_size)
    shape = BatchShape(sequences, 1 + drafts, pages, kv_fp8, verify=True)
    return replace(spec, tokens=sequences * (1 + drafts), context=context, batch=shape)


def of_states(spec: RecurrentSpec, sequences: int, longest: int, *, verify: bool = False) -> RecurrentSpec:
    """The spec of a step of sequences that have ``longest`` new tokens each."""
    return replace(spec, tokens=sequences * longest, step=StepShape(sequences, longest, verify))


def distinct_experts(spec: Any, tokens: int) -> float:
    """Experts of a layer that this many tokens are expected to use if they spread evenly."""
    assert isinstance(spec, MoeSpec)
    return expected_experts(replace(spec, tokens=tokens))
