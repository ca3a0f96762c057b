"""Rank 0's runner: says each step's plan to the other ranks, then runs it as any runner does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from microscale.backends.ops import Logits
from microscale.engine.graphs import GraphCounts
from microscale.engine.pages import PagePool
from microscale.engine.ranks.gathering import takes_likeliest
from microscale.engine.ranks.messages import Draft, Idle, Prepare, Step
from microscale.engine.ranks.mirror import Teller
from microscale.engine.runner import ModelRunner
from microscale.engine.work import Work
from microscale.models.config import LayerKind

if TYPE_CHECKING:
    from torch import Tensor


class Leads(Protocol):
    """What the runner needs of its team: see ``team.RankTeam``."""

    def begin(self, message: Step | Draft | Prepare | Idle) -> None: ...

    def next_number(self) -> int: ...

    def running(self, number: int) -> AbstractContextManager[None]: ...

    def broadcast(self, tokens: Tensor) -> Tensor: ...

    def gather(self, logits: Logits, *, likeliest: bool) -> Logits: ...


class LeadingRunner:
    """A ``Runner`` of several ranks."""

    def __init__(self, runner: ModelRunner, pools: Mapping[LayerKind, PagePool], team: Leads) -> None:
        self._runner = runner
        self._team = team
        self._teller = Teller(pools)

    def forward(self, schedule: Sequence[Work], tokens: Tensor | None = None) -> Logits:
        number = self._team.next_number()
        likeliest = takes_likeliest(schedule)
        self._team.begin(self._teller.step(number, schedule, ahead=tokens is not None, likeliest=likeliest))
        with self._team.running(number):
            if tokens is not None:
                tokens = self._team.broadcast(tokens.clone())
            return self._team.gather(self._runner.forward(schedule, tokens), likeliest=likeliest)

    def prepare(self, *, stand_ins: bool) -> None:
        number = self._team.next_number()
        self._team.begin(Prepare(number, stand_ins=stand_ins))
        with self._team.running(number):
            self._runner.prepare(stand_ins=stand_ins)

    def idle(self) -> bool:
        """All ranks capture the same graph."""
        number = self._team.next_number()
        self._team.begin(Idle(number))
        with self._team.running(number):
            return self._runner.idle()

    def graphs(self) -> GraphCounts:
        return self._runner.graphs()
