"""The work of a step: a *schedule* is a list of ``Work``, one of each request that runs in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from microscale.engine.request import Request


@dataclass(frozen=True)
class Work:
    """The tokens of one request that run in a step."""

    request: Request
    first: int
    count: int
    ahead: bool = False
    """Its own token is still on the device: the step before has chosen it, and nobody has read it yet. So are its
    drafts, if it has any; here 0 stands for each."""
    drafts: tuple[int, ...] = ()
    """Tokens after the request's own that may be the next ones; ``count`` includes them. The step says of how many the
    model would have chosen them."""
    slack: int = 0
    """By how many tokens it may be further on: drafts of the step before, of which nobody knows how many were
    accepted."""

    @property
    def end(self) -> int:
        """The position after its last token, at most."""
        return self.first + self.slack + self.count

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens that run: the request's own, then the drafts."""
        own = self.request.tokens[self.first : self.first + self.count - len(self.drafts)]
        return [*own, *self.drafts] if self.drafts else own

    @property
    def wants_logits(self) -> bool:
        """The request's next token is due."""
        return self.ahead or self.first + self.count - len(self.drafts) == len(self.request.tokens)

    @property
    def decodes(self) -> bool:
        """One token in, one token out. (A prompt that is scored may have one logit in the midst of it.)"""
        return self.count == 1 and self.wants_logits and not self.request.scoring

    @property
    def verifies(self) -> bool:
        """It decodes, with or without drafts."""
        return bool(self.drafts) or self.decodes

    @property
    def num_logits(self) -> int:
        """How many of its last tokens are to give logits: all while the prompt is scored, else the request's last token
        and the drafts, or none."""
        if self.request.scoring:
            return self.count
        return 1 + len(self.drafts) if self.wants_logits else 0
