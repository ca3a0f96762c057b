"""What steps with drafts are expected to cost before any has run: what ``explain --speculative`` prints.

A few dozen of them, 4 ms each: all batch sizes that are powers of two, and five lengths of drafts.
"""

from __future__ import annotations

from microscale.backends.decision import Plan
from microscale.backends.plan import Setup
from microscale.engine.prediction.drafts import NGRAM, Drafting, drafted_steps
from microscale.engine.speculation.costs import Prior
from microscale.models.outline import Outline

LENGTHS = (0, 1, 3, 7, 15)
CONTEXT = 2048
"""Tokens that sequences are taken to have: the times of real steps correct it."""


def predicted_costs(
    outline: Outline, plan: Plan, setup: Setup, most: int, max_sequences: int, drafting: Drafting = NGRAM
) -> Prior:
    """For drafts of up to ``most`` tokens. ``drafting``: what the drafter adds."""
    lengths = sorted({*(length for length in LENGTHS if length < most), most})
    sizes = [1 << power for power in range((max_sequences - 1).bit_length() + 1)]
    context = min(CONTEXT, outline.max_context)

    rows = [drafted_steps(outline, plan, setup, size, lengths, context, drafting) for size in sizes]
    step = tuple(tuple(each.us - each.draft_us for each in row) for row in rows)
    draft = tuple(tuple(each.draft_us for each in row) for row in rows)
    return Prior(tuple(sizes), tuple(lengths), step, draft)
