"""Rank 0 and the processes of the other ranks on this machine: starts them, has them prepare, load and assemble."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from microscale.backends.ops import Logits, Ranks
from microscale.engine.config import EngineConfig
from microscale.engine.loading.joining import joined_as
from microscale.engine.loading.team import Assembly, Placement, place
from microscale.engine.pages import PagePool
from microscale.engine.ranks import messages as wire
from microscale.engine.ranks.command import COMMAND, END_S
from microscale.engine.ranks.gathering import gather as gather_logits
from microscale.engine.ranks.leading import LeadingRunner
from microscale.engine.ranks.link import Link, LinkClosed
from microscale.engine.ranks.nodes import gather, listen
from microscale.engine.ranks.summing import agree_on_sums
from microscale.engine.ranks.watch import Patience, Peer, Watch
from microscale.engine.runner import ModelRunner
from microscale.engine.speculation.drafter import Launched
from microscale.errors import MicroscaleError, RankFailed
from microscale.hardware.sums import Joined
from microscale.models.config import LayerKind
from microscale.parallel.group import Group, Meeting, meet_at, open_store
from microscale.parallel.handshake import read_secret
from microscale.parallel.nodes import Nodes
from microscale.parallel.sharding import Shard
from microscale.parallel.transport import Transport

if TYPE_CHECKING:
    import torch
    from torch import Tensor

log = logging.getLogger(__name__)


class RankTeam:
    """All ranks of one model, seen by rank 0."""

    def __init__(
        self, options: EngineConfig, command: tuple[str, ...] = COMMAND, patience: Patience | None = None
    ) -> None:
        """Start the processes. They import and prepare meanwhile."""
        world = options.tensor_parallel_size
        here = world if options.nodes is None else world // options.nodes.count
        placed = place(options, here)
        self.options = replace(
            options, shard=Shard(0, world), device=placed.devices[0], sharing=placed.sharing, threads=placed.threads
        )
        self._transport = placed.transport
        self._folder = Path(tempfile.mkdtemp(prefix="microscale-ranks-"))  # of this user alone
        self._store = self._folder / "store"
        self._number = 0
        self._group: Group | None = None
        self.memory: list[Mapping[str, int]] = []
        """What each rank takes, in bytes by what they hold."""
        self.joined: Joined | None = None
        """How the ranks add up, once they have met."""
        self._least: dict[LayerKind, int] | None = None
        peers = [_spawn(rank, command) for rank in range(1, here)]
        self._server: socket.socket | None = None
        if options.nodes is not None:
            peers += self._await_nodes(options.nodes, peers, set(range(here, world)))
        self._watch = Watch(peers, patience or Patience(), self._waits)
        self._watch.on_stuck = _end_process
        for peer in peers:
            self._send(peer, self._join_message(peer.rank, placed))

    def _join_message(self, rank: int, placed: Placement) -> wire.Join:
        # Only rank 0 needs the vocabulary, and nodes name a file of its machine.
        config = replace(self.options, nodes=None, vocabulary=(), control_tokens=(), split_pattern="")
        store, port = str(self._store), 0
        if self._server is not None:
            store, port = "", self._server.getsockname()[1]
        where = self._transport.value, store, config, placed.devices[rank % len(placed.devices)], port, placed.sharing
        return wire.Join(wire.VERSION, rank, self.options.shard.world, *where)

    def _await_nodes(self, nodes: Nodes, local: list[Peer], missing: set[int]) -> list[Peer]:
        """Wait for the ranks of the other machines. Then a socket is open at which ranks meet, until they have."""
        secret = read_secret(Path(nodes.secret_file))
        log.info("Waiting for ranks %s at %s port %d.", sorted(missing), nodes.address, nodes.port)
        try:
            with listen(nodes.address, nodes.port) as server:
                found = gather(server, missing, secret)
            self._server = listen(nodes.address, 0)
        except BaseException:
            for peer in local:
                peer.kill()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        return [Peer(rank, Link(sock), None, where=sock.getpeername()[0]) for rank, sock in sorted(found.items())]

    @property
    def capturable(self) -> bool:
        """Some steps: which, the ranks' sums say (``Ops.uncapturable``)."""
        mapped = self.joined is not None and self.joined.refuses_peers() is None
        return mapped or self._transport is Transport.NCCL

    @property
    def peers(self) -> list[Peer]:
        """The other ranks."""
        return self._watch.peers

    def on_stuck(self, tell: Callable[[MicroscaleError], None]) -> None:
        self._watch.on_stuck = tell

    def agree(self, pages: Mapping[LayerKind, int], found: Mapping[str, str], memory: Mapping[str, int]) -> None:
        """Wait until all ranks have prepared; what must be alike is, or this raises."""
        answers = self._watch.wait_for(wire.Prepared)
        self.memory = [memory, *(answer.memory for answer in answers)]
        for peer, answer in zip(self._watch.peers, answers, strict=True):
            for name, own in found.items():
                theirs = answer.found.get(name)
                if theirs != own:
                    raise RankFailed(f"{peer} has another {name} than rank 0: {theirs}, and rank 0 {own}.")
        every = [pages, *({LayerKind(kind): count for kind, count in answer.pages.items()} for answer in answers)]
        self._least = {kind: min(each[kind] for each in every) for kind in pages}

    def pages(self) -> dict[LayerKind, int]:
        """KV pages that every rank has room for."""
        assert self._least is not None  # the ranks have agreed
        return dict(self._least)

    def join(self, device: torch.device) -> Ranks:
        """Have all ranks meet and begin to load."""
        self._tell(wire.Load())
        with self._failing():
            self._group = Group(self.options.shard, self._meeting(), device)
            joined = joined_as(self.options, self._transport, device)
            ranks, self.joined = agree_on_sums(self._group, joined, device)
        return ranks

    def _meeting(self) -> Meeting:
        world, nodes = self.options.shard.world, self.options.nodes
        if self._server is None or nodes is None:
            return meet_at(str(self._store), world, self._transport)
        return Meeting(open_store(self._server, nodes.address, world), self._transport, nodes.address)

    def loaded(self) -> None:
        """Wait until the other ranks have loaded too."""
        self._watch.wait_for(wire.Loaded)
        shutil.rmtree(self._folder, ignore_errors=True)

    def check(self) -> None:
        self._watch.check()

    def assemble(self, assembly: Assembly) -> None:
        limits = assembly.limits
        pages = {kind.value: count for kind, count in assembly.pages.items()}
        self._tell(
            wire.Assemble(
                page_size=limits.page_size,
                window=limits.window,
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_model_len=limits.max_model_len,
                pages=pages,
                enforce_eager=assembly.enforce_eager,
                fill_up_prompts=assembly.fill_up_prompts,
                draft_tokens=assembly.draft_tokens,
                head=assembly.head,
            )
        )

    def lead(self, runner: ModelRunner, pools: Mapping[LayerKind, PagePool]) -> LeadingRunner:
        """The runner of all ranks, when the others have theirs."""
        self._vocab = runner.vocab_size
        self._watch.wait_for(wire.Assembled)
        return LeadingRunner(runner, pools, self)

    # ---- steps ----

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def begin(self, message: wire.Step | wire.Draft | wire.Prepare | wire.Idle) -> None:
        self._watch.check()
        self._tell(message)

    @contextlib.contextmanager
    def running(self, number: int) -> Iterator[None]:
        """Meanwhile all ranks run this step."""
        assert self._group is not None  # the model is loaded
        with self._failing():
            yield
        self._watch.ran(number, self._group.calls)

    def broadcast(self, tokens: Tensor) -> Tensor:
        assert self._group is not None
        return self._group.broadcast(tokens)

    @contextlib.contextmanager
    def drafting(self, step: Launched, most: int) -> Iterator[None]:
        """All ranks have the tokens that were drawn, and their draft heads run behind them."""
        number, tokens = self.next_number(), step.tokens
        drew = tuple(step.first_rows.get(work.request.request_id) for work in step.schedule)
        self.begin(wire.Draft(number, drew, 0 if tokens is None else len(tokens), most))
        with self.running(number):
            if tokens is not None:
                self.broadcast(tokens.clone())
            yield

    @contextlib.contextmanager
    def preparing_drafts(self) -> Iterator[None]:
        number = self.next_number()
        self.begin(wire.Prepare(number, drafts=True))
        with self.running(number):
            yield

    def gather(self, logits: Logits, *, likeliest: bool) -> Logits:
        assert self._group is not None
        return gather_logits(logits, self._vocab, self._group, likeliest=likeliest)

    # ---- ends ----

    def close(self) -> None:
        """End the other ranks. May be called again."""
        self._watch.close()
        for peer in self._watch.peers:
            with contextlib.suppress(LinkClosed):
                peer.link.send(wire.Stop())
        deadline = time.monotonic() + END_S
        for peer in self._watch.peers:
            if peer.process is not None:
                try:
                    peer.process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    peer.kill()
                    peer.process.wait()
            peer.link.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Rank 0 loses another one: say which was at fault."""
        try:
            yield
        except RankFailed as error:
            raise self._watch.verdict(error) from None

    def _tell(self, message: wire.ToFollower) -> None:
        for peer in self._watch.peers:
            self._send(peer, message)

    def _send(self, peer: Peer, message: wire.ToFollower) -> None:
        try:
            peer.link.send(message)
        except LinkClosed:
            raise self._watch.verdict(RankFailed(f"{peer} is gone.")) from None

    def _waits(self) -> tuple[int, float | None]:
        return (0, None) if self._group is None else (self._group.calls, self._group.waits_since)


def _spawn(rank: int, command: tuple[str, ...]) -> Peer:
    """A process with one end of a socket pair: nobody else can connect."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [*command, "--fd", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a library prints there is no answer of ours
        )
    return Peer(rank, Link(ours), process)


def _end_process(error: MicroscaleError) -> None:
    """Rank 0 stands in a wait that nothing ends, or has nothing to do: the last word, and the end."""
    log.error("%s", error)
    sys.stderr.flush()
    os._exit(1)
