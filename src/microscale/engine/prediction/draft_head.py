"""How long a draft head takes for its drafts, by its shapes.

An EAGLE3 head makes a pass of one token a sequence for each draft; its first also takes in what the last step accepted.
A DFlash head makes one pass for all drafts, over a block, and its target's lm_head reads all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from microscale.backends.decision import Plan
from microscale.backends.plan import Setup, Use, make_plan
from microscale.engine.prediction.drafts import Drafting
from microscale.engine.prediction.predict import use_time
from microscale.models.draft_heads.config import Eagle3Config, HeadConfig
from microscale.models.draft_heads.heads import outline_head
from microscale.models.outline import Outline

PAGE_SIZE = 16
LM_HEAD = "lm_head"
TAKES_IN = "fc"
"""Reads the target's hidden states: in the first pass alone."""


def head_drafting(config: HeadConfig, own: Setup, target: Outline, plan: Plan, setup: Setup, context: int) -> Drafting:
    """The times of a head that is set up as ``own``, beside a target whose ``plan`` was made."""
    uses = outline_head(config, setup.activations, PAGE_SIZE).uses
    own_plan = make_plan("draft head", uses, own)
    layers = [use for use in uses if use.layer != LM_HEAD]
    again = [use for use in layers if use.layer != TAKES_IN]
    ends = [use for use in uses if use.layer == LM_HEAD]
    shared = [] if ends else [use for use in target.uses if use.layer == LM_HEAD]

    def sum_us(own_uses: Iterable[Use], tokens: int) -> float:
        return sum(use_time(own_plan, own, use, tokens, context).us for use in own_uses)

    def logits_us(tokens: int) -> float:
        return sum_us(ends, tokens) + sum(use_time(plan, setup, use, tokens, context).us for use in shared)

    @cache
    def time(sequences: int, drafts: int) -> float:
        first = sum_us(layers, sequences * (1 + drafts))
        if not isinstance(config, Eagle3Config):
            return first + logits_us(sequences * drafts)
        return first + (drafts - 1) * sum_us(again, sequences) + drafts * logits_us(sequences)

    return Drafting(time, on_device=True)
