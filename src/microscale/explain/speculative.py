"""Whether drafts are worth it: what steps with drafts cost, and the acceptance from which on they are faster.

A step that verifies K drafts of each sequence has K + 1 times as many tokens, which use more experts. Its cost comes
from the table by which the engine chooses the length of drafts (``DraftCosts``). With an acceptance of a (the
probability that a drafted token is accepted after accepted ones) a step gives 1 + a + … + a^K tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from microscale.engine.limits import drafted_sequences
from microscale.engine.loading.drafting import PreparedHead, draft_costs, expect_head
from microscale.engine.predictions import SHORT_CONTEXT, Phase, predict, preset_name
from microscale.engine.speculation.config import EAGLE3, MTP, NGRAM, SpeculativeConfig, parse_config
from microscale.engine.speculation.length import DraftCosts, acceptance_for, tokens_of
from microscale.errors import BadSetting
from microscale.hardware.speeds_of_others import PublishedDrafts, published_drafts
from microscale.models import embedded
from microscale.models.config import OWN_FORMATS, HeadFormats, LoadFormat
from microscale.models.draft_heads.config import PRESETS
from microscale.models.draft_heads.heads import open_head_weights
from microscale.models.draft_heads.weights import HeadWeights
from microscale.models.families import ModelConfig
from microscale.models.outline import Outline
from microscale.planning.decision import Plan
from microscale.planning.estimate import distinct_experts
from microscale.planning.plan import Setup

SEQUENCES = (1, 4, 16, 64)
DRAFTS = range(8)
LENGTHS = (2.0, 2.5, 3.0)
"""Acceptance lengths (tokens per step), as publishers of draft heads report them."""
COUNTED_AT = 3
"""Number of drafts in those published figures."""
STEP_TOKENS = 8192


@dataclass(frozen=True)
class DraftSource:
    """Where drafts come from, by ``--speculative``."""

    name: str
    """``ngram``, ``eagle3``, ``mtp``, or a draft head's folder or hub id."""
    config: SpeculativeConfig | None = None
    """If ``--speculative`` is the JSON of ``--speculative-config``."""

    @property
    def formats(self) -> HeadFormats:
        """The formats of a draft head."""
        return OWN_FORMATS if self.config is None else self.config.head_formats

    @property
    def drafts(self) -> range:
        """The numbers of drafts per sequence that the report shows."""
        return DRAFTS if self.config is None else range(self.config.num_speculative_tokens + 1)

    @property
    def counted_at(self) -> int:
        """Drafts per sequence in the memory estimate."""
        return COUNTED_AT if self.config is None else self.config.num_speculative_tokens


def read_draft_source(text: str) -> DraftSource:
    """Read a name, or the JSON of ``--speculative-config``."""
    if not text.lstrip().startswith("{"):
        return DraftSource(text)
    config = parse_config(text)
    assert config is not None  # only an empty option gives None
    return DraftSource(config.model or config.method, config)


@dataclass(frozen=True)
class DraftedStep:
    """One step of ``sequences`` sequences, each with ``drafts`` drafts."""

    sequences: int
    drafts: int
    us: float
    """Verifying, drafting, and what happens between two steps."""
    experts: float | None
    """Expected number of experts that a layer uses; ``None`` if the model has none."""

    @property
    def tokens(self) -> int:
        return self.sequences * (1 + self.drafts)

    def tok_s(self, acceptance: float) -> float:
        return self.sequences * tokens_of(acceptance, self.drafts) / self.us * 1e6


def drafted_steps(
    shape: Outline, plan: Plan, setup: Setup, costs: DraftCosts, sequences: int, drafts: Iterable[int], context: int
) -> list[DraftedStep]:
    """One step for each number of drafts, after ``context`` tokens per sequence.

    Attention reads a sequence's keys once for its next token and all its drafts, so the cost of drafts does not depend
    on the context.
    """
    us, short_us = (
        predict(shape, plan, setup, Phase.DECODE, sequences, tokens, STEP_TOKENS).us
        for tokens in (context, min(SHORT_CONTEXT, context))
    )
    experts = next((use.spec for use in shape.uses if use.op == "moe"), None)
    return [
        DraftedStep(
            sequences,
            count,
            us + (costs.ratio(sequences, count) - 1) * short_us,
            None if experts is None else distinct_experts(experts, sequences * (1 + count)),
        )
        for count in drafts
    ]


@dataclass(frozen=True)
class Best:
    """The best number of drafts for a drafter of one quality."""

    acceptance_length: float
    """With ``COUNTED_AT`` drafts."""
    acceptance: float
    """Probability that a token is accepted after accepted ones."""
    step: DraftedStep
    tok_s: float
    speedup: float
    """Relative to no drafts."""

    def to_json(self) -> dict[str, Any]:
        return {
            "acceptance_length": self.acceptance_length,
            "acceptance": round(self.acceptance, 3),
            "drafts": self.step.drafts,
            "tok_s": round(self.tok_s, 1),
            "speedup": round(self.speedup, 3),
        }


@dataclass(frozen=True)
class Batch:
    """The steps of one number of sequences that decode together."""

    steps: tuple[DraftedStep, ...]
    """By the number of drafts, starting with 0."""

    @property
    def alone(self) -> DraftedStep:
        return self.steps[0]

    @property
    def sequences(self) -> int:
        return self.alone.sequences

    def ratio(self, step: DraftedStep) -> float:
        """The cost of a step relative to one without drafts."""
        return step.us / self.alone.us

    def break_even(self, step: DraftedStep) -> float | None:
        """The acceptance above which a step is worth it; ``None`` if it never is."""
        return acceptance_for(max(self.ratio(step), 1.0), step.drafts) if step.drafts else 0.0

    @staticmethod
    def tok_s(step: DraftedStep, length: float) -> float | None:
        """If a step gives each sequence ``length`` tokens; ``None`` if it cannot."""
        return step.sequences * length / step.us * 1e6 if length <= step.drafts + 1 else None

    def best(self, length: float) -> Best:
        acceptance = acceptance_for(length, COUNTED_AT)
        assert acceptance is not None
        step = max(self.steps, key=lambda step: (step.tok_s(acceptance), -step.drafts))
        tok_s = step.tok_s(acceptance)
        return Best(length, acceptance, step, tok_s, tok_s / self.alone.tok_s(acceptance))

    def to_json(self) -> dict[str, Any]:
        return {
            "sequences": self.sequences,
            "tok_s_without": round(self.sequences / self.alone.us * 1e6, 1),
            "steps": [self._step(step) for step in self.steps],
            "best": [self.best(length).to_json() for length in LENGTHS],
        }

    def _step(self, step: DraftedStep) -> dict[str, Any]:
        break_even = self.break_even(step)
        rates = {str(length): self.tok_s(step, length) for length in LENGTHS}
        return {
            "drafts": step.drafts,
            "tokens": step.tokens,
            "us": round(step.us, 1),
            "ratio": round(self.ratio(step), 3),
            "experts": None if step.experts is None else round(step.experts, 1),
            "pays_from_acceptance": None if break_even is None else round(break_even, 3),
            "tok_s_at_acceptance_length": {name: rate and round(rate, 1) for name, rate in rates.items()},
        }


@dataclass(frozen=True)
class DraftsReport:
    """The answer to ``--speculative``."""

    drafter: DraftSource
    context: int
    batches: tuple[Batch, ...]
    published: tuple[PublishedDrafts, ...]
    ranks: int = 1
    """Ranks that share the model; the steps are those of one rank."""
    head: Plan | None = None
    """The kernels of a draft head."""

    def to_json(self) -> dict[str, Any]:
        return {
            "drafter": self.drafter.name,
            **({} if self.head is None else {"head": self.head.to_json()}),
            "context": self.context,
            "batches": [batch.to_json() for batch in self.batches],
            "published": [row.to_json() for row in self.published],
        }


def find_head(drafter: DraftSource, model: str, config: ModelConfig, *, offline: bool) -> HeadWeights | None:
    """The draft head; ``None`` for ``ngram``."""
    name = drafter.name
    if name == NGRAM:
        return None
    asked = SpeculativeConfig(MTP, COUNTED_AT) if name == MTP and drafter.config is None else drafter.config
    if asked is not None and name != EAGLE3:
        # What MTP layers a checkpoint has is looked up in a folder; of others the usual one is reported.
        load_format = LoadFormat.AUTO if Path(model).is_dir() else LoadFormat.DUMMY
        return expect_head(asked, model, config, offline=offline, load_format=load_format)
    head = f"{preset_name(model)}-{EAGLE3}" if name == EAGLE3 else name
    if name == EAGLE3 and model == embedded.NAME:
        head = str(embedded.DRAFT_HEAD)
    elif name == EAGLE3 and head not in PRESETS:
        raise BadSetting(f"--speculative {EAGLE3}: no draft head for {model} is known; give a head's folder or hub id.")
    return open_head_weights(head, config, offline=offline)


def explain_drafts(
    drafter: DraftSource, shape: Outline, plan: Plan, setup: Setup, context: int, head: PreparedHead | None,
    fits: Callable[[int, int], bool], ranks: int = 1,
) -> DraftsReport:  # fmt: skip
    """The report for all batches that fit. With several ranks the host reads every step with drafts."""
    costs = draft_costs(shape, plan, setup, head, on_device=head is not None and ranks == 1)
    drafts = [count for count in drafter.drafts if count <= shape.most_drafts]
    batches = [
        Batch(tuple(drafted_steps(shape, plan, setup, costs, sequences, drafts, context)))
        for sequences in SEQUENCES
        if fits(sequences, context) and sequences <= drafted_sequences(sequences, states=shape.state_bytes > 0)
    ]
    others = published_drafts(preset_name(shape.name), setup.gpu)
    return DraftsReport(drafter, context, tuple(batches), others, ranks, None if head is None else head.plan)
