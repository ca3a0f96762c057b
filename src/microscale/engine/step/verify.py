"""Steps in which sequences decode with drafts, from tensors that stay where they are: a CUDA graph for each size.

The tokens of all sequences lie end to end: its next token and its drafts. Sequences with many drafts, few and none run
together without a token of padding, up to 64 tokens; above, a step is filled up to one of 16 sizes between powers of
two, by sequences whose pages belong to nobody. Rows of sequences are filled up to a power of two with sequences that
have no tokens. All tokens give logits.

    tokens | positions | slots of each kind || starts | lengths        one copy to the device; page tables: ``tables``

Of a step that is launched before the last one is read, the device itself finds out where its sequences are (``ahead``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from microscale.backends.following import Standing, move_on
from microscale.backends.ops import AttentionBatch
from microscale.engine.step.ahead import Ahead
from microscale.engine.step.graphs import graph_size, table_width
from microscale.engine.step.holdings import pages_for
from microscale.engine.step.pages import PagePool
from microscale.engine.step.tables import PageTables
from microscale.engine.step.work import Work
from microscale.models.batch import ForwardBatch
from microscale.models.config import LayerKind

if TYPE_CHECKING:
    from torch import Tensor

KINDS = list(LayerKind)
WIDE_PARTS = 2 + len(KINDS)
"""Tokens, positions, slots of each kind."""


@dataclass(frozen=True)
class VerifyKey:
    """What a captured step depends on."""

    rows: int
    tokens: int
    longest: int
    """New tokens of a sequence, at most: a power of two."""
    pages: int
    """Of a sequence, at most."""

    def holds(self, counts: Sequence[int], pages: int) -> bool:
        """Whether sequences of so many tokens can run in its graph, and nobody's that fill it up."""
        spare = self.tokens - sum(counts)
        if spare < 0 or max(counts) > self.longest or pages > self.pages:
            return False
        return len(counts) + -(-spare // self.longest) <= self.rows

    @property
    def cost(self) -> tuple[int, ...]:
        """Orders graphs that a step fits into. Wide tables come last: other kernels run there."""
        return self.pages, self.tokens, self.rows


class _Views(NamedTuple):
    """Where a step of one key is laid out on the host, and the copy of all of it."""

    wide: Any
    """NumPy arrays, as ``_parts`` has them."""
    starts: Any
    lens: Any
    host: Tensor
    there: Tensor


def spare_rows(max_rows: int) -> int:
    """Rows for nobody's tokens that a step of so many sequences may need: a sixteenth of its tokens, at most, is
    padding, and a row of nobody's holds as many as any other."""
    return max_rows // 16 + 2


def _power(number: int) -> int:
    """The power of two from ``number`` on."""
    return 1 << (number - 1).bit_length()


def _aligned(words: int) -> int:
    """int64 words in whole units of 16 bytes: kernels are compiled for tensors that begin at one."""
    return words + words % 2


class VerifyInputs:
    """The tensors of steps of up to ``max_tokens`` tokens, for as many sequences as ``tables`` has rows."""

    def __init__(
        self, pools: Mapping[LayerKind, PagePool], tables: PageTables, max_tokens: int, device: torch.device
    ) -> None:
        self._pools = pools
        self._tables = tables
        self._size = tables.page_size
        self.max_tokens = max_tokens
        words = self._places(VerifyKey(tables.num_rows, graph_size(max_tokens), 1, 0))[-1]
        pin = device.type == "cuda"
        self._there = torch.zeros(words, dtype=torch.int64, device=device)
        self._host = torch.zeros(words, dtype=torch.int64, pin_memory=pin)
        self._copied = torch.cuda.Event() if pin else None
        self._batches: dict[VerifyKey, ForwardBatch] = {}
        self._known_views: dict[VerifyKey, _Views] = {}
        self._standing: dict[VerifyKey, Standing] = {}
        self._pages = tables.pages(KINDS)

    def key(self, schedule: Sequence[Work]) -> VerifyKey:
        """The graph that the schedule runs in."""
        end = max(work.end for work in schedule)
        return self._key([work.count for work in schedule], table_width(end, self._size, self._tables.max_pages))

    def even_key(self, sequences: int, tokens: int, pages: int) -> VerifyKey:
        """The graph of so many sequences, each with so many tokens."""
        return self._key([tokens] * sequences, pages)

    def _key(self, counts: Sequence[int], pages: int) -> VerifyKey:
        count = sum(counts)
        tokens = graph_size(count)
        longest = _power(max(counts))
        rows = len(counts) + -(-(tokens - count) // longest)
        return VerifyKey(min(_power(rows), self._tables.num_rows), tokens, longest, pages)

    def fill(self, schedule: Sequence[Work], key: VerifyKey, ahead: Ahead | None = None) -> None:
        """Lay the schedule out as ``key`` has it, and begin the copy. It waits for the copy before. ``ahead``: where
        the host does not know all of it."""
        if self._copied is not None:
            self._copied.synchronize()
        views = self._views(key)
        counts = [work.count for work in schedule]
        spare = key.tokens - sum(counts)
        nobody = [min(key.longest, spare - at) for at in range(0, spare, key.longest)]
        empty = key.rows - len(counts) - len(nobody)
        tokens: list[int] = []
        positions: list[int] = []
        for work in schedule:
            tokens += [0] * work.count if work.ahead else work.tokens
            positions += range(work.first, work.first + work.count)
        for count in nobody:
            positions += range(count)
        views.wide[0] = tokens + [0] * spare
        views.wide[1] = positions
        for line, kind in enumerate(KINDS, start=2):
            views.wide[line] = self._slots(kind, schedule, nobody)
        views.starts[:] = [*accumulate(counts + nobody, initial=0), *[key.tokens] * empty]
        views.lens[:] = [*(work.first + work.count for work in schedule), *nobody, *[0] * empty]
        self._tables.flush()
        views.there.copy_(views.host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        if ahead is not None:
            self._move(key, ahead)

    def _move(self, key: VerifyKey, ahead: Ahead) -> None:
        """On the device, from where the host takes the sequences to be to where they are."""
        if key not in self._standing:
            wide, _, lens = self._parts(self._there, key)
            self._standing[key] = Standing(wide[1], wide[2:], lens, tokens=wide[0])
        move_on(ahead, self._standing[key], self._pages)

    def _slots(self, kind: LayerKind, schedule: Sequence[Work], nobody: Sequence[int]) -> list[int]:
        """Where each token's keys and values go; the page tables are brought up to date on the way."""
        size, show = self._size, self._tables.show
        slots: list[int] = []
        for row, work in enumerate(schedule):
            pages, place, left = show(kind, row, work), work.first, work.count
            while left:
                index, offset = divmod(place, size)
                part = min(left, size - offset)
                begin = pages[index] * size + offset
                slots += range(begin, begin + part)
                place, left = place + part, left - part
        # The page after the last is nobody's.
        beyond = self._pools[kind].num_pages * size
        for row, count in enumerate(nobody, start=len(schedule)):
            self._tables.show_nobody(kind, row, pages_for(count, size))
            slots += [beyond + place % size for place in range(count)]
        return slots

    def _views(self, key: VerifyKey) -> _Views:
        if key not in self._known_views:
            wide, starts, lens = (part.numpy() for part in self._parts(self._host, key))
            words = self._places(key)[-1]
            self._known_views[key] = _Views(wide, starts, lens, self._host[:words], self._there[:words])
        return self._known_views[key]

    def batch(self, key: VerifyKey) -> ForwardBatch:
        """The step as the model takes it. The tensors are the same at every call."""
        if key not in self._batches:
            self._batches[key] = self._make_batch(key)
        return self._batches[key]

    def _make_batch(self, key: VerifyKey) -> ForwardBatch:
        (tokens, positions, *slots), query_start, context_lens = self._parts(self._there, key)
        attention = {
            kind: AttentionBatch(
                query_start, context_lens, self._tables.of(kind, key.rows, key.pages), key.longest, verify=True
            )
            for kind in KINDS
        }
        return ForwardBatch(tokens, positions, attention, dict(zip(KINDS, slots, strict=True)), None)

    @staticmethod
    def _places(key: VerifyKey) -> list[int]:
        """Where the tokens' part, the starts and the lengths begin, and where all ends, in int64 words."""
        halves = (_aligned(-(-count // 2)) for count in (key.rows + 1, key.rows))
        return list(accumulate((WIDE_PARTS * _aligned(key.tokens), *halves), initial=0))

    def _parts(self, buffer: Tensor, key: VerifyKey) -> Any:
        """``[parts, tokens]`` int64; starts and lengths in int32."""
        _, starts, lens, _ = self._places(key)
        wide = buffer[: WIDE_PARTS * _aligned(key.tokens)].view(WIDE_PARTS, -1)[:, : key.tokens]
        narrow = buffer.view(torch.int32)
        return wide, narrow[2 * starts :][: key.rows + 1], narrow[2 * lens :][: key.rows]
