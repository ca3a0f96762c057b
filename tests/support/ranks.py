"""Engines on several ranks in tests, and whether two runs gave the same tokens."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from microscale.engine.config import EngineConfig
from microscale.engine.engine import Engine
from microscale.engine.grammar import Vocabulary
from microscale.engine.limits import Limits
from microscale.engine.loading.build import assemble
from microscale.engine.loading.load import load
from microscale.engine.loading.prepare import Prepared, prepare_team
from microscale.engine.ranks.__main__ import follow
from microscale.engine.ranks.leader import RankTeam
from microscale.engine.ranks.messages import RankLink
from microscale.engine.ranks.processes import Peer
from microscale.engine.ranks.watch import Patience
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.speculation.config import SpeculativeConfig
from microscale.engine.speculation.speculation import Speculation
from microscale.models.config import LayerKind
from microscale.models.draft_heads.drafting import DraftHead
from microscale.models.families import AnyModel

NEAR = 1e-3
"""Log-probabilities this close may swap places when float32 numbers are added in another order."""
FOLLOWER = "follower"
PATIENT = Patience(3600.0, 3600.0)
"""Threads send no heartbeats, and a busy machine is no fault."""


def thread_rank(rank: int) -> Peer:
    """A follower in a thread of this process, with its real messages, group and runner: it need not import torch."""
    ours, theirs = socket.socketpair()
    threading.Thread(target=follow, args=(RankLink(theirs),), daemon=True, name=FOLLOWER).start()
    return Peer(rank, RankLink(ours), where="thread")


@contextmanager
def ranks(options: EngineConfig, start: Callable[[int], Peer] = thread_rank) -> Iterator[tuple[Prepared, AnyModel]]:
    """A model that is loaded on several ranks, of which this process is the first."""
    with prepared_ranks(options, start) as prepared:
        yield prepared, load(prepared)


@contextmanager
def prepared_ranks(options: EngineConfig, start: Callable[[int], Peer] = thread_rank) -> Iterator[Prepared]:
    before = threading.enumerate()
    prepared = prepare_team(RankTeam(options, start, PATIENT))
    try:
        yield prepared
    finally:
        prepared.close()
        for thread in threading.enumerate():
            if thread.name == FOLLOWER and thread not in before:
                thread.join(60)


@dataclass(frozen=True)
class Run:
    """Requests, and the engine that they are given to."""

    prompts: Sequence[Sequence[int]]
    params: Sequence[SamplingParams]
    step_tokens: int = 64
    sequences: int = 4
    pages: int = 200
    prefix_caching: bool = True
    speculative: SpeculativeConfig | None = None
    vocabulary: Vocabulary | None = None
    window: int = 128
    page_size: int = 16


@dataclass
class Said:
    """What one request was answered."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    prompt: list[Any] = field(default_factory=list)


def run_engine(
    model: AnyModel, run: Run, team: RankTeam | None = None, head: DraftHead | None = None, *, read_drafts: bool = False
) -> tuple[list[Said], Engine]:
    """``read_drafts``: launch nothing before a step with drafts is read, as several ranks do."""
    limits = Limits(
        run.page_size, run.window, run.sequences, run.step_tokens, 4096, 64, prefix_caching=run.prefix_caching
    )
    engine = assemble(
        model,
        limits,
        dict.fromkeys(LayerKind, run.pages),
        vocabulary=run.vocabulary,
        speculation=None if run.speculative is None else Speculation.of(run.speculative, head=head),
        team=team,
    )
    if read_drafts:
        engine._ahead = None
    said: Mapping[str, Said] = {str(index): Said() for index in range(len(run.prompts))}
    for index, (prompt, params) in enumerate(zip(run.prompts, run.params, strict=True)):
        engine.submit(Request(str(index), prompt, params))
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise output.error
            answer = said[output.request_id]
            answer.prompt += output.prompt_logprobs
            if output.token is not None and output.logprob is not None:
                answer.tokens.append(output.token)
                answer.logprobs.append(output.logprob)
                answer.top.append(output.top_logprobs)
    engine.check()
    return list(said.values()), engine


def check_same(name: str, wanted: Sequence[Said], found: Sequence[Said]) -> None:
    """The same tokens, with nearly the same log-probabilities. Where a token differs, both must have been as likely:
    then the two texts go apart and nothing is said of the rest."""
    for place, (one, many) in enumerate(zip(wanted, found, strict=True)):
        where = f"{name}, request {place}"
        assert len(one.tokens) == len(many.tokens), where
        for at, (token, other) in enumerate(zip(one.tokens, many.tokens, strict=True)):
            if token != other:
                # Both candidates stand among the likeliest of the one rank's row, side by side.
                likely = dict(one.top[at])
                assert other in likely, f"{where}: token {at} is {other} and not {token}"
                gap = abs(likely[other] - one.logprobs[at])
                assert gap < NEAR, f"{where}: token {at} is {other} and not {token}, {gap} apart"
                break
            assert abs(one.logprobs[at] - many.logprobs[at]) < NEAR, where
        for (t, p, _), (u, q, _) in zip(one.prompt, many.prompt, strict=True):
            assert t == u, where
            assert abs(p - q) < NEAR, where
