"""How likely drafts are accepted: what became of those of a request lately, and of the server's recent requests.

By the place of a token in its draft: of the times that all before it were accepted, how often it was too. Counts fade
(``FADING``), so that what is said of a request is said of its last few dozen drafts. What a request has not shown yet
is taken from all requests, and what these have not shown at a place from the place before it.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul

FADING = 1 - 1 / 32
"""By which a request's counts shrink with each of its drafts."""
SHARED_FADING = 1 - 1 / 256
OWN_WEIGHT = 8.0
"""Tries of its own after which a request counts as much as all, its own among them. With 4 of both a first draft that
failed by chance made 0.38 of 0.6, and drafts stopped."""
SHARED_WEIGHT = 8.0
"""Tries after which they count as much as ``AT_FIRST``."""
LARGEST_UNIT = 1e9
AT_FIRST = 0.6
"""The chance of a token before anything was seen: between what published heads reach on chat and on code."""


class _Counts:
    """Tries and hits by place. What fades is not touched: instead what comes later counts more."""

    def __init__(self, most: int, fading: float) -> None:
        self.tried = [0.0] * most
        self.hit = [0.0] * most
        self.unit = 1.0
        """What a try counts now."""
        self._growth = 1 / fading

    def add(self, drafted: int, accepted: int) -> None:
        """Places up to the first that was not accepted were tried; nobody knows of those after it."""
        self.unit *= self._growth
        if self.unit > LARGEST_UNIT:
            self.tried, self.hit = ([count / self.unit for count in counts] for counts in (self.tried, self.hit))
            self.unit = 1.0
        for place in range(accepted):
            self.tried[place] += self.unit
            self.hit[place] += self.unit
        if accepted < drafted:
            self.tried[accepted] += self.unit


class Acceptance:
    """Of drafts of up to ``most`` tokens."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._shared = _Counts(most, SHARED_FADING)
        self._own: dict[str, _Counts] = {}
        self._turn = 0
        """Drafts of anybody that have landed."""
        self._typical: tuple[int, list[float]] = (-1, [])
        """What a new request is taken to be like, and when that was reckoned."""
        self._known: dict[str, tuple[int, list[float]]] = {}
        """Chances as they were last reckoned, and when."""

    def landed(self, request_id: str, drafted: int, accepted: int) -> None:
        """What became of a draft."""
        own = self._own.get(request_id)
        if own is None:
            own = self._own[request_id] = _Counts(self._most, FADING)
        own.add(drafted, accepted)
        self._shared.add(drafted, accepted)
        self._turn += 1

    def chances(self, request_id: str) -> list[float]:
        """That the first token of a draft is accepted, the first two, …"""
        turn, found = self._known.get(request_id, (None, []))
        if turn != self._turn:
            found = list(accumulate(self.by_place(request_id), mul))
            self._known[request_id] = self._turn, found
        return found

    def by_place(self, request_id: str) -> list[float]:
        """That a token is accepted if all before it are."""
        own, typical = self._own.get(request_id), self._of_all()
        if own is None:
            return typical
        weight, counts = OWN_WEIGHT * own.unit, zip(own.hit, own.tried, typical, strict=True)
        return [(hit + weight * usual) / (tried + weight) for hit, tried, usual in counts]

    def shown(self, request_id: str, drafted: int) -> float:
        """Tokens that so long a draft of the request gives on average, by what was seen alone: nothing is hoped for,
        and what others have shown counts as one try."""
        own, given, chance = self._own.get(request_id), 0.0, 1.0
        for place in range(drafted):
            seen = self._shared.hit[place] / (self._shared.tried[place] + self._shared.unit)
            if own is not None:
                seen = (own.hit[place] + own.unit * seen) / (own.tried[place] + own.unit)
            chance *= seen
            given += chance
        return given

    def tries(self, request_id: str) -> float:
        """Drafts of the request that still count."""
        own = self._own.get(request_id)
        return 0.0 if own is None else own.tried[0] / own.unit

    def forget(self, request_id: str) -> None:
        self._own.pop(request_id, None)
        self._known.pop(request_id, None)

    def _of_all(self) -> list[float]:
        if self._typical[0] != self._turn:
            found: list[float] = []
            before, weight = AT_FIRST, SHARED_WEIGHT * self._shared.unit
            for hit, tried in zip(self._shared.hit, self._shared.tried, strict=True):
                before = (hit + weight * before) / (tried + weight)
                found.append(before)
            self._typical = self._turn, found
        return self._typical[1]
