"""What one step consists of: the time of each layer kind, by the kernels that the plan chose.

A decoding step has ``batch`` sequences, each with one new token over ``context`` cached ones, and with drafts after it
where they are verified. A prompt starts from an empty cache and is computed in steps; only its last token goes through
lm_head and through what follows the keys and values of the last layer. The floor of a step is the same work at the
card's full rates: its bytes over the bandwidth, or its operations over the peak where that takes longer.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any, Generic

from microscale.engine.limits import PROMPT_GRAPH_TOKENS
from microscale.models.outline import Outline
from microscale.planning import registry
from microscale.planning.decision import Plan
from microscale.planning.estimate import decoding, of_states, verified
from microscale.planning.paths import PathList, ask
from microscale.planning.plan import BUCKETS, Setup, T, TimeOf, Use

HOST_US = {"moe": 330.0, "dense": 60.0, "attention": 80.0, "small": 150.0, "sampling": 100.0}
"""Host time to launch one op of a prompt that no CUDA graph holds. From gpt-oss-120b's prompt of 512 tokens before
graphs held it: 27 ms on an H200, whose kernels take 24. Hosts differ by a third."""
FUSED_SEQUENCES = 8
"""Up to this many sequences, rotation and KV write run inside the attention kernel."""


@dataclass(frozen=True)
class StepPart(Generic[T]):
    """One layer kind's share of a step, over all layers of the kind."""

    layer: str
    chosen: str
    time: T


def total(parts: Iterable[StepPart[T]]) -> T:
    """All of them, one after the other."""
    return reduce(add, (part.time for part in parts))


class StepTimes(Generic[T]):
    """The times of a model's steps; ``time_of`` says how long a kernel takes."""

    def __init__(self, outline: Outline, plan: Plan, setup: Setup, time_of: TimeOf[T]) -> None:
        self.outline, self.plan, self.setup = outline, plan, setup
        self._time_of = time_of

    def decode(self, batch: int, context: int, drafts: int = 0) -> Iterator[StepPart[T]]:
        """One step in which ``batch`` sequences decode, each with ``drafts`` drafts; all tokens give logits."""
        tokens = batch * (1 + drafts)
        fused_mlp = self._experts_run_mlp(tokens)
        for use in self.outline.uses:
            spec, name = self._chosen(use, tokens)
            if use.op == "attention" and drafts:
                spec = verified(spec, batch, drafts, context, self.setup.kv_size == 1)
            elif use.op == "attention":
                spec = decoding(spec, batch, context, self.setup.kv_size == 1)
            elif use.op == "recurrent":
                spec = of_states(spec, batch, 1 + drafts, verify=drafts > 0)
            elif use.op == "small" and drafts:
                # Several tokens of a sequence are rotated in a launch of their own, as are those of many sequences.
                spec = replace(spec, tokens=max(tokens, FUSED_SEQUENCES + 1))
            else:
                spec = replace(spec, tokens=tokens)
            time = self._time(use, name, spec)
            if fused_mlp and use.layer.startswith("mlp"):
                time = time.without_launches()
            yield StepPart(use.layer, name, time.times(use.count))

    def prompt(self, tokens: int, step_tokens: int) -> T:
        """A whole prompt, to its first token."""
        host_us = sum(use.count * HOST_US.get(use.op, 60.0) for use in self.outline.uses)
        steps = []
        for cached in range(0, tokens, step_tokens):
            count = min(step_tokens, tokens - cached)
            time = total(self.prompt_step(count, cached, last=cached + count == tokens))
            if count > PROMPT_GRAPH_TOKENS and not self.setup.gpu.is_cpu:
                # The longer of both, and somewhat more where they are similar: host and GPU wait for each other.
                time = replace(time, us=math.hypot(time.us**2, host_us**2) ** 0.5)
            steps.append(time)
        return reduce(add, steps)

    def prompt_step(self, tokens: int, cached: int, last: bool) -> Iterator[StepPart[T]]:
        """One step with ``tokens`` new tokens of one prompt, behind ``cached`` that were computed before."""
        for use in self.outline.uses:
            closing = int(use.layer in self.outline.closing)
            times = []
            for rows, count in ((tokens, use.count - closing), (1, closing if last else 0)):
                if count:
                    spec, name = self._chosen(use, rows)
                    changes = {"tokens": rows} | ({"context": cached + tokens} if use.op == "attention" else {})
                    spec = of_states(spec, 1, rows) if use.op == "recurrent" else replace(spec, **changes)
                    times.append((name, self._time(use, name, spec).times(count)))
            if times:
                yield StepPart(use.layer, times[0][0], reduce(add, (time for _, time in times)))

    def _experts_run_mlp(self, tokens: int) -> bool:
        """Whether the experts' kernels also run the dense MLP next to them: it has no launches of its own then."""
        for use in self.outline.uses:
            if use.op == "moe":
                spec, name = self._chosen(use, tokens)
                entry = registry.find(use.op, name)
                return ask(entry, PathList.WITH_MLP, replace(spec, tokens=tokens), self.setup.gpu).path is not None
        return False

    def _chosen(self, use: Use, tokens: int) -> tuple[Any, str]:
        """The spec and the implementation that run this many tokens."""
        decision = self.plan.of(use.op, use.layer)[min(bisect_left(BUCKETS, tokens), len(BUCKETS) - 1)]
        return decision.spec, decision.chosen

    def _time(self, use: Use, name: str, spec: Any) -> T:
        return self._time_of(registry.find(use.op, name), spec, self.setup, use.layer)
