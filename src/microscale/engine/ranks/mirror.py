"""A step's schedule as a message, and back.

Rank 0 says of each sequence what runs and which of its pages changed since it last said so. The other ranks keep no
more than a runner asks for: a sequence's pages, and as many of its tokens as run.

    pages of a sequence   | left by its window | as before | fresh |
                          0                  left        kept    end
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from microscale.engine.pages import NOWHERE, PagePool
from microscale.engine.ranks.messages import Held, Row, Step
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.work import Work
from microscale.errors import BadMessage
from microscale.models.config import LayerKind


@dataclass
class _Told:
    """What the others know of a sequence."""

    number: int
    num_preempted: int
    pages: dict[LayerKind, list[int]] = field(default_factory=dict)


class Teller:
    """Rank 0's side: remembers what was told."""

    def __init__(self, pools: Mapping[LayerKind, PagePool]) -> None:
        self._pools = pools
        self._told: weakref.WeakKeyDictionary[Request, _Told] = weakref.WeakKeyDictionary()
        self._next = 0
        self._gone: list[int] = []
        """Numbers whose requests are no more; filled as these are collected."""

    def step(self, number: int, schedule: Sequence[Work], *, ahead: bool, likeliest: bool = False) -> Step:
        rows = tuple(self._row(work) for work in schedule)
        gone = tuple(self._gone)
        del self._gone[: len(gone)]
        return Step(number, rows, gone, ahead, likeliest)

    def _row(self, work: Work) -> Row:
        told = self._known(work.request)
        own = () if work.ahead else tuple(work.tokens[: work.count - len(work.drafts)])
        held = tuple(self._held(told, kind, work.request.request_id) for kind in LayerKind)
        request = work.request
        following = None if work.wants_logits else request.tokens[work.first + work.count]
        wanted = work.num_logits, request.scoring
        return Row(told.number, work.first, work.count, own, work.drafts, *wanted, held, following)

    def _known(self, request: Request) -> _Told:
        told = self._told.get(request)
        if told is None or told.num_preempted != request.num_preempted:
            # One that was preempted has other pages now: to the others it is another sequence.
            number, self._next = self._next, self._next + 1
            weakref.finalize(request, self._gone.append, number).atexit = False
            told = self._told[request] = _Told(number, request.num_preempted)
        return told

    def _held(self, told: _Told, kind: LayerKind, request_id: str) -> Held:
        pages = list(self._pools[kind].pages_of(request_id))
        before = told.pages.get(kind, [])
        left = next((place for place, page in enumerate(pages) if page != NOWHERE), len(pages))
        kept = left
        both = min(len(before), len(pages))
        if before[left:both] == pages[left:both]:  # as a rule: a context of 128 Ki has 8192 of them
            kept = max(left, both)
        while kept < both and before[kept] == pages[kept]:
            kept += 1
        told.pages[kind] = pages
        return Held(left, kept, tuple(pages[kept:]))


class HeldPages(PagePool):
    """A pool that rank 0 keeps: here it only says which pages a sequence has."""

    def hold(self, owner: str, held: Held) -> None:
        before = list(self.pages_of(owner))
        if held.kept > max(len(before), held.left):
            raise BadMessage(f"Sequence {owner} is said to keep {held.kept} pages and has {len(before)}.")
        for page in held.fresh:
            if page >= self.num_pages:
                raise BadMessage(f"Sequence {owner} is given page {page} of {self.num_pages}.")
        self._owned[owner] = [NOWHERE] * held.left + before[held.left : held.kept] + list(held.fresh)

    def let_go(self, owner: str) -> None:
        self._owned.pop(owner, None)


class MirroredRequest(Request):
    """A sequence of rank 0's as far as a runner looks at it."""

    is_scored = False

    @property
    def scoring(self) -> bool:
        return self.is_scored


class Mirror:
    """Another rank's side: puts schedules together again."""

    def __init__(self, pools: Mapping[LayerKind, HeldPages]) -> None:
        self._pools = pools
        self._requests: dict[int, MirroredRequest] = {}

    def schedule(self, step: Step) -> list[Work]:
        for number in step.gone:
            self._requests.pop(number, None)
            for pool in self._pools.values():
                pool.let_go(str(number))
        return [self._work(row, step.ahead) for row in step.rows]

    def _work(self, row: Row, ahead: bool) -> Work:
        request = self._requests.get(row.number)
        if request is None:
            request = self._requests[row.number] = MirroredRequest(str(row.number), (), SamplingParams())
        for kind, held in zip(LayerKind, row.held, strict=True):
            self._pools[kind].hold(request.request_id, held)
        own = row.count - len(row.drafts)
        if not (ahead and own == 1) and len(row.tokens) != own:
            raise BadMessage(f"Sequence {row.number} has {len(row.tokens)} tokens for {own} places.")
        tokens = request.tokens
        tokens += [0] * (row.first - len(tokens))
        del tokens[row.first :]
        tokens += row.tokens
        request.is_scored = row.scoring
        work = Work(request, row.first, row.count, ahead, row.drafts)
        if row.following is not None:
            tokens.append(row.following)  # more of the prompt follows: no token is due
        if work.num_logits != row.logits:
            raise BadMessage(f"Sequence {row.number} wants {row.logits} rows of logits, and here {work.num_logits}.")
        return work
