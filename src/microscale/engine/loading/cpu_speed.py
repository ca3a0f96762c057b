"""How fast a model decodes on this CPU at best: the time to read what one step reads.

Two layers of gpt-oss-20b on two busy cores: at most 0.89 tokens per second with ``dequantized`` and 0.09 with
``reference``; measured 0.48 and 0.05. Small models spend their time on other things, and are fast enough.
"""

from __future__ import annotations

from microscale.engine.loading.memory import Memory
from microscale.engine.predictions import SHORT_CONTEXT
from microscale.engine.step_times import StepTimes, total
from microscale.hardware import GIB
from microscale.models.outline import Outline
from microscale.planning.cpu_rates import read_time
from microscale.planning.decision import Plan
from microscale.planning.plan import Setup

SLOW = 0.5
"""Tokens per second below which a model is not started unless the user says so."""
SMALL_BYTES = GIB


def decode_speed(outline: Outline, plan: Plan, setup: Setup, memory: Memory) -> float | None:
    """Tokens per second of one sequence, at most; ``None`` for a model that is small."""
    if sum(memory.weights.values()) < SMALL_BYTES:
        return None
    steps = StepTimes(outline, plan, setup, read_time)
    return 1e6 / total(steps.decode(1, min(SHORT_CONTEXT, outline.max_context))).us
