"""A rank other than 0: prepares and loads its part of the model, then runs the steps that rank 0 sends."""

from __future__ import annotations

import socket
from pathlib import Path

import torch
from msgspec.structs import replace

from microscale.engine.config import EngineConfig
from microscale.engine.loading.drafting import load_head
from microscale.engine.loading.load import load
from microscale.engine.loading.prepare import prepare, uses_nccl
from microscale.engine.loading.warming import kernels_ready
from microscale.engine.ranks import messages as wire
from microscale.engine.ranks.steps import MirroredPages, StepReader, gather_logits
from microscale.engine.runner import ModelRunner
from microscale.engine.speculation.drafter import DraftTarget, LaunchedStep
from microscale.engine.speculation.head import HeadDrafter
from microscale.engine.work import Work
from microscale.errors import BadMessage
from microscale.models.config import LayerKind
from microscale.models.draft_heads.drafting import DraftHead
from microscale.models.families import AnyModel
from microscale.parallel.group import LOOPBACK, Group, file_store, network_store
from microscale.parallel.sharding import Shard


def follow(link: wire.RankLink, join: wire.Join, model: str | None = None) -> None:
    """Run until rank 0 says stop. ``model``: this machine's name for the model, where it differs from rank 0's."""
    options = options_of(join)
    prepared = prepare(options if model is None else replace(options, model=model))
    pages = {kind.value: count for kind, count in prepared.memory.pages().items()}
    link.send(wire.RankPrepared(pages, prepared.fingerprint(), prepared.memory.by_kind()))
    message = link.next()
    if isinstance(message, wire.Stop):
        return
    if not isinstance(message, wire.RankLoad):
        raise BadMessage(f"Rank 0 sent {type(message).__name__} before Load.")
    group = _connect(link, join, options, prepared.device)
    with kernels_ready(prepared, None if join.config.kernel_cache is None else Path(join.config.kernel_cache)):
        loaded = load(prepared, ranks=group)
        head = None if prepared.head is None else load_head(prepared.head, loaded)
    link.send(wire.Loaded())
    Follower(link, group, loaded, head).run()


def options_of(join: wire.Join) -> EngineConfig:
    shard = Shard(join.rank, join.world)
    return replace(join.config, shard=shard, device=join.device, sharing=join.sharing)


def _connect(link: wire.RankLink, join: wire.Join, options: EngineConfig, device: torch.device) -> Group:
    own = leader = join.address or LOOPBACK
    if link.sock.family != socket.AF_UNIX:
        leader, own = link.sock.getpeername()[0], link.sock.getsockname()[0]
    store = file_store(join.store, join.world) if join.store else network_store(leader, join.port, join.world)
    return Group(options.shard, store, device, nccl=uses_nccl(options, device), address=own)


class Follower:
    """A loaded model, and the runner that rank 0 asked for last."""

    def __init__(self, link: wire.RankLink, group: Group, model: AnyModel, head: DraftHead | None) -> None:
        self._link = link
        self._group = group
        self._model = model
        self._head = head
        self._runner: ModelRunner | None = None
        self._drafter: HeadDrafter | None = None
        self._reader = StepReader({})
        self._schedule: list[Work] = []
        """The schedule of the last step."""

    def run(self) -> None:
        while True:
            match self._link.next():
                case wire.Assemble() as message:
                    self._assemble(message)
                    self._link.send(wire.Assembled())
                case wire.RankStep() as message:
                    self._step(message)
                case wire.Draft() as message:
                    self._draft(message)
                case wire.Prepare(drafts=True):
                    self._get_drafter().prepare()
                case wire.Prepare() as message:
                    self._get_runner().prepare(stand_ins=message.stand_ins)
                case wire.Idle():
                    self._get_runner().idle()
                case wire.Stop():
                    return
                case other:
                    raise BadMessage(f"Rank 0 sent {type(other).__name__} to a rank that has loaded.")

    def _assemble(self, message: wire.Assemble) -> None:
        limits = message.limits
        pools = {LayerKind(kind): MirroredPages(count) for kind, count in message.pages.items()}
        self._runner = self._drafter = None  # free their pages before allocating new ones
        self._schedule = []
        if message.head:
            if self._head is None:
                raise BadMessage("Rank 0 has a draft head, and this rank has none.")
            self._drafter = HeadDrafter(self._head, message.draft_tokens)
        self._runner = ModelRunner(
            self._model,
            pools,
            limits,
            enforce_eager=message.enforce_eager,
            fill_up_prompts=message.fill_up_prompts,
            draft_tokens=message.draft_tokens,
            taps=() if self._drafter is None else self._drafter.taps,
        )
        if self._drafter is not None:
            self._drafter.attach(DraftTarget(pools, limits, self._runner.taps, message.enforce_eager))
        self._reader = StepReader(pools)

    def _get_runner(self) -> ModelRunner:
        if self._runner is None:
            raise BadMessage("Rank 0 sent a step before Assemble.")
        return self._runner

    def _get_drafter(self) -> HeadDrafter:
        if self._drafter is None:
            raise BadMessage("Rank 0 drafts with a head that this rank does not have.")
        return self._drafter

    def _receive(self, count: int) -> torch.Tensor:
        return self._group.broadcast(torch.empty(count, dtype=torch.int32, device=self._model.device))

    def _step(self, message: wire.RankStep) -> None:
        runner = self._get_runner()
        self._schedule = self._reader.read(message)
        tokens = self._receive(sum(work.ahead for work in self._schedule)) if message.ahead else None
        logits = runner.forward(self._schedule, tokens)
        gather_logits(logits, runner.vocab_size, self._group, greedy=message.greedy)

    def _draft(self, message: wire.Draft) -> None:
        """Only rank 0 reads the drafts. Here each leads to the next one."""
        drafter, schedule = self._get_drafter(), self._schedule
        if len(message.first_rows) != len(schedule):
            raise BadMessage(f"Rank 0 drafts for {len(message.first_rows)} sequences of {len(schedule)}.")
        tokens = self._receive(message.num_tokens) if message.num_tokens else None
        first_rows = {
            work.request.request_id: row
            for work, row in zip(schedule, message.first_rows, strict=True)
            if row is not None
        }
        drafter.take_in(LaunchedStep(schedule, tokens, first_rows), message.most)
