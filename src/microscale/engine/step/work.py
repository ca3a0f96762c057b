"""The work of a step: a *schedule* is a list of ``Work``, one of each request that runs in it."""

from __future__ import annotations

from dataclasses import dataclass

from microscale.engine.request import Request


@dataclass(frozen=True)
class Work:
    """The tokens of one request that run in a step."""

    request: Request
    first: int
    count: int
    ahead: bool = False
    """Its one token is still on the device: the step before has chosen it, and nobody has read it yet."""

    @property
    def wants_logits(self) -> bool:
        """The request's next token is due."""
        return self.ahead or self.first + self.count == len(self.request.tokens)

    @property
    def decodes(self) -> bool:
        """One token in, one token out. (A prompt that is scored may have one logit in the midst of it.)"""
        return self.count == 1 and self.wants_logits and not self.request.scoring

    @property
    def num_logits(self) -> int:
        """How many of its last tokens are to give logits: all while the prompt is scored, else one or none."""
        return self.count if self.request.scoring else int(self.wants_logits)
