"""What a step with drafts will cost, and from which acceptance on it pays.

A step that verifies K drafts of each sequence is a step of K + 1 times as many tokens: every layer's kernels take what
they take for so many, and in a mixture of experts these tokens use more experts. Attention reads the keys of a sequence
once for all of its tokens. A drafter that is a model adds its own passes. Where drafts come from the host, the step is
read before the next is launched, so what the host does is not hidden (``host_us``); where they are on the device, that
moves the next step on by itself (``MOVE_US``).

With an acceptance of a (the chance of each drafted token after accepted ones) a step gives 1 + a + … + a^K tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from microscale.backends.decision import Plan
from microscale.backends.drafted import distinct_experts
from microscale.backends.forecast import total
from microscale.backends.plan import Setup
from microscale.engine.prediction.interval import interval
from microscale.engine.prediction.points import preset_name
from microscale.engine.prediction.predict import decode_parts
from microscale.hardware.whole_models import Case, Kind
from microscale.models.outline import Outline

HOST_US = 220.0
"""What the GPU waits for where steps are read one by one: reading tokens, launching the next step."""
HOST_SEQUENCE_US = 35.0
HOST_DRAFT_US = 1.5
"""The same for each sequence, and for each draft of it: acceptance, pages, tables, inputs. On an H200 (gpt-oss-20b, K =
3, 2026-11-17) steps of 1, 4 and 16 sequences took 0.26, 0.45 and 0.84 ms more than steps of as many tokens that ran
ahead; the part of a draft is from a CPU."""
MOVE_US = 50.0
"""The kernels of ``step.ahead``. On an H200 (gpt-oss-20b, 2026-11-17) one sequence with three drafts took 60 us more
than four without; attention has one launch more a layer there."""


def host_us(sequences: int, drafts: int) -> float:
    """Of a step in which each sequence has so many drafts; without any, steps run ahead and the host is hidden."""
    return HOST_US + sequences * (HOST_SEQUENCE_US + drafts * HOST_DRAFT_US) if drafts else 0.0


def no_time(sequences: int, drafts: int) -> float:
    return 0.0


@dataclass(frozen=True)
class Drafting:
    """What a drafter adds to a step."""

    time: Callable[[int, int], float] = no_time
    """What it takes, in microseconds: for so many sequences, each with so many drafts."""
    on_device: bool = False
    """Steps with its drafts run ahead."""

    def between_us(self, sequences: int, drafts: int) -> float:
        """For what the GPU waits, or what it does, between two steps."""
        return MOVE_US if self.on_device and drafts else host_us(sequences, drafts)


NGRAM = Drafting()
FREE = Drafting(on_device=True)
"""A draft head that takes no time."""


@dataclass(frozen=True)
class DraftedStep:
    """One step of ``sequences`` sequences, each with ``drafts`` drafts."""

    sequences: int
    drafts: int
    us: float
    """Of all of it: verifying, drafting, and what is between two steps."""
    draft_us: float
    floor_us: float
    """Of the bytes and operations of verifying, by the data sheet."""
    experts: float | None
    """Of a layer, that are expected to be used; ``None`` where the model has none."""

    @property
    def tokens(self) -> int:
        return self.sequences * (1 + self.drafts)


def drafted_steps(
    outline: Outline, plan: Plan, setup: Setup, sequences: int, drafts: Sequence[int], context: int,
    drafting: Drafting = NGRAM,
) -> list[DraftedStep]:  # fmt: skip
    """The predictions of steps after ``context`` tokens of each sequence, one for each number of drafts, which grows.
    More tokens never take less: where two paths of a kernel are fitted apart, the larger time holds on."""
    alone = total([part.forecast for part in decode_parts(outline, plan, setup, sequences, context)])
    # Whole steps against sums of kernels: by the case without drafts, so that those with drafts are held against it.
    case = Case(preset_name(outline.name), str(setup.precision), Kind.DECODE, sequences, context)
    mended = interval(alone, case, setup.gpu).us / alone.us
    experts = next((use.spec for use in outline.uses if use.op == "moe"), None)
    found = []
    verify_us = 0.0
    for count in drafts:
        parts = total([part.forecast for part in decode_parts(outline, plan, setup, sequences, context, count)])
        draft_us = drafting.time(sequences, count) if count else 0.0
        verify_us = max(verify_us, parts.us * mended)
        us = verify_us + draft_us + (0.0 if setup.gpu.is_cpu else drafting.between_us(sequences, count))
        used = None if experts is None else distinct_experts(experts, sequences * (1 + count))
        found.append(DraftedStep(sequences, count, us, draft_us, parts.floor_us, used))
    return found


# ---- what a step gives -----------------------------------------------------------------------------------------------


def tokens_of(acceptance: float, drafts: int) -> float:
    """Tokens of a sequence that a step gives on average: 1 + a + … + a^K."""
    return sum(acceptance**place for place in range(drafts + 1))


def acceptance_for(tokens: float, drafts: int) -> float | None:
    """The acceptance with which a step of so many drafts gives so many tokens; ``None`` where none does."""
    if tokens > drafts + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_of(middle, drafts) < tokens else (low, middle)
    return high


def break_even(step: DraftedStep, alone: DraftedStep) -> float | None:
    """The acceptance from which on a step is faster than ``alone``, the same without drafts; ``None``: never."""
    return acceptance_for(max(step.us / alone.us, 1.0), step.drafts) if step.drafts else 0.0


def best_drafts(steps: Sequence[DraftedStep], acceptance: float) -> DraftedStep:
    """Of steps with different numbers of drafts, the one that gives most tokens a second; of equals the shortest."""
    return max(steps, key=lambda step: (tokens_of(acceptance, step.drafts) / step.us, -step.drafts))
