"""Everything that ``explain`` knows, as one record and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from microscale import hardware
from microscale.engine.loading.drafting import prepare_head
from microscale.engine.loading.fit import advice, plan_and_size, refusal
from microscale.engine.loading.memory import LEAST_CONTEXT, Memory, Workload, memory_for
from microscale.engine.loading.precisions import PrecisionOffer, precision_offers, settle_precision
from microscale.engine.loading.usable import usable_memory
from microscale.engine.predictions import BATCHES, SHORT_CONTEXT, Phase, Point, make_points, preset_name
from microscale.engine.step_times import StepPart, StepTimes
from microscale.errors import BadSetting
from microscale.explain.speculative import DraftsReport, explain_drafts, find_head, read_draft_source
from microscale.hardware import Gpu
from microscale.hardware.links import CardLink, Wait, link_between
from microscale.hardware.reachable_bandwidth import reach
from microscale.hardware.speeds_of_others import Published, published
from microscale.hardware.unified import PAGE_CACHE, System, systems
from microscale.models.families import LoadFormat, ModelConfig, find_config
from microscale.models.outline import Outline, outline, shard_name
from microscale.parallel.sharding import Shard
from microscale.planning.choose_kernel import Preference
from microscale.planning.decision import Plan
from microscale.planning.estimate import Estimate
from microscale.planning.ops import Activations
from microscale.planning.plan import Setup, estimated
from microscale.planning.precision import EXACT, Precision

CONTEXT = 4096
STEP_TOKENS = 8192
PAGE_SIZE = 16


@dataclass(frozen=True)
class Question:
    """The arguments of ``explain``, named like the options of the command line."""

    model: str
    gpu: str | None = None
    """A known card; ``None``: this machine's."""
    precision: Precision = EXACT
    preference: Preference = field(default_factory=Preference)
    context: int | None = None
    """``None``: ``CONTEXT``, or the model's own limit if that is less."""
    batch: int = 1
    utilization: float = 0.9
    reserve: int | None = None
    """Bytes to leave to the system on a GPU with unified memory."""
    speculative: str | None = None
    """``ngram``, ``eagle3``, ``mtp``, a head's folder or hub id, or ``--speculative-config``'s JSON."""
    offline: bool = False
    tensor_parallel_size: int = 1
    """Ranks that share the model, each on its own card. The report is on the first rank, which holds most."""
    gpu_spec: str | None = None
    """A card that is not known, in place of ``gpu``: ``sms=84,gbs=960,gib=16,capability=12.0``."""


@dataclass(frozen=True)
class JoinedPoint:
    """A point of one rank together with its sums over all ranks, which wait for the link."""

    point: Point
    wait: Wait
    """The time of one sum."""
    tok_s: float
    low: float
    high: float
    """Covers the published times of a sum, and the rank's own interval if it has one."""

    def to_json(self) -> dict[str, Any]:
        own = self.point.to_json()
        case = {name: own[name] for name in ("batch", "context", "tokens") if name in own}
        figures = {"sum_us": self.wait.us, "tok_s": self.tok_s, "low": self.low, "high": self.high}
        return case | {name: round(value, 1) for name, value in figures.items()}


def with_sums(point: Point, link: CardLink, world: int, sums: int, row_bytes: int, step_tokens: int) -> JoinedPoint:
    """``sums`` per step, each of ``row_bytes`` for every token. A prompt runs in steps of ``step_tokens``."""
    tokens = point.context if point.kind is Phase.PREFILL else point.batch
    steps, rest = divmod(tokens, step_tokens)
    waits = [link.wait(step_tokens * row_bytes, world)] * steps + [link.wait(rest * row_bytes, world)] * bool(rest)
    fast_us, slow_us = sums * sum(wait.low for wait in waits), sums * sum(wait.high for wait in waits)

    def rate(own: float | None, sums_us: float) -> float:
        own_us = point.us if own is None else tokens / own * 1e6
        return tokens / (own_us + sums_us) * 1e6

    middle = rate(None, (fast_us + slow_us) / 2)
    return JoinedPoint(point, waits[0], middle, rate(point.low, slow_us), rate(point.high, fast_us))


@dataclass(frozen=True)
class UnifiedRoom:
    """What fits next to the system on a card with unified memory."""

    system: System
    usable: int
    max_context: int
    """For one sequence; 0 if the model does not fit."""
    max_sequences: int

    def to_json(self) -> dict[str, Any]:
        figures = {"usable": self.usable, "max_context": self.max_context, "max_sequences": self.max_sequences}
        return {**asdict(self.system), "page_cache": PAGE_CACHE, **figures}


def shared_memory(memory: Memory) -> Iterator[UnifiedRoom]:
    """One for each way to run the machine; none if the free memory of this machine was measured."""
    if memory.available is not None:
        return
    work = memory.workload
    for system in systems(memory.gpu):
        free = memory.gpu.memory_bytes - system.takes - PAGE_CACHE
        usable, _ = usable_memory(memory.gpu, work.utilization, free, work.reserve)
        left = replace(memory, usable=usable, available=free)
        yield UnifiedRoom(system, usable, left.max_context, left.max_sequences)


@dataclass(frozen=True)
class Report:
    """The answer."""

    question: Question
    setup: Setup
    outline: Outline
    plan: Plan
    memory: Memory
    parts: tuple[StepPart[Estimate], ...]
    """The layer kinds of a decoding step at the batch and context of the question."""
    points: tuple[Point, ...]
    """Speeds at several batch sizes, contexts and prompts, including those of the question; none if the model does not
    fit."""
    published: tuple[Published, ...]
    """Published figures of other engines on this kind of card."""
    refusal: str | None
    """Why the model does not fit and what would help; ``None`` if it fits."""
    offers: tuple[PrecisionOffer, ...] = ()
    """What each precision would give and cost; none for several ranks."""
    chosen_because: str | None = None
    """Why ``--precision auto`` took this precision."""
    advice: str | None = None
    """What would make the model fit, if it does not."""
    drafts: DraftsReport | None = None
    """Whether drafts are worth it, with ``--speculative``."""

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.question.model,
            "gpu": self.setup.gpu.name,
            "precision": str(self.setup.precision),
            "fits": self.refusal is None,
            "refusal": self.refusal,
            "precisions": [offer.to_json() for offer in self.offers],
            **({} if self.chosen_because is None else {"auto": self.chosen_because}),
            "decisions": self.plan.to_json(),
            "memory": {
                "bytes": self.memory.by_kind(),
                "max_context": self.memory.max_context,
                "max_sequences": self.memory.max_sequences,
                "beside_system": [entry.to_json() for entry in shared_memory(self.memory)],
            },
            "predicted": self._predicted(),
            **({} if self.drafts is None else {"speculative": self.drafts.to_json()}),
        } | self._ranks()

    def _ranks(self) -> dict[str, Any]:
        """The sums of a model on several ranks; the rest of the report is for one rank without them."""
        if self.question.tensor_parallel_size == 1:
            return {}
        ranks = {"ranks": self.question.tensor_parallel_size, "sums_a_step": self.sums_a_step}
        link = {} if self.link is None else {"link": self.link.what, "source": self.link.source}
        joined = {"with_sums": [point.to_json() for point in self.joined_points]}
        return {"tensor_parallel": {**ranks, **link, **joined}}

    @property
    def link(self) -> CardLink | None:
        """The link between such cards; ``None`` for one rank, and on a CPU."""
        return None if self.question.tensor_parallel_size == 1 else link_between(self.setup.gpu)

    @property
    def joined_points(self) -> list[JoinedPoint]:
        """The speeds of all ranks together."""
        link = self.link
        row_bytes = self.outline.hidden * self.setup.activation_size
        how = (self.question.tensor_parallel_size, self.sums_a_step, row_bytes, STEP_TOKENS)
        return [] if link is None else [with_sums(point, link, *how) for point in self.points]

    @property
    def sums_a_step(self) -> int:
        """Each layer has one sum after attention and one after the experts."""
        return 2 * sum(layers.count for layers in self.outline.cached)

    def _predicted(self) -> dict[str, Any]:
        read = reach(self.setup.gpu)
        return {
            "decode_tok_s": None if self.asked is None else round(self.asked.tok_s, 1),
            "decode_ceiling_tok_s": None if self.asked is None else round(self.asked.ceiling, 1),
            "prefill_tok_s": None if self.prompt is None else round(self.prompt.tok_s, 1),
            "interval": 0.9,
            "decode": [point.to_json() for point in self.points if point.kind is Phase.DECODE],
            "prefill": [point.to_json() for point in self.points if point.kind is Phase.PREFILL],
            "bandwidth": {"sheet_gbs": self.setup.gpu.bandwidth_gbs, **asdict(read)},
            "published": [row.to_json() for row in self.published],
        }

    @property
    def asked(self) -> Point | None:
        """Decoding at the batch and context of the question; ``None`` if that does not fit."""
        return self._point(Phase.DECODE, self.question.batch)

    @property
    def prompt(self) -> Point | None:
        """A prompt as long as the context."""
        return self._point(Phase.PREFILL, 1)

    def _point(self, kind: Phase, batch: int) -> Point | None:
        wanted = (kind, batch, self.memory.context)
        return next((point for point in self.points if (point.kind, point.batch, point.context) == wanted), None)


def find_card(question: Question) -> Gpu:
    """The card that the question is about."""
    if question.gpu_spec is not None:
        return hardware.from_spec(question.gpu_spec)
    return hardware.detect() if question.gpu is None else hardware.known(question.gpu)


def explain(question: Question) -> Report:
    """The report on one model on one GPU."""
    shard = Shard(0, question.tensor_parallel_size)
    config = read_model(question.model, question.offline).sharded(shard)
    gpu = find_card(question)
    is_here = question.gpu is None and question.gpu_spec is None
    available = hardware.available_memory(gpu) if is_here else None
    activations = Activations.FLOAT32 if gpu.is_cpu else Activations.BF16
    context = min(CONTEXT, config.max_context) if question.context is None else question.context
    if question.batch < 1:
        raise BadSetting(f"--batch {question.batch} is less than 1.")
    workload = Workload(context, question.batch, STEP_TOKENS, PAGE_SIZE, question.utilization, question.reserve)
    workload.check(question.model, config.max_context)
    setup = Setup(gpu, activations, question.preference, question.precision)
    shape = outline(shard_name(question.model, shard), config, activations, PAGE_SIZE, context)
    setup, chosen_because = settle_precision(shape, setup, workload, available)
    head, drafter = None, None
    if question.speculative is not None:
        drafter = read_draft_source(question.speculative)
        shape.check_drafts(drafter.counted_at)
        opened = find_head(drafter, question.model, config, offline=question.offline)
        head = None if opened is None else prepare_head(opened, setup, PAGE_SIZE, drafter.formats)
        workload = replace(workload, draft_tokens=drafter.counted_at, head=None if head is None else head.need)
    plan, memory = plan_and_size(shape, setup, workload, available)
    help_to_fit = None if memory.fits else advice(shape, setup, memory)
    if help_to_fit is not None and question.batch > 1:
        served = memory_for(shape, plan, setup, replace(workload, promised=LEAST_CONTEXT), available)
        if served.fits:
            help_to_fit += "; serve starts with the same options, and lets requests wait while its cache is full"
    why = None if help_to_fit is None else refusal(memory, help_to_fit)
    parts = tuple(StepTimes(shape, plan, setup, estimated).decode(question.batch, context))
    batches = sorted({*BATCHES, question.batch})
    contexts = sorted({min(SHORT_CONTEXT, context), context})

    def fits(sequences: int, tokens: int) -> bool:
        return memory.fits and memory.fixed + memory.kv.bytes(tokens, sequences) <= memory.usable

    points = make_points(shape, plan, setup, batches, contexts, STEP_TOKENS, fits)
    others = published(preset_name(question.model), gpu) if shard.is_whole else ()
    offers = precision_offers(shape, setup, workload, available, context) if shard.is_whole else ()
    drafts = None
    if drafter is not None:
        drafts = explain_drafts(drafter, shape, plan, setup, context, head, fits, shard.world)
    return Report(
        question,
        setup,
        shape,
        plan,
        memory,
        parts,
        tuple(points),
        others,
        why,
        offers,
        chosen_because,
        help_to_fit,
        drafts,
    )


def read_model(model: str, offline: bool = False, overrides: Mapping[str, object] | None = None) -> ModelConfig:
    """The config of a preset or of its published checkpoint, which needs no network, of a folder or of a hub id."""
    return find_config(model, LoadFormat.DUMMY, overrides or {}, offline)
