"""Everything that ``explain`` knows, as one record and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from microscale import hardware
from microscale.engine.loading.drafting import prepare_head
from microscale.engine.loading.fit import plan_and_reckon, refusal
from microscale.engine.loading.memory import Memory, Workload
from microscale.engine.predictions import BATCHES, SHORT_CONTEXT, Kind, Point, make_points, preset_name
from microscale.engine.step_times import Part, StepTimes
from microscale.errors import BadSetting
from microscale.explain.ranks import JoinedPoint, with_sums
from microscale.explain.shared_memory import beside
from microscale.explain.speculative import DraftsReport, explain_drafts, find_head, read_drafter
from microscale.hardware.links import Link, link_between
from microscale.hardware.published import Published, published
from microscale.hardware.reach import reach
from microscale.models.families import LoadFormat, ModelConfig, find_config
from microscale.models.outline import Outline, outline, shard_name
from microscale.parallel.sharding import Shard
from microscale.planning.decision import Plan
from microscale.planning.estimate import Estimate
from microscale.planning.ops import Activations
from microscale.planning.oracle import Preference
from microscale.planning.plan import Setup, estimated
from microscale.planning.precision import EXACT, Precision

CONTEXT = 4096
STEP_TOKENS = 8192
PAGE_SIZE = 16


@dataclass(frozen=True)
class Question:
    """What is asked. Names follow the command line's options."""

    model: str
    gpu: str | None = None
    """A known card; ``None``: the one of this machine."""
    precision: Precision = EXACT
    preference: Preference = field(default_factory=Preference)
    context: int | None = None
    """``None``: ``CONTEXT``, or the model's own limit if that is less."""
    batch: int = 1
    utilization: float = 0.9
    reserve: int | None = None
    """Bytes that stay with the system where it shares its memory."""
    speculative: str | None = None
    """Who drafts: ``ngram``, ``eagle3``, a draft head's folder or hub id, or the JSON of ``--speculative-config``;
    ``None``: nobody."""
    offline: bool = False
    tensor_parallel_size: int = 1
    """Ranks that share the model, each on such a card. The report is on the first of them, which holds most."""


@dataclass(frozen=True)
class Report:
    """The answer."""

    question: Question
    setup: Setup
    outline: Outline
    plan: Plan
    memory: Memory
    parts: tuple[Part[Estimate], ...]
    """The layer kinds of the question's decoding step."""
    points: tuple[Point, ...]
    """Speeds at several batch sizes, contexts and prompts; those of the question are among them."""
    published: tuple[Published, ...]
    """What others say of their engines, on this kind of card."""
    refusal: str | None
    """Why the model does not fit and what would help; ``None`` where it fits."""
    drafts: DraftsReport | None = None
    """Whether drafts are worth it, where that was asked."""

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.question.model,
            "gpu": self.setup.gpu.name,
            "precision": str(self.setup.precision),
            "decisions": self.plan.to_json(),
            "memory": {
                "bytes": self.memory.by_kind(),
                "max_context": self.memory.max_context,
                "max_sequences": self.memory.max_sequences,
                "beside_system": [entry.to_json() for entry in beside(self.memory)],
            },
            "predicted": self._predicted(),
            **({} if self.drafts is None else {"speculative": self.drafts.to_json()}),
        } | self._ranks()

    def _ranks(self) -> dict[str, Any]:
        """Of a model on several ranks: what is said above is said of one, and without what they say to each other."""
        if self.question.tensor_parallel_size == 1:
            return {}
        ranks = {"ranks": self.question.tensor_parallel_size, "sums_a_step": self.sums_a_step}
        link = {} if self.link is None else {"link": self.link.what, "source": self.link.source}
        joined = {"with_sums": [point.to_json() for point in self.joined_points]}
        return {"tensor_parallel": {**ranks, **link, **joined}}

    @property
    def link(self) -> Link | None:
        """Between such cards; ``None`` for one rank, and on a CPU."""
        return None if self.question.tensor_parallel_size == 1 else link_between(self.setup.gpu)

    @property
    def joined_points(self) -> list[JoinedPoint]:
        """What the ranks reach together."""
        link = self.link
        row_bytes = self.outline.hidden * self.setup.activation_size
        how = (self.question.tensor_parallel_size, self.sums_a_step, row_bytes, STEP_TOKENS)
        return [] if link is None else [with_sums(point, link, *how) for point in self.points]

    @property
    def sums_a_step(self) -> int:
        """Over all ranks: after attention and after the experts of each layer."""
        return 2 * sum(layers.count for layers in self.outline.cached)

    def _predicted(self) -> dict[str, Any]:
        asked, prompt = self.asked, self.prompt
        read = reach(self.setup.gpu)
        return {
            "decode_tok_s": round(asked.tok_s, 1),
            "decode_ceiling_tok_s": round(asked.ceiling, 1),
            "prefill_tok_s": round(prompt.tok_s, 1),
            "interval": 0.9,
            "decode": [point.to_json() for point in self.points if point.kind is Kind.DECODE],
            "prefill": [point.to_json() for point in self.points if point.kind is Kind.PREFILL],
            "bandwidth": {"sheet_gbs": self.setup.gpu.bandwidth_gbs, **asdict(read)},
            "published": [row.to_json() for row in self.published],
        }

    @property
    def asked(self) -> Point:
        """Decoding at the batch and context of the question."""
        return self._point(Kind.DECODE, self.question.batch)

    @property
    def prompt(self) -> Point:
        """A prompt as long as the context."""
        return self._point(Kind.PREFILL, 1)

    def _point(self, kind: Kind, batch: int) -> Point:
        wanted = (kind, batch, self.memory.context)
        return next(point for point in self.points if (point.kind, point.batch, point.context) == wanted)


def explain(question: Question) -> Report:
    """The report on one model on one GPU."""
    shard = Shard(0, question.tensor_parallel_size)
    config = read_model(question.model, question.offline).sharded(shard)
    gpu = hardware.detect() if question.gpu is None else hardware.known(question.gpu)
    available = hardware.available_memory(gpu) if question.gpu is None else None
    activations = Activations.FLOAT32 if gpu.is_cpu else Activations.BF16
    context = min(CONTEXT, config.max_context) if question.context is None else question.context
    if question.batch < 1:
        raise BadSetting(f"--batch {question.batch} is less than 1.")
    workload = Workload(context, question.batch, STEP_TOKENS, PAGE_SIZE, question.utilization, question.reserve)
    workload.check(question.model, config.max_context)
    setup = Setup(gpu, activations, question.preference, question.precision)
    head, drafter = None, None
    if question.speculative is not None:
        drafter = read_drafter(question.speculative)
        opened = find_head(drafter, question.model, config, offline=question.offline)
        head = None if opened is None else prepare_head(opened, setup, PAGE_SIZE, drafter.formats)
        workload = replace(workload, draft_tokens=drafter.counted_at, head=None if head is None else head.need)
    shape = outline(shard_name(question.model, shard), config, activations, PAGE_SIZE, context)
    plan, memory = plan_and_reckon(shape, setup, workload, available)
    why = None if memory.fits else refusal(shape, setup, memory)
    parts = tuple(StepTimes(shape, plan, setup, estimated).decode(question.batch, context))
    batches = sorted({*BATCHES, question.batch})
    contexts = sorted({min(SHORT_CONTEXT, context), context})

    def fits(sequences: int, tokens: int) -> bool:
        asked = tokens == context and sequences in (1, question.batch)
        return asked or (memory.fits and memory.fixed + memory.kv.bytes(tokens, sequences) <= memory.usable)

    points = make_points(shape, plan, setup, batches, contexts, STEP_TOKENS, fits)
    others = published(preset_name(question.model), gpu) if shard.is_whole else ()
    drafts = None
    if drafter is not None:
        drafts = explain_drafts(drafter, shape, plan, setup, context, head, fits, shard.world)
    return Report(question, setup, shape, plan, memory, parts, tuple(points), others, why, drafts)


def read_model(model: str, offline: bool = False, overrides: Mapping[str, object] | None = None) -> ModelConfig:
    """The config of a preset or of its published checkpoint, which needs no network, of a folder or of a hub id."""
    return find_config(model, LoadFormat.DUMMY, overrides or {}, offline)
