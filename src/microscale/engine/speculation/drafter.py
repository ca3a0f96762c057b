"""The interface of all drafters.

    step is launched ──► observe(step, most)   the device runs: time to take in what is known, or to guess on
    its tokens are read ──► propose(contexts)  the drafts of the next step
      or not read yet   ──► drafts_ahead(…)    the same, where they are on the device (``DeviceDrafter``)
    request ends ──► forget(request_id)

A draft is a guess of single tokens, without probabilities: the engine draws the model's own token in each place and
accepts drafts as long as they are equal (``engine/sampler``). So any drafter is exact, and a bad one is only slow.

A drafter that is a model (``head``) reads the target's steps on the device, before anybody has read their tokens. What
it reads them from is the engine's (``Target``), which it is attached to once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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


class Context(NamedTuple):
    """A request that decodes: what stands before its next tokens, and how many of these are wanted."""

    request: Request
    most: int


@dataclass(frozen=True)
class Launched:
    """A step that the device runs. Nobody has read its tokens."""

    schedule: Sequence[Work]
    tokens: Tensor | None = None
    """int32 on the device: what was drawn; ``None``: nothing."""
    first_rows: Mapping[str, int] = field(default_factory=dict)
    """Request → its first row in ``tokens``. It has one for its own last token and one for each of its drafts."""
    ahead: Ahead | None = None
    """What of its schedule is on the device alone."""


class Others(Protocol):
    """The other ranks: each has the head too, behind its own part of the target, and runs what the first runs."""

    def drafting(self, step: Launched, most: int) -> AbstractContextManager[None]:
        """Inside, all ranks let the head take in this step and guess on."""

    def preparing_drafts(self) -> AbstractContextManager[None]:
        """Inside, all ranks make the head ready."""


class Nobody:
    """There is one rank."""

    def drafting(self, step: Launched, most: int) -> AbstractContextManager[None]:
        return nullcontext()

    def preparing_drafts(self) -> AbstractContextManager[None]:
        return nullcontext()


NOBODY = Nobody()


@dataclass(frozen=True)
class Target:
    """What a drafter may read of the engine that it drafts for."""

    pools: Mapping[LayerKind, PagePool]
    limits: Limits
    taps: Taps | None
    enforce_eager: bool = False
    others: Others = NOBODY
    first_runs: Callable[[], int] = lambda: 0
    """How many of its steps so far were slow because they were the first of their kind, or captured a graph."""


class Drafter(Protocol):
    """Proposes tokens."""

    def observe(self, step: Launched, most: int) -> None:
        """A step was launched, and nobody waits for this. ``most``: tokens that any of its requests may be drafted
        next."""

    def expects(self, context: Context) -> bool:
        """Whether there will be a draft soon, as far as tokens are known. Then the next step is not launched before
        those of the last one are read."""

    def propose(self, contexts: Sequence[Context]) -> list[Sequence[int]]:
        """The next tokens of each, as far as the drafter has an idea of them: none to ``most``."""

    def forget(self, request_id: str) -> None:
        """The request has ended. One that was never proposed for is no error."""


@runtime_checkable
class DeviceDrafter(Drafter, Protocol):
    """One whose drafts are on the device, so that a step with them need not wait until the last one is read."""

    def drafts_ahead(self, requests: Sequence[Request], most: int) -> Tensor | None:
        """Drafts after all that the last step draws, which nobody has read: int64 [requests, ``most`` or fewer], on the
        device. ``None``: not of these requests."""
