"""A step in the air."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from microscale.engine.output import Output
from microscale.engine.request import Request
from microscale.engine.step.sampler import Drawn
from microscale.engine.step.work import Work


@dataclass(frozen=True)
class Flight:
    """A step that was launched and whose tokens nobody has read."""

    schedule: list[Work]
    outputs: list[Output]
    """What is known already."""
    ready: list[tuple[Request, int]]
    """The requests whose next token it chooses, with their numbers in the sampler."""
    drawn: Drawn | None
    last: list[Output]
    """Of requests that end with it and have no token of it."""
    drafted: bool = False
    """Some request has drafts in it: how far it was computed is known when it is read."""

    @property
    def decodes(self) -> bool:
        """All of its requests do, with drafts or without."""
        return all(work.verifies for work in self.schedule)

    def moved(self, accepted: Mapping[str, Sequence[int]]) -> Flight:
        """Where it is, now that the step before it is read."""
        schedule = [
            replace(work, first=work.first + len(accepted.get(work.request.request_id, ())), slack=0)
            for work in self.schedule
        ]
        return replace(self, schedule=schedule)
