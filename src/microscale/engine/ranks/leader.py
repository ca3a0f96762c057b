"""Rank 0: starts the other ranks, has them prepare, load and assemble, and sends them every step before it runs it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace

from microscale.engine.config import EngineConfig
from microscale.engine.graphs import GraphCounts
from microscale.engine.limits import Limits
from microscale.engine.loading.prepare import choose_device, uses_nccl
from microscale.engine.pages import PagePool
from microscale.engine.ranks import messages as wire
from microscale.engine.ranks.messages import LinkClosed, RankLink
from microscale.engine.ranks.processes import END_S, Peer, spawn
from microscale.engine.ranks.steps import StepWriter, gather_logits
from microscale.engine.ranks.watch import PATIENCE, Patience, Watch
from microscale.engine.runner import ModelRunner
from microscale.engine.speculation.drafter import LaunchedStep
from microscale.engine.work import Work
from microscale.errors import BadSetting, MicroscaleError, RankFailed
from microscale.models.config import LayerKind
from microscale.parallel.group import LOOPBACK, Group, file_store, network_store
from microscale.parallel.handshake import Nodes, accept, listen, read_secret
from microscale.parallel.sharding import Shard
from microscale.planning.ops import Logits, RankSums
from microscale.planning.threads import all_threads
from microscale.version import __version__

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Placement:
    """Where ranks run."""

    devices: tuple[str, ...]
    sharing: int
    """Ranks that share one device's memory."""
    threads: int | None


def place(options: EngineConfig, world: int) -> Placement:
    """A GPU for each rank, or one device for all where the user named it. ``world``: ranks of one machine; other
    machines are alike."""
    device = choose_device(options.device)
    if device.type == "cpu":
        # Ranks share the cores, and threads that wait for another rank would block it.
        threads = options.threads or max(1, all_threads() // world)
        return Placement(("cpu",) * world, world, threads)
    if ":" in options.device:
        # NCCL refuses two ranks on one GPU, so they use gloo. This is for tests: each rank has its share of the memory.
        return Placement((str(device),) * world, world, options.threads)
    count = torch.cuda.device_count()
    if count < world:
        raise BadSetting(
            f"--tensor-parallel-size {world} needs {world} GPUs and torch sees {count}; --device cuda:0 puts all ranks "
            f"on one, which is for tests, and --device cpu on the CPU."
        )
    return Placement(tuple(f"cuda:{rank}" for rank in range(world)), 1, options.threads)


class RankTeam:
    """All ranks of one model, seen by rank 0."""

    def __init__(
        self, options: EngineConfig, start: Callable[[int], Peer] = spawn, patience: Patience = PATIENCE
    ) -> None:
        """Start the processes, which import and prepare in the background."""
        world = options.tensor_parallel_size
        here = world if options.nodes is None else world // options.nodes.count
        placement = place(options, here)
        self.options = replace(
            options,
            shard=Shard(0, world),
            device=placement.devices[0],
            sharing=placement.sharing,
            threads=placement.threads,
        )
        self.memory: list[Mapping[str, int]] = []
        """Bytes that each rank needs, by purpose."""
        self._folder = Path(tempfile.mkdtemp(prefix="microscale-ranks-"))  # only this user may enter it
        self._store = self._folder / "store"
        self._server: socket.socket | None = None
        self._group: Group | None = None
        self._pages: dict[LayerKind, int] = {}
        peers = [start(rank) for rank in range(1, here)]
        if options.nodes is not None:
            try:
                peers += self._await_nodes(options.nodes, set(range(here, world)))
            except BaseException:
                self._end(peers)
                raise
        self._watch = Watch(peers, patience)
        self._watch.on_stuck = _end_process
        for peer in peers:
            self._send(peer, self._join_message(peer.rank, placement))

    def _await_nodes(self, nodes: Nodes, ranks: set[int]) -> list[Peer]:
        """Wait for the ranks of the other machines. Then open the port at which all ranks find each other."""
        secret = read_secret(Path(nodes.secret_file))
        log.info("Waiting for ranks %s at %s port %d.", sorted(ranks), nodes.address, nodes.port)
        with listen(nodes.address, nodes.port) as server:
            accepted = accept(server, ranks, secret)
        self._server = listen(nodes.address, 0)
        return [Peer(rank, RankLink(sock), where=sock.getpeername()[0]) for rank, sock in sorted(accepted.items())]

    def _join_message(self, rank: int, placement: Placement) -> wire.Join:
        # Only rank 0 needs the vocabulary, and nodes name a file of its machine.
        config = replace(self.options, nodes=None, vocabulary=(), control_tokens=(), split_pattern="")
        device = placement.devices[rank % len(placement.devices)]
        nodes, store, address, port = self.options.nodes, str(self._store), "", 0
        if nodes is not None and self._server is not None:
            store, address, port = "", nodes.address, self._server.getsockname()[1]
        who = __version__, rank, self.options.shard.world, config, device, placement.sharing
        return wire.Join(*who, store, address, port)

    @property
    def peers(self) -> list[Peer]:
        """The other ranks."""
        return self._watch.peers

    def on_stuck(self, report: Callable[[MicroscaleError], None]) -> None:
        """Call ``report`` with a fault that no step can raise: none runs, or it cannot return."""
        self._watch.on_stuck = report

    def agree(self, pages: Mapping[LayerKind, int], fingerprint: Mapping[str, str], memory: Mapping[str, int]) -> None:
        """Wait until all ranks have prepared. Raises where something differs that must be the same."""
        answers = self._watch.wait_for(wire.RankPrepared)
        self.memory = [memory, *(answer.memory for answer in answers)]
        for peer, answer in zip(self.peers, answers, strict=True):
            for name, own in fingerprint.items():
                theirs = answer.fingerprint.get(name)
                if theirs != own:
                    raise RankFailed(f"{peer} has a different {name} than rank 0: {theirs}, and rank 0 has {own}.")
        every = [pages, *({LayerKind(kind): count for kind, count in answer.pages.items()} for answer in answers)]
        self._pages = {kind: min(rank_pages[kind] for rank_pages in every) for kind in pages}

    def pages(self) -> dict[LayerKind, int]:
        """KV pages that every rank has room for."""
        return dict(self._pages)

    def join(self, device: torch.device) -> RankSums:
        """Connect all ranks, which then begin to load."""
        self._broadcast(wire.RankLoad())
        shard, nodes = self.options.shard, self.options.nodes
        with self._failing():
            if nodes is None or self._server is None:
                store, address = file_store(str(self._store), shard.world), LOOPBACK
            else:
                port, address = self._server.getsockname()[1], nodes.address
                store = network_store(address, port, shard.world, self._server)
            self._group = Group(shard, store, device, nccl=uses_nccl(self.options, device), address=address)
        return self._group

    def loaded(self) -> None:
        """Wait until all ranks have loaded."""
        self._watch.wait_for(wire.Loaded)

    def check(self) -> None:
        """Raise if a rank has failed."""
        self._watch.check()

    def assemble(
        self,
        limits: Limits,
        pages: Mapping[LayerKind, int],
        *,
        enforce_eager: bool,
        fill_up_prompts: bool | None,
        draft_tokens: int,
        head: bool,
    ) -> None:
        """Have the other ranks make their runners, while rank 0 makes its own. ``head``: drafts come from the draft
        head, which every rank has."""
        counts = {kind.value: count for kind, count in pages.items()}
        self._broadcast(wire.Assemble(limits, counts, enforce_eager, fill_up_prompts, draft_tokens, head))

    def lead(self, runner: ModelRunner, pools: Mapping[LayerKind, PagePool]) -> LeadingRunner:
        """The runner of all ranks, once the others have theirs."""
        assert self._group is not None  # the model is loaded
        self._watch.wait_for(wire.Assembled)
        return LeadingRunner(runner, pools, self, self._group)

    @contextlib.contextmanager
    def running(self, message: wire.RankStep | wire.Draft | wire.Prepare | wire.Idle) -> Iterator[None]:
        """Inside, all ranks run this."""
        self._watch.check()
        self._broadcast(message)
        with self._failing():
            yield

    @contextlib.contextmanager
    def drafting(self, step: LaunchedStep, most: int) -> Iterator[None]:
        """Inside, the draft heads of all ranks run after ``step``."""
        assert self._group is not None
        tokens = step.tokens
        first_rows = tuple(step.first_rows.get(work.request.request_id) for work in step.schedule)
        with self.running(wire.Draft(first_rows, 0 if tokens is None else len(tokens), most)):
            if tokens is not None:
                self._group.broadcast(tokens.clone())
            yield

    def preparing_drafts(self) -> contextlib.AbstractContextManager[None]:
        """Inside, all ranks prepare their draft heads."""
        return self.running(wire.Prepare(drafts=True))

    def close(self) -> None:
        """End the other ranks. May be called again."""
        self._watch.close()
        for peer in self.peers:
            with contextlib.suppress(LinkClosed):
                peer.link.send(wire.Stop())
        self._end(self.peers, time.monotonic() + END_S)

    def _end(self, peers: Sequence[Peer], deadline: float = 0.0) -> None:
        for peer in peers:
            peer.close(deadline)
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Replace the error of a sum by which rank failed, and how."""
        try:
            yield
        except RankFailed as error:
            raise self._watch.cause(error) from None

    def _broadcast(self, message: wire.ToFollower) -> None:
        for peer in self.peers:
            self._send(peer, message)

    def _send(self, peer: Peer, message: wire.ToFollower) -> None:
        try:
            peer.link.send(message)
        except LinkClosed:
            raise self._watch.cause(RankFailed(f"{peer} is gone.")) from None


class LeadingRunner:
    """A ``Runner`` that sends each step to the other ranks, then runs it like any runner."""

    def __init__(self, runner: ModelRunner, pools: Mapping[LayerKind, PagePool], team: RankTeam, group: Group) -> None:
        self._runner = runner
        self._team = team
        self._group = group
        self._writer = StepWriter(pools)

    def forward(self, schedule: Sequence[Work], tokens: Tensor | None = None) -> Logits:
        step = self._writer.write(schedule, ahead=tokens is not None)
        with self._team.running(step):
            if tokens is not None:
                tokens = self._group.broadcast(tokens.clone())
            logits = self._runner.forward(schedule, tokens)
            return gather_logits(logits, self._runner.vocab_size, self._group, greedy=step.greedy)

    def prepare(self, *, stand_ins: bool) -> None:
        with self._team.running(wire.Prepare(stand_ins=stand_ins)):
            self._runner.prepare(stand_ins=stand_ins)

    def idle(self) -> bool:
        """All ranks capture the same graph."""
        with self._team.running(wire.Idle()):
            return self._runner.idle()

    def graphs(self) -> GraphCounts:
        return self._runner.graphs()


def _end_process(error: MicroscaleError) -> None:
    """Rank 0 waits for something that will not come, or has no step to run: report the fault and end."""
    log.error("%s", error)
    sys.stderr.flush()
    os._exit(1)
