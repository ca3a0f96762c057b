"""Whether drafts are worth it: what steps with drafts cost, and the acceptance from which on they are faster.

A step that verifies K drafts of each sequence has K + 1 times as many tokens, which use more experts. Its cost comes
from the table by which the engine chooses the length of drafts (``DraftCosts``). With an acceptance of a (the
probability that a drafted token is accepted after accepted ones) a step gives 1 + a + … + a^K tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from microscale.engine.loading.drafting import PreparedHead, draft_costs, open_head
from microscale.engine.predictions import SHORT_CONTEXT, Phase, predict, preset_name
from microscale.engine.speculation.config import SpeculativeConfig, parse_config
from microscale.engine.speculation.length import DraftCosts, acceptance_for, tokens_of
from microscale.errors import BadSetting
from microscale.hardware.published import PublishedDrafts, published_drafts
from microscale.models import embedded
from microscale.models.config import OWN_FORMATS, HeadFormats
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
"""Tokens that a step gives: acceptance lengths, as the publishers of heads count them."""
COUNTED_AT = 3
"""Drafts with which publishers count them."""
NGRAM, EAGLE3 = "ngram", "eagle3"
STEP_TOKENS = 8192


@dataclass(frozen=True)
class Drafter:
    """Who drafts, as ``--speculative`` says."""

    name: str
    """``ngram``, ``eagle3``, or a draft head's folder or hub id."""
    config: SpeculativeConfig | None = None
    """Where it says all that ``--speculative-config`` takes."""

    @property
    def formats(self) -> HeadFormats:
        """Of a head."""
        return OWN_FORMATS if self.config is None else self.config.head_formats

    @property
    def drafts(self) -> range:
        """Drafts of a sequence, by which steps are told."""
        return DRAFTS if self.config is None else range(self.config.num_speculative_tokens + 1)

    @property
    def counted_at(self) -> int:
        """Drafts that memory is counted with."""
        return COUNTED_AT if self.config is None else self.config.num_speculative_tokens


def read_drafter(text: str) -> Drafter:
    """A name, or what ``--speculative-config`` takes."""
    if not text.lstrip().startswith("{"):
        return Drafter(text)
    config = parse_config(text)
    assert config is not None  # there is a text
    return Drafter(config.model or config.method, config)


@dataclass(frozen=True)
class DraftedStep:
    """One step of ``sequences`` sequences, each with ``drafts`` drafts."""

    sequences: int
    drafts: int
    us: float
    """Verifying, drafting, and what happens between two steps."""
    experts: float | None
    """Expected number of experts that a layer uses; ``None`` where the model has none."""

    @property
    def tokens(self) -> int:
        return self.sequences * (1 + self.drafts)

    def tok_s(self, acceptance: float) -> float:
        return self.sequences * tokens_of(acceptance, self.drafts) / self.us * 1e6


def drafted_steps(
    shape: Outline, plan: Plan, setup: Setup, costs: DraftCosts, sequences: int, drafts: Iterable[int], context: int
) -> list[DraftedStep]:
    """One step for each number of drafts, after ``context`` tokens of each sequence. Drafts read the keys of their
    sequence together with its next token, so they cost as much after a long context as after a short one."""
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
    """That it has with ``COUNTED_AT`` drafts."""
    acceptance: float
    """Of a token after accepted ones."""
    step: DraftedStep
    tok_s: float
    speedup: float
    """Against no drafts."""

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
    """So many sequences that decode together."""

    steps: tuple[DraftedStep, ...]
    """By the drafts of each, from none on."""

    @property
    def alone(self) -> DraftedStep:
        return self.steps[0]

    @property
    def sequences(self) -> int:
        return self.alone.sequences

    def ratio(self, step: DraftedStep) -> float:
        """What a step costs against one without drafts."""
        return step.us / self.alone.us

    def pays_from(self, step: DraftedStep) -> float | None:
        """The acceptance from which on a step is faster than one without drafts; ``None``: never."""
        return acceptance_for(max(self.ratio(step), 1.0), step.drafts) if step.drafts else 0.0

    @staticmethod
    def tok_s(step: DraftedStep, length: float) -> float | None:
        """If a step gives each sequence so many tokens; ``None`` where it cannot."""
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
        pays = self.pays_from(step)
        rates = {str(length): self.tok_s(step, length) for length in LENGTHS}
        return {
            "drafts": step.drafts,
            "tokens": step.tokens,
            "us": round(step.us, 1),
            "ratio": round(self.ratio(step), 3),
            "experts": None if step.experts is None else round(step.experts, 1),
            "pays_from_acceptance": None if pays is None else round(pays, 3),
            "tok_s_at_acceptance_length": {name: rate and round(rate, 1) for name, rate in rates.items()},
        }


@dataclass(frozen=True)
class DraftsReport:
    """The answer to ``--speculative``."""

    drafter: Drafter
    context: int
    batches: tuple[Batch, ...]
    published: tuple[PublishedDrafts, ...]
    ranks: int = 1
    """That share the model; the steps are of one of them."""
    head: Plan | None = None
    """Which kernels run the drafter, where it is a model."""

    def to_json(self) -> dict[str, Any]:
        return {
            "drafter": self.drafter.name,
            **({} if self.head is None else {"head": self.head.to_json()}),
            "context": self.context,
            "batches": [batch.to_json() for batch in self.batches],
            "published": [row.to_json() for row in self.published],
        }


def find_head(drafter: Drafter, model: str, config: ModelConfig, *, offline: bool) -> HeadWeights | None:
    """The head that drafts; ``None`` where the drafter is no model."""
    name = drafter.name
    if name == NGRAM:
        return None
    if drafter.config is not None and name != EAGLE3:
        return open_head(drafter.config, model, config, offline=offline)
    head = f"{preset_name(model)}-{EAGLE3}" if name == EAGLE3 else name
    if name == EAGLE3 and model == embedded.NAME:
        head = str(embedded.DRAFT_HEAD)
    elif name == EAGLE3 and head not in PRESETS:
        raise BadSetting(
            f"--speculative {EAGLE3}: no shape of a head for {model} is known here; name a head's folder or hub id."
        )
    return open_head_weights(head, config, offline=offline)


def explain_drafts(
    drafter: Drafter, shape: Outline, plan: Plan, setup: Setup, context: int, head: PreparedHead | None,
    fits: Callable[[int, int], bool], ranks: int = 1,
) -> DraftsReport:  # fmt: skip
    """For all batches whose sequences fit. With several ranks, the host reads every step with drafts."""
    costs = draft_costs(shape, plan, setup, head, on_device=head is not None and ranks == 1)
    batches = [
        Batch(tuple(drafted_steps(shape, plan, setup, costs, sequences, drafter.drafts, context)))
        for sequences in SEQUENCES
        if fits(sequences, context)
    ]
    others = published_drafts(preset_name(shape.name), setup.gpu)
    return DraftsReport(drafter, context, tuple(batches), others, ranks, None if head is None else head.plan)
