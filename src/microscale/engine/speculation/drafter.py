"""The interface of all drafters.

    step is launched ──► observe(schedule)     the device runs: time to take in what is known
    its tokens are read ──► propose(contexts)  the drafts of the next step
    request ends ──► forget(request_id)

A draft is a guess of single tokens, without probabilities: the engine draws the model's own token in each place and
accepts drafts as long as they are equal (``engine/step/sampler``). So any drafter is exact, and a bad one is only slow.

A drafter that is a model gets two things more here, which ``ngram`` has no use for: the hidden states of the step's
tokens, row by row as the schedule has them, with ``observe``; and KV pages of its own beside the target's. Which rows
of hidden states belong to accepted tokens follows from the tokens of the contexts that it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from microscale.engine.request import Request
from microscale.engine.step.work import Work


@dataclass(frozen=True)
class Context:
    """A request that decodes: what stands before its next tokens, and how many of these are wanted."""

    request: Request
    most: int


class Drafter(Protocol):
    """Proposes tokens."""

    def observe(self, schedule: Sequence[Work]) -> None:
        """A step was launched. Nothing is known of its tokens yet, and nobody waits for this."""

    def expects(self, context: Context) -> bool:
        """Whether there will be a draft soon, as far as tokens are known. Then the next step is not launched before
        those of the last one are read."""

    def propose(self, contexts: Sequence[Context]) -> list[Sequence[int]]:
        """The next tokens of each, as far as the drafter has an idea of them: none to ``most``."""

    def forget(self, request_id: str) -> None:
        """The request has ended. One that was never proposed for is no error."""
