"""A runner whose "model" is exact integer arithmetic over what it finds in the pages.

Keys and values are the token ids themselves, written to and read from real slots through real page tables. The next
token is a hash of every token that full layers see and of those that the window sees, so a page that was lost, shared
wrongly or freed too soon changes the answer. Pages that were never written hold -1, and reading one raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from microscale.engine.ahead import Ahead
from microscale.engine.graphs import GraphCounts
from microscale.engine.limits import Limits
from microscale.engine.pages import NOWHERE, PagePool
from microscale.engine.work import Work
from microscale.kernels.dense.reference import summarise
from microscale.kernels.dense.spec import Logits
from microscale.models.config import LayerKind


def next_token(tokens: Sequence[int], window: int, vocab: int) -> int:
    """What the mock model says after ``tokens``."""
    return hash((tuple(tokens), tuple(tokens[-window:]))) % vocab


class MockRunner:
    def __init__(self, pools: Mapping[LayerKind, PagePool], limits: Limits, vocab: int) -> None:
        self._pools = pools
        self._limits = limits
        self._vocab = vocab
        self._cache = {kind: [-1] * (pool.num_pages * limits.page_size) for kind, pool in pools.items()}
        self.largest_step = 0
        self.steps_ahead = 0
        """With drafts, launched before the last one was read."""

    def _slot(self, kind: LayerKind, request_id: str, position: int) -> int:
        page = self._pools[kind].pages_of(request_id)[position // self._limits.page_size]
        if page == NOWHERE:
            raise AssertionError(f"{request_id} reads position {position} of {kind}, whose page it dropped")
        return page * self._limits.page_size + position % self._limits.page_size

    def prepare(self, *, stand_ins: bool) -> None: ...

    def idle(self) -> bool:
        return False

    def graphs(self) -> GraphCounts:
        return GraphCounts(0, 0, 0)

    def forward(self, schedule: Sequence[Work], tokens: Tensor | None = None) -> Logits:
        unread = iter(() if tokens is None else tokens.tolist())
        return self._run(schedule, [[next(unread)] if work.ahead else work.tokens for work in schedule])

    def forward_ahead(self, schedule: Sequence[Work], ahead: Ahead) -> Logits:
        self.steps_ahead += 1
        tokens, known = ahead.tokens().tolist(), []
        for work in schedule:
            known.append(tokens[: work.count])
            del tokens[: work.count]
        each = zip(schedule, ahead.accepted.tolist(), strict=True)
        return self._run([replace(work, first=work.first + accepted) for work, accepted in each], known)

    def _run(self, schedule: Sequence[Work], tokens: Sequence[Sequence[int]]) -> Logits:
        self.largest_step = max(self.largest_step, sum(work.count for work in schedule))
        for work, own in zip(schedule, tokens, strict=True):
            if work.first + work.count > work.request.num_total:
                raise AssertionError(f"{work.request.request_id} runs beyond the last token that it may have")
            for position, token in enumerate(own, start=work.first):
                for kind, cache in self._cache.items():
                    cache[self._slot(kind, work.request.request_id, position)] = token
        rows = []
        for work in schedule:
            for end in range(work.first + work.count - work.num_logits + 1, work.first + work.count + 1):
                seen = self._read(LayerKind.FULL, work.request.request_id, 0, end)
                near = self._read(LayerKind.SLIDING, work.request.request_id, max(0, end - self._limits.window), end)
                row = torch.full((self._vocab,), -1.0)
                row[hash((seen, near)) % self._vocab] = 1.0
                rows.append(row)
        return summarise(torch.stack(rows) if rows else torch.empty(0, self._vocab))

    def _read(self, kind: LayerKind, request_id: str, first: int, end: int) -> tuple[int, ...]:
        cache = self._cache[kind]
        found = tuple(cache[self._slot(kind, request_id, position)] for position in range(first, end))
        if -1 in found:
            raise AssertionError(f"{request_id} reads a position of {kind} that was never written")
        return found
