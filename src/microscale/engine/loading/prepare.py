"""Everything that is settled before a model is loaded, each thing once.

options ──► device, open weights ──► setup ──► outline ──► plan ──► memory       prepare: reads headers, refuses
Prepared ──► model (``load``) ──► engine (``build``)                             load: reads the weights
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from microscale import hardware
from microscale.engine.config import EngineConfig
from microscale.engine.loading.drafting import PreparedHead, open_head, prepare_head
from microscale.engine.loading.fingerprint import fingerprint
from microscale.engine.loading.fit import check_fits, plan_and_reckon
from microscale.engine.loading.memory import Memory
from microscale.engine.loading.options import (
    check_options,
    choose_activations,
    choose_device,
    gpu_of,
    precision_of,
    preference_of,
    workload_of,
)
from microscale.engine.loading.team import Team
from microscale.engine.predictions import SHORT_CONTEXT, Kind, predict
from microscale.models import hub
from microscale.models.config import LayerKind, LoadFormat
from microscale.models.families import ModelConfig, ModelWeights, find_config, open_weights
from microscale.models.outline import Outline, outline, shard_name
from microscale.planning.decision import Plan
from microscale.planning.plan import Setup

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
RANKS = "microscale.engine.ranks.leader"


@dataclass(frozen=True)
class Prepared:
    """A model that can be loaded: it was found, checked, planned, and it fits."""

    options: EngineConfig
    device: torch.device
    weights: ModelWeights
    """Open and checked against their config; nothing is read of them yet."""
    setup: Setup
    """GPU, type of the activations, what the user prefers, precision."""
    outline: Outline
    """What the model uses."""
    plan: Plan
    """Which kernel runs each of that."""
    memory: Memory
    """What it takes, and how many pages and sequences fit beside it. Reckoned before the load: afterwards the weights
    would count twice, as needed and as no longer free."""
    head: PreparedHead | None = None
    """The draft head, if drafts come from one."""

    team: Team | None = None
    """The other ranks, where there are some and this is the first."""

    @property
    def config(self) -> ModelConfig:
        return self.weights.config

    @property
    def page_size(self) -> int:
        return self.memory.workload.page_size

    def pages(self) -> dict[LayerKind, int]:
        """How many KV pages each kind of layer gets; as many on every rank."""
        return self.memory.pages() if self.team is None else self.team.pages()

    def fingerprint(self) -> dict[str, str]:
        """What all ranks must have alike."""
        head, drafts = self.head, self.options.speculative
        if head is None or drafts is None:
            return fingerprint(self.weights, self.setup, self.options.seed)
        return fingerprint(self.weights, self.setup, self.options.seed, head.weights, drafts.head_formats)

    def close(self) -> None:
        """End the other ranks, if there are any."""
        if self.team is not None:
            self.team.close()


def prepare(
    options: EngineConfig, check: Callable[[ModelConfig], None] = lambda config: None, draft_tokens: int = 0
) -> Prepared:
    """Find, check and plan a model, or raise why it cannot run here.

    ``check`` is the caller's: it may refuse the model by its config, before anything is planned. ``draft_tokens``: of a
    sequence in one step, for a benchmark that makes drafts up; else ``options.speculative`` decides.
    """
    check_options(options)
    if options.tensor_parallel_size == 1 or not options.shard.is_whole:
        return _prepare(options, check, draft_tokens)
    # Not imported above: what ranks say to each other needs packages that one rank does without.
    return prepare_team(importlib.import_module(RANKS).RankTeam(options), check)


def prepare_team(team: Team, check: Callable[[ModelConfig], None] = lambda config: None) -> Prepared:
    """The same for rank 0 of a team, whose other ranks prepare meanwhile. It is closed if that fails."""
    try:
        prepared = replace(_prepare(team.options, check), team=team)
        team.agree(prepared.memory.pages(), prepared.fingerprint(), prepared.memory.by_kind())
    except BaseException:
        team.close()
        raise
    return prepared


def _prepare(options: EngineConfig, check: Callable[[ModelConfig], None], draft_tokens: int = 0) -> Prepared:
    device = choose_device(options.device)
    setup = Setup(
        gpu_of(device), choose_activations(options.dtype, device), preference_of(options), precision_of(options)
    )
    # Whatever can be refused is refused before weights are downloaded.
    config = find_config(options.model, options.load_format, options.hf_overrides, options.offline)
    config, drafts = config.sharded(options.shard), options.speculative
    workload = replace(workload_of(options), draft_tokens=draft_tokens)
    check(config)
    head = None
    if drafts is not None:
        workload = replace(workload, draft_tokens=drafts.num_speculative_tokens)
        if drafts.is_head:
            opened = open_head(drafts, options.model, config, offline=options.offline)
            head = prepare_head(opened, setup, workload.page_size, drafts.head_formats)
            workload = replace(workload, head=head.need)
    name = shard_name(options.model, options.shard)
    shape = outline(name, config, setup.activations, workload.page_size, config.max_context)
    available = hardware.available_memory(setup.gpu, device.index or 0)
    if options.sharing > 1:
        workload = replace(workload, utilization=workload.utilization / options.sharing)
        available //= options.sharing
    plan, memory = plan_and_reckon(shape, setup, workload, available)
    check_fits(shape, setup, memory)
    if options.load_format != LoadFormat.DUMMY and options.shard.is_first:
        _announce_download(options, shape, plan, setup, workload.step_tokens)
    weights = open_weights(
        options.model,
        load_format=options.load_format,
        overrides=options.hf_overrides,
        offline=options.offline,
        seed=options.seed,
        shard=options.shard,
    )
    return Prepared(options, device, weights, setup, shape, plan, memory, head)


def _announce_download(options: EngineConfig, shape: Outline, plan: Plan, setup: Setup, step_tokens: int) -> None:
    """Say what will be downloaded and how fast it will run, or refuse it if the disk is too small."""
    missing = hub.missing(options.model, offline=options.offline)
    if missing is None:
        return
    missing.check_disk(options.model)
    point = predict(shape, plan, setup, Kind.DECODE, 1, min(SHORT_CONTEXT, shape.max_context), step_tokens)
    log.info(
        "Downloading %s: %.1f GB in %d files to %s. Predicted on %s: %.3g tokens per second for one sequence.",
        options.model, missing.bytes / 1e9, missing.files, missing.cache, setup.gpu.name, point.tok_s,
    )  # fmt: skip
