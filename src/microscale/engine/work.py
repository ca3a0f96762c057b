"""The work of a step: a *schedule* is a list of ``Work``, one for each request that runs in it."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from microscale.engine.request import Request


class Work(Struct, frozen=True):
    """The tokens of one request that run in a step."""

    request: Request
    first: int
    """Position of the first token."""
    count: int
    """Number of tokens, drafts included."""
    ahead: bool = False
    """Its own token is only on the device: the last step chose it, and the host has not read it yet. So are its drafts,
    if it has any; ``drafts`` then holds zeros."""
    drafts: tuple[int, ...] = ()
    """Guesses of the tokens after the request's own. The step finds out how many of them the model would choose."""
    slack: int = 0
    """How many tokens further on it may be: drafts of the last step, which the host has not read yet."""

    @property
    def end(self) -> int:
        """The position after its last token, or a bound on it."""
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
        """One token in, one token out. (A prompt that is scored may also have one token with logits.)"""
        return self.count == 1 and self.wants_logits and not self.request.scoring

    @property
    def verifies(self) -> bool:
        """It decodes, with or without drafts."""
        return self.ahead or bool(self.drafts) or self.decodes

    @property
    def num_logits(self) -> int:
        """How many of its last tokens give logits: all while the prompt is scored, else the request's last token and
        the drafts, or none."""
        if self.ahead or not self.request.scoring:
            return 1 + len(self.drafts) if self.wants_logits else 0
        return self.count
