"""A rank other than 0: prepares and loads its part of the model, then runs the steps that rank 0 says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec.structs import replace

from microscale.engine.config import EngineConfig
from microscale.engine.limits import Limits
from microscale.engine.loading.drafting import load_head
from microscale.engine.loading.joining import joined_as
from microscale.engine.loading.load import load
from microscale.engine.loading.prepare import Prepared, prepare
from microscale.engine.loading.warming import kernels_ready
from microscale.engine.ranks import messages as wire
from microscale.engine.ranks.gathering import gather
from microscale.engine.ranks.link import Link
from microscale.engine.ranks.mirror import HeldPages, Mirror
from microscale.engine.ranks.progress import Progress
from microscale.engine.ranks.summing import agree_on_sums
from microscale.engine.runner import ModelRunner
from microscale.engine.speculation.drafter import Launched, Target
from microscale.engine.speculation.head import HeadDrafter
from microscale.engine.work import Work
from microscale.errors import BadMessage
from microscale.models.config import LayerKind
from microscale.models.draft_heads.drafting import DraftHead
from microscale.models.families import AnyModel
from microscale.parallel.group import Group, Meeting, meet_at, meet_over
from microscale.parallel.sharding import Shard
from microscale.parallel.transport import Transport


def options_of(join: wire.Join) -> EngineConfig:
    shard = Shard(join.rank, join.world)
    return replace(join.config, shard=shard, device=join.device, sharing=join.sharing)


def follow(link: Link, join: wire.Join, progress: Progress, model: str | None = None) -> None:
    """All of a rank's life. Returns when rank 0 says so. ``model``: what another machine calls it."""
    options = options_of(join)
    prepared = prepare(options if model is None else replace(options, model=model))
    pages = {kind.value: count for kind, count in prepared.memory.pages().items()}
    link.send(wire.Prepared(pages, prepared.fingerprint(), prepared.memory.by_kind()))
    message = decode(link)
    if isinstance(message, wire.Stop):
        return
    if not isinstance(message, wire.Load):
        raise BadMessage(f"Rank 0 says {type(message).__name__} before Load.")
    group = Group(prepared.options.shard, _meeting(link, join), prepared.device)
    progress.group = group
    joined = joined_as(prepared.options, Transport(join.transport), prepared.device)
    ranks, _ = agree_on_sums(group, joined, prepared.device)
    with kernels_ready(prepared, None if join.config.kernel_cache is None else Path(join.config.kernel_cache)):
        loaded = load(prepared, ranks=ranks)
        head = None if prepared.head is None else load_head(prepared.head, loaded)
    link.send(wire.Loaded())
    Follower(link, Loaded(loaded, head), group, prepared, progress).run()


def _meeting(link: Link, join: wire.Join) -> Meeting:
    transport = Transport(join.transport)
    if join.store:
        return meet_at(join.store, join.world, transport)
    leader, own = link.sock.getpeername()[0], link.sock.getsockname()[0]
    return meet_over(leader, join.port, Shard(join.rank, join.world), transport, own)


def decode(link: Link) -> wire.ToFollower:
    return wire.decode_for_follower(link.next())


@dataclass(frozen=True)
class Loaded:
    """What this rank holds."""

    model: AnyModel
    head: DraftHead | None


class Follower:
    """A loaded model, and the runner that rank 0 last asked for."""

    def __init__(self, link: Link, loaded: Loaded, group: Group, prepared: Prepared, progress: Progress) -> None:
        self._link = link
        self._loaded = loaded
        self._group = group
        self._device = prepared.device
        self._progress = progress
        self._runner: ModelRunner | None = None
        self._mirror: Mirror | None = None
        self._drafter: HeadDrafter | None = None
        self._last: list[Work] = []
        """The schedule of the step before."""

    def run(self) -> None:
        while True:
            match decode(self._link):
                case wire.Assemble() as message:
                    self._assemble(message)
                    self._link.send(wire.Assembled())
                case wire.Step(number) as message:
                    self._begin(number)
                    self._step(message)
                    self._done(number)
                case wire.Draft(number) as message:
                    self._begin(number)
                    self._draft(message)
                    self._done(number)
                case wire.Prepare(number, drafts, stand_ins):
                    self._begin(number)
                    if drafts:
                        self._drafting().prepare()
                    else:
                        self._running().prepare(stand_ins=stand_ins)
                    self._done(number)
                case wire.Idle(number):
                    self._begin(number)
                    self._running().idle()
                    self._done(number)
                case wire.Stop():
                    return
                case other:
                    raise BadMessage(f"Rank 0 says {type(other).__name__} to a rank that is loaded.")

    def _assemble(self, message: wire.Assemble) -> None:
        limits = Limits(
            message.page_size,
            message.window,
            message.max_num_seqs,
            message.max_num_batched_tokens,
            message.max_model_len,
        )
        pools = {LayerKind(kind): HeldPages(count) for kind, count in message.pages.items()}
        self._runner = self._drafter = None  # their pages go before the next ones come
        self._last = []
        head = self._loaded.head
        if message.head:
            if head is None:
                raise BadMessage("Rank 0 has a draft head, and this rank was told of none.")
            self._drafter = HeadDrafter(head, message.draft_tokens)
        self._runner = ModelRunner(
            self._loaded.model,
            pools,
            limits,
            enforce_eager=message.enforce_eager,
            fill_up_prompts=message.fill_up_prompts,
            draft_tokens=message.draft_tokens,
            taps=() if self._drafter is None else self._drafter.taps,
        )
        if self._drafter is not None:
            self._drafter.attach(Target(pools, limits, self._runner.taps, message.enforce_eager))
        self._mirror = Mirror(pools)

    def _begin(self, number: int) -> None:
        if number != self._progress.number + 1:
            raise BadMessage(f"Rank 0 says step {number} after step {self._progress.number}.")
        self._progress.number = number

    def _done(self, number: int) -> None:
        self._link.send(wire.Done(number, self._group.calls))

    def _running(self) -> ModelRunner:
        if self._runner is None:
            raise BadMessage("Rank 0 says a step before Assemble.")
        return self._runner

    def _step(self, message: wire.Step) -> None:
        runner = self._running()
        assert self._mirror is not None
        schedule = self._last = self._mirror.schedule(message)
        tokens = None
        if message.ahead:
            tokens = self._group.broadcast(torch.empty(len(schedule), dtype=torch.int32, device=self._device))
        logits = runner.forward(schedule, tokens)
        gather(logits, runner.vocab_size, self._group, likeliest=message.likeliest)

    def _drafting(self) -> HeadDrafter:
        if self._drafter is None:
            raise BadMessage("Rank 0 drafts with a head that this engine has not.")
        return self._drafter

    def _draft(self, message: wire.Draft) -> None:
        """Rank 0 reads the guesses; here they only lead to the next ones."""
        drafter, schedule = self._drafting(), self._last
        if len(message.drew) != len(schedule):
            raise BadMessage(f"Rank 0 drafts for {len(message.drew)} sequences, and the last step had {len(schedule)}.")
        tokens = None
        if message.drawn:
            tokens = self._group.broadcast(torch.empty(message.drawn, dtype=torch.int32, device=self._device))
        rows = {
            work.request.request_id: first
            for work, first in zip(schedule, message.drew, strict=True)
            if first is not None
        }
        drafter.take_in(Launched(schedule, tokens, rows), message.most)
