"""The interface of all drafters.

    step is launched      ──► observe(step, most)   while the device runs: take in what is known, or draft further
    its tokens are read   ──► propose(contexts)     the drafts of the next step
      or not read yet     ──► drafts_ahead(…)       the same, with drafts on the device (``DeviceDrafter``)
    request ends          ──► forget(request_id)

A draft is a list of single tokens, without probabilities: the engine draws the model's own token at each place and
accepts drafts as long as they are equal. So any drafter is exact, and a bad one is only slow.

A drafter that is a model (``head``) reads the target's steps on the device, before their tokens are read. It is
attached to the engine once (``DraftTarget``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from microscale.engine.ahead import Ahead
from microscale.engine.limits import Limits
from microscale.engine.pages import PagePool
from microscale.engine.request import Request
from microscale.engine.work import Work
from microscale.models.config import LayerKind
from microscale.models.taps import Taps

if TYPE_CHECKING:
    from torch import Tensor

    from microscale.engine.ranks.leader import RankTeam


class Context(NamedTuple):
    """A request that decodes, and the maximum number of tokens to draft for it."""

    request: Request
    most: int


@dataclass(frozen=True)
class LaunchedStep:
    """A step that runs on the device. Its tokens were not read yet."""

    schedule: Sequence[Work]
    tokens: Tensor | None = None
    """int32 on the device: the drawn tokens; ``None``: there are none."""
    first_rows: Mapping[str, int] = field(default_factory=dict)
    """Request → its first row in ``tokens``. It has a row for its own last token and one for each of its drafts."""
    ahead: Ahead | None = None
    """The part of its schedule that only the device knows."""


@dataclass(frozen=True)
class DraftTarget:
    """What a drafter may read from its engine."""

    pools: Mapping[LayerKind, PagePool]
    limits: Limits
    taps: Taps | None
    enforce_eager: bool = False
    team: RankTeam | None = None
    """All ranks. Each has the head behind its own part of the target and runs what rank 0 runs."""
    first_runs: Callable[[], int] = lambda: 0
    """The number of its steps so far that were the first of their kind or captured a graph."""


class Drafter(Protocol):
    """Proposes tokens."""

    def observe(self, step: LaunchedStep, most: int) -> None:
        """A step was launched. ``most``: the maximum length of the next draft of any of its requests."""

    def expects(self, context: Context) -> bool:
        """Whether a draft is likely, as far as tokens are known. If so, the next step is not launched before the last
        one is read."""

    def propose(self, contexts: Sequence[Context]) -> list[Sequence[int]]:
        """A draft for each: 0 to ``most`` tokens."""

    def forget(self, request_id: str) -> None:
        """The request has ended. It may be unknown to the drafter."""


@runtime_checkable
class DeviceDrafter(Drafter, Protocol):
    """A drafter with drafts on the device, so that the next step can be launched before the last one is read."""

    def drafts_ahead(self, requests: Sequence[Request], most: int) -> Tensor | None:
        """Drafts after what the last step draws: int64 [requests, ``most`` or fewer], on the device. ``None``: these
        requests have none."""
