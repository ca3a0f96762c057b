"""From what was prepared to an engine: the model, as many KV pages as fit next to it, scheduler and sampler.

Needs nothing of the server's: benchmarks build their engine here.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from microscale.engine.engine import Engine, Runner
from microscale.engine.grammar import Grammars, Vocabulary
from microscale.engine.limits import LEAST_SEQUENCES, Limits, drafted_sequences
from microscale.engine.loading.drafting import draft_costs, load_head
from microscale.engine.loading.load import load
from microscale.engine.loading.memory import Memory
from microscale.engine.loading.precisions import PrecisionOffer, precision_offers, precisions_line
from microscale.engine.loading.prepare import Prepared
from microscale.engine.pages import PagePool
from microscale.engine.predictions import BATCHES, Point, make_points, step_limit_s
from microscale.engine.runner import Model, ModelRunner
from microscale.engine.sampling_state import Sampler
from microscale.engine.scheduler import Scheduler
from microscale.engine.speculation.drafter import DraftTarget
from microscale.engine.speculation.length import DraftCosts
from microscale.engine.speculation.speculation import Speculation, describe_drafts
from microscale.models.config import PAGED, LayerKind
from microscale.models.families import AnyModel, ModelConfig
from microscale.planning.decision import Decision, Plan
from microscale.planning.precision import Precision

if TYPE_CHECKING:
    from microscale.engine.ranks.leader import RankTeam

log = logging.getLogger(__name__)
PREDICTED_CONTEXT = 4096


@dataclass(frozen=True)
class Queueing:
    """Options of the scheduler that are not part of the workload."""

    max_queue: int = 1024
    prefix_caching: bool = True


@dataclass(frozen=True)
class Built:
    """An engine and what its owner must know of the model."""

    engine: Engine
    config: ModelConfig
    max_model_len: int
    plan: str
    """What runs and why, and where memory goes: see ``describe``."""
    step_limit_s: float
    """How long a step may take before the engine counts as hung."""


@dataclass(frozen=True)
class Precisions:
    """The precision that runs and what each would give."""

    chosen: Precision
    offers: tuple[PrecisionOffer, ...] = ()
    line: str = ""


class Laps:
    """How long the parts of a load took, for one line of the log: seconds from one call to the next."""

    def __init__(self) -> None:
        self._parts: dict[str, float] = {}
        self._last = time.perf_counter()

    def __call__(self, part: str) -> None:
        """This part is over, and the next begins."""
        now = time.perf_counter()
        self._parts[part] = now - self._last
        self._last = now

    def __str__(self) -> str:
        return ", ".join(f"{part} {seconds:.2f} s" for part, seconds in self._parts.items())


def build_engine(
    prepared: Prepared,
    queueing: Queueing,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    enforce_eager: bool = False,
    vocabulary: Vocabulary | None = None,
    laps: Laps | None = None,
) -> Built:
    """Load a model and make an engine of it. ``on_progress`` gets the bytes that are loaded and their total, ``laps``
    how long the parts took."""
    laps = Laps() if laps is None else laps
    config, workload, pages = prepared.config, prepared.memory.workload, prepared.pages()
    # Where the user named no context, it is the model's, as far as the pages reach.
    max_model_len = workload.context or min(config.max_context, pages[LayerKind.FULL] * workload.page_size)
    limits = Limits(
        page_size=workload.page_size,
        window=config.sliding_window,
        max_num_seqs=workload.sequences,
        max_num_batched_tokens=workload.step_tokens,
        max_model_len=max_model_len,
        max_queue=queueing.max_queue,
        prefix_caching=queueing.prefix_caching,
    )
    with ThreadPoolExecutor(1, "predictions") as executor:  # the disk leaves them time
        predicted = executor.submit(_points, prepared, max_model_len)
        offered = executor.submit(_offers, prepared)
        model = load(prepared, on_progress)
    costs = None if prepared.options.speculative is None else _draft_costs(prepared)
    speculation = load_speculation(prepared, model, costs)
    laps("weights")
    engine = assemble(
        model,
        limits,
        pages,
        enforce_eager=enforce_eager,
        vocabulary=vocabulary,
        speculation=speculation,
        team=prepared.team,
        # A CPU computes a step before the call returns, and the tokens of the last one would wait for that.
        run_ahead=speculation is not None or not prepared.setup.gpu.is_cpu,
    )
    laps("KV cache and inputs")
    ranks = [] if prepared.team is None else prepared.team.memory
    drafts = _drafts(prepared, costs)
    offers = offered.result()
    line = precisions_line(prepared.outline.name, prepared.setup.gpu.name, offers) if offers else ""
    if line:
        log.info(line)
    precisions = Precisions(prepared.setup.precision, offers, line)
    plan = describe(prepared.plan, precisions, prepared.memory, pages, predicted.result(), drafts, ranks)
    shape = prepared.outline, prepared.plan, prepared.setup
    limit_s = step_limit_s(*shape, limits.max_num_seqs, max_model_len, limits.max_num_batched_tokens)
    laps("description")
    return Built(engine, config, max_model_len, plan, limit_s)


def load_speculation(prepared: Prepared, model: AnyModel, costs: DraftCosts | None = None) -> Speculation | None:
    """The drafter of the loaded model, if it has one. ``costs``: what steps with drafts cost; without it, drafts always
    have the length of the option."""
    drafts = prepared.options.speculative
    if drafts is None:
        return None
    head = None if prepared.head is None else load_head(prepared.head, model)
    return Speculation.of(drafts, costs, head)


def _draft_costs(prepared: Prepared) -> DraftCosts:
    # Other ranks get what was accepted from the host.
    on_device = prepared.head is not None and prepared.team is None
    return draft_costs(prepared.outline, prepared.plan, prepared.setup, prepared.head, on_device=on_device)


def _drafts(prepared: Prepared, costs: DraftCosts | None) -> dict[str, Any] | None:
    """The drafter, as ``describe`` reports it."""
    if prepared.options.speculative is None:
        return None
    head = None if prepared.head is None else prepared.head.plan
    costs = None if prepared.setup.gpu.is_cpu else costs
    sequences = drafted_sequences(prepared.memory.workload.sequences, states=prepared.outline.state_bytes > 0)
    return describe_drafts(prepared.options.speculative, costs, sequences, head)


def _points(prepared: Prepared, max_model_len: int) -> list[Point]:
    """What ``explain`` would say of this engine: 60 ms for one that has a GPU, and nothing on a CPU."""
    # What the ranks' sums cost is not predicted.
    if prepared.setup.gpu.is_cpu or prepared.team is not None:
        return []
    memory, context = prepared.memory, min(PREDICTED_CONTEXT, max_model_len)

    def fits(sequences: int, tokens: int) -> bool:
        return memory.fixed + memory.kv.bytes(tokens, sequences) <= memory.usable

    step_tokens = memory.workload.step_tokens
    return make_points(prepared.outline, prepared.plan, prepared.setup, BATCHES, (context,), step_tokens, fits)


def _offers(prepared: Prepared) -> tuple[PrecisionOffer, ...]:
    """What each precision would give: 0.1 s for an engine that has a GPU."""
    if prepared.setup.gpu.is_cpu or prepared.team is not None:
        return ()
    workload = prepared.memory.workload
    if prepared.options.max_num_seqs is None:  # a larger precision would serve fewer sequences
        workload = replace(workload, sequences=LEAST_SEQUENCES)
    return precision_offers(prepared.outline, prepared.setup, workload)


def assemble(
    model: Model,
    limits: Limits,
    pages: Mapping[LayerKind, int],
    *,
    enforce_eager: bool = False,
    fill_up_prompts: bool | None = None,
    vocabulary: Vocabulary | None = None,
    speculation: Speculation | None = None,
    make_sampler: Callable[..., Sampler] = Sampler,
    team: RankTeam | None = None,
    run_ahead: bool = True,
) -> Engine:
    """Scheduler, runner and sampler around a loaded model, with this many KV pages for each kind of layer. Without a
    number of slots for states there are enough.

    ``fill_up_prompts``: see ``ModelRunner``. ``make_sampler``: for benchmarks, which accept drafts by chance. ``team``:
    the ranks that run it together. ``run_ahead``: see ``Engine``."""
    config = model.config
    draft_tokens = 0 if speculation is None else speculation.most
    slots = 2 * limits.max_num_seqs + drafted_sequences(limits.max_num_seqs, states=True) * draft_tokens
    states = {LayerKind.LINEAR: pages.get(LayerKind.LINEAR, slots)} if LayerKind.LINEAR in config.layer_kinds else {}
    pages = {kind: pages[kind] for kind in PAGED} | states
    pools = {kind: PagePool(count) for kind, count in pages.items()}
    if speculation is not None:
        limits = replace(limits, key_lookahead=speculation.key_lookahead)
    grammars = None if vocabulary is None else Grammars(vocabulary, config.vocab_size)
    sampler = make_sampler(model.sampling, config.vocab_size, model.device, config.eos_token_ids, grammars)
    if team is not None:
        enforce_eager |= model.ops.ranks.uncapturable is not None
        head = speculation is not None and speculation.has_head
        team.assemble(
            limits,
            pages,
            enforce_eager=enforce_eager,
            fill_up_prompts=fill_up_prompts,
            draft_tokens=draft_tokens,
            head=head,
        )
    own = ModelRunner(
        model,
        pools,
        limits,
        enforce_eager=enforce_eager,
        fill_up_prompts=fill_up_prompts,
        draft_tokens=draft_tokens,
        taps=() if speculation is None else speculation.taps,
    )
    runner: Runner = own if team is None else team.lead(own, pools)
    if speculation is not None:
        speculation.attach(DraftTarget(pools, limits, own.taps, enforce_eager, team, own.first_runs))
    scheduler = Scheduler(pools, limits)
    return Engine(
        runner,
        scheduler,
        sampler,
        config.vocab_size,
        config.eos_token_ids,
        run_ahead=run_ahead,
        speculation=speculation,
    )


# ---- what an engine reports ------------------------------------------------------------------------------------------


def describe(
    plan: Plan, precisions: Precisions, memory: Memory, pages: Mapping[LayerKind, int], points: Sequence[Point] = (),
    drafts: Mapping[str, Any] | None = None, ranks: Sequence[Mapping[str, int]] = (),
) -> str:  # fmt: skip
    """A loaded engine as JSON, which travels in ``Ready.plan``: the plan with its reasons, and where memory goes.

    ``points``: predicted speeds. ``drafts``: the drafter, if there is one. ``ranks``: bytes that each rank needs, by
    purpose, where several share the model.
    """
    return json.dumps(
        {
            **({"ranks": [dict(memory) for memory in ranks]} if ranks else {}),
            "table": plan.table(),
            "gpu": memory.gpu.name,
            "precision": str(precisions.chosen),
            "precisions": [offer.to_json() for offer in precisions.offers],
            "precisions_line": precisions.line,
            "decisions": [_decision(decision) for decision in plan.decisions.values()],
            "memory": _memory(memory, pages),
            "predicted": [point.to_json() | {"kind": point.kind.value} for point in points],
            **({} if drafts is None else {"speculative": drafts}),
        }
    )


def _decision(decision: Decision) -> dict[str, Any]:
    return decision.to_json() | {"format": getattr(decision.spec, "weight_format", "")}


def _memory(memory: Memory, pages: Mapping[LayerKind, int]) -> dict[str, Any]:
    """Bytes by what they hold; the KV cache as it was made, which is more than the least that must fit."""
    kv = memory.kv
    full = pages[LayerKind.FULL] * kv.page_size * kv.full_per_token
    sliding = pages[LayerKind.SLIDING] * kv.page_size * kv.sliding_per_position
    return {
        "weights": dict(memory.weights),
        "kv_cache": {"full": full, "sliding": sliding, "states": (pages.get(LayerKind.LINEAR, 0) + 1) * kv.states},
        "activations": memory.activations,
        "graphs": memory.graphs,
        "runtime": memory.runtime,
        "usable": memory.usable,
        "usable_because": memory.usable_because,
        "full_positions": pages[LayerKind.FULL] * kv.page_size,
    }
