"""How many tokens are drafted for each request: the place for arithmetic on what a longer step costs and gains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from microscale.engine.request import Request


class Length(Protocol):
    """A rule."""

    def choose(self, requests: Sequence[Request]) -> Sequence[int]:
        """For the requests that decode together: the most tokens to draft for each. 0: none."""

    def landed(self, request: Request, drafted: int, accepted: int) -> None:
        """What became of a draft."""


class FixedLength:
    """The same number for all, whatever becomes of it."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def choose(self, requests: Sequence[Request]) -> Sequence[int]:
        return [self._tokens] * len(requests)

    def landed(self, request: Request, drafted: int, accepted: int) -> None:
        pass
