"""Steps with prompts among them, from tensors that stay where they are: a CUDA graph for each bucket of tokens.

A step is laid out in one pinned buffer and goes to the device in one copy. What is host's business elsewhere is read
there: lengths, starts of sequences, and the page tables, which are laid out from a list of pages by the graph itself.

    logit rows | their sequences | their lengths || tokens | positions | slots | first pages | starts | lengths | pages
    the same place in every step                 ||                      as the key has it

A step of fewer tokens than its bucket is filled up by one more sequence, whose pages belong to nobody; sequences that
are not there have no tokens. The body of the model runs the bucket's tokens, and gathers what the tail needs of the
rows that give logits; the tail is a graph for each number of those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from microscale.backends.ops import AttentionBatch
from microscale.engine.step.buckets import bucket
from microscale.engine.step.graphs import graph_size, table_width
from microscale.engine.step.limits import Limits
from microscale.engine.step.pages import NOWHERE, PagePool
from microscale.engine.step.work import Work
from microscale.models.batch import ForwardBatch
from microscale.models.config import LayerKind

KINDS = list(LayerKind)
FEW_SEQUENCES = (2, 17)
"""Sequences that a step is filled up to, beside the most there may be: one prompt, or a few, and nobody's."""


@dataclass(frozen=True)
class PromptKey:
    """What a captured step depends on."""

    tokens: int
    sequences: int
    pages: int
    """Of a sequence, at most."""

    def fits(self, other: PromptKey) -> bool:
        """Whether such a step can run in the graph of another. A prompt alone does so among none but nobody's: it gives
        the same bits wherever the same kernels run."""
        alone = self.sequences == FEW_SEQUENCES[0]
        enough = self.sequences == other.sequences if alone else self.sequences <= other.sequences
        return enough and self.tokens <= other.tokens and self.pages <= other.pages

    @property
    def cost(self) -> tuple[int, ...]:
        """Orders graphs that a step fits into. Sequences without tokens are programs that end at once, so they cost
        less than any token; wide tables come last, since other kernels run there."""
        return self.pages, self.tokens, self.sequences


@dataclass(frozen=True)
class TailKey:
    """What a captured tail depends on."""

    rows: int
    """That give logits."""
    pages: int
    """Of a sequence, at most."""

    def fits(self, other: TailKey) -> bool:
        """Whether such a tail can run as another: the body has laid out tables of one width."""
        return self.rows <= other.rows and self.pages == other.pages

    @property
    def cost(self) -> tuple[int, ...]:
        return (self.rows,)


Array = TypeVar("Array", Tensor, Any)


@dataclass(frozen=True)
class _Parts(Generic[Array]):
    """One buffer, on the host or on the device."""

    rows: Array  # [most rows] int64: which tokens give logits
    row_sequences: Array  # [most rows] int64
    row_lens: Array  # [most rows] int32
    tokens: Array  # [tokens] int64
    positions: Array  # [tokens] int64
    slots: Array  # [kinds, tokens] int64
    first_pages: Array  # [sequences, kinds] int64: where a sequence's pages begin in ``pages``
    query_start: Array  # [sequences + 1] int32
    context_lens: Array  # [sequences] int32
    pages: Array  # int32: those of all sequences and kinds

    @classmethod
    def of(cls, wide: Array, narrow: Array, key: PromptKey, most_rows: int) -> _Parts[Array]:
        """``wide`` and ``narrow`` are the buffer as int64 and as int32."""
        rows, row_sequences, row_lens, tokens, positions, slots, first_pages, starts, lens, pages = _places(
            key, most_rows
        )
        kinds = len(KINDS)
        row = _aligned(key.tokens)
        return cls(
            wide[rows : rows + most_rows],
            wide[row_sequences : row_sequences + most_rows],
            narrow[2 * row_lens : 2 * row_lens + most_rows],
            wide[tokens : tokens + key.tokens],
            wide[positions : positions + key.tokens],
            wide[slots : slots + kinds * row].reshape(kinds, row)[:, : key.tokens],
            wide[first_pages : first_pages + key.sequences * kinds].reshape(key.sequences, kinds),
            narrow[2 * starts : 2 * starts + key.sequences + 1],
            narrow[2 * lens : 2 * lens + key.sequences],
            narrow[2 * pages :],
        )


def _aligned(words: int) -> int:
    """int64 words in whole units of 16 bytes: kernels are compiled for tensors that begin at one."""
    return words + words % 2


def _places(key: PromptKey, most_rows: int) -> list[int]:
    """Where each part begins, in int64 words; the pages are the last."""
    kinds = len(KINDS)
    tokens, sequences = _aligned(key.tokens), _aligned(kinds * key.sequences)
    rows, halves = _aligned(most_rows), (most_rows, key.sequences + 1, key.sequences)
    row_lens, starts, lens = (_aligned(-(-half // 2)) for half in halves)
    sizes = (rows, rows, row_lens, tokens, tokens, kinds * tokens, sequences, starts, lens)
    return list(accumulate(sizes, initial=0))


class PromptInputs:
    """The tensors of steps of up to the largest bucket's tokens."""

    def __init__(
        self,
        pools: Mapping[LayerKind, PagePool],
        limits: Limits,
        max_pages: int,
        token_buckets: Sequence[int],
        device: torch.device,
        draft_tokens: int = 0,
    ) -> None:
        """``draft_tokens``: of a sequence in a step, at most; each gives logits too."""
        self._pools = pools
        self._page_size = limits.page_size
        self._max_pages = max_pages
        self.buckets = token_buckets
        most = limits.max_num_seqs + 1
        self.sequences = sorted({min(size, most) for size in (*FEW_SEQUENCES, most)})
        self.most_rows = graph_size(min(limits.max_num_seqs * (1 + draft_tokens), max(token_buckets[-1], most)))
        largest = PromptKey(token_buckets[-1], most, max_pages)
        padding_pages = -(-token_buckets[-1] // self._page_size)
        words = _places(largest, self.most_rows)[-1] + len(KINDS) * (most * max_pages + padding_pages)
        pin = device.type == "cuda"
        self._there = torch.zeros(words, dtype=torch.int64, device=device)
        # Chunks of a prompt follow one another unread: a buffer is free again when its copy was made.
        self._host = [torch.zeros(words, dtype=torch.int64, pin_memory=pin) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._host] if pin else []
        widths = {table_width(longest, self._page_size, max_pages) for longest in (1, max_pages * self._page_size)}
        # Every row of a table begins at a multiple of 16 bytes.
        self._columns = torch.arange(-(-max(widths) // 4) * 4, device=device)
        self._starts = torch.arange(self.most_rows + 1, dtype=torch.int32, device=device)
        self._tables = {
            width: torch.zeros((most, len(KINDS), -(-width // 4) * 4), dtype=torch.int32, device=device)
            for width in widths
        }

    def key(self, schedule: Sequence[Work]) -> PromptKey | None:
        """The graph of a step; ``None`` where none is large enough, or a prompt is scored: its tokens all give
        logits."""
        count = sum(work.count for work in schedule)
        tokens = bucket(self.buckets, count)
        if tokens is None or any(work.request.scoring for work in schedule):
            return None
        longest = max(work.first + work.count for work in schedule)
        # One for nobody, also where the bucket is full: the step may run in a larger one.
        sequences = next(size for size in self.sequences if size > len(schedule))
        return PromptKey(tokens, sequences, table_width(longest, self._page_size, self._max_pages))

    def fill(self, schedule: Sequence[Work], key: PromptKey) -> None:
        """Lay the schedule out as ``key`` has it, and begin the copy. It waits for the copy before the last."""
        self._host.reverse()
        self._copied.reverse()
        if self._copied:
            self._copied[0].synchronize()
        host = self._host[0]
        parts: _Parts[Any] = _Parts.of(host.numpy(), host.view(torch.int32).numpy(), key, self.most_rows)
        starts = [0, *accumulate(work.count for work in schedule)]
        lens = [work.first + work.count for work in schedule]
        parts.tokens[: starts[-1]] = [token for work in schedule for token in work.tokens]
        for work, start in zip(schedule, starts, strict=False):
            parts.positions[start : start + work.count] = np.arange(work.first, work.first + work.count)
        spare = key.tokens - starts[-1]
        parts.tokens[starts[-1] :] = 0
        parts.positions[starts[-1] :] = np.arange(spare)
        if spare:
            starts.append(key.tokens)
            lens.append(spare)
        parts.query_start[: len(starts)] = starts
        parts.query_start[len(starts) :] = key.tokens
        parts.context_lens[: len(lens)] = lens
        parts.context_lens[len(lens) :] = 0
        pages = self._lay_pages(parts, schedule, starts, spare)
        self._lay_rows(parts, schedule, starts, lens)
        words = _places(key, self.most_rows)[-1] + -(-pages // 2)
        self._there[:words].copy_(host[:words], non_blocking=True)
        if self._copied:
            self._copied[0].record()

    def _lay_pages(self, parts: _Parts[Any], schedule: Sequence[Work], starts: Sequence[int], spare: int) -> int:
        """Pages of every sequence and kind, and the slots of the new tokens. Gives the number of pages."""
        size = self._page_size
        end = 0
        for place, kind in enumerate(KINDS):
            pool = self._pools[kind]
            for row, work in enumerate(schedule):
                pages = np.array(pool.pages_of(work.request.request_id))
                positions = parts.positions[starts[row] : starts[row + 1]]
                parts.slots[place, starts[row] : starts[row + 1]] = pages[positions // size] * size + positions % size
                # Places that a window has left: nobody looks.
                end = self._lay(parts, row, place, np.where(pages == NOWHERE, 0, pages), end)
            if spare:
                # The page after the last is nobody's.
                parts.slots[place, -spare:] = pool.num_pages * size + np.arange(spare) % size
                end = self._lay(parts, len(schedule), place, np.full(-(-spare // size), pool.num_pages), end)
            parts.first_pages[len(schedule) + bool(spare) :, place] = 0
        return end

    @staticmethod
    def _lay(parts: _Parts[Any], row: int, place: int, pages: Any, at: int) -> int:
        parts.first_pages[row, place] = at
        parts.pages[at : at + len(pages)] = pages
        return at + len(pages)

    def _lay_rows(
        self, parts: _Parts[Any], schedule: Sequence[Work], starts: Sequence[int], lens: Sequence[int]
    ) -> None:
        """The last tokens of sequences whose next token is due, drafts included, each as a query of its own; then, as
        often as there is room, the first token."""
        wanted = [(row, back) for row, work in enumerate(schedule) for back in range(work.num_logits - 1, -1, -1)]
        count = len(wanted)
        parts.rows[:count] = [starts[row + 1] - 1 - back for row, back in wanted]
        parts.row_sequences[:count] = [row for row, _ in wanted]
        parts.row_lens[:count] = [lens[row] - back for row, back in wanted]
        parts.rows[count:] = 0
        parts.row_sequences[count:] = 0
        parts.row_lens[count:] = lens[0]

    def batch(self, key: PromptKey) -> ForwardBatch:
        """The step as the model's body takes it. The tensors are the same at every call; ``lay_tables`` first."""
        parts = self._parts(key)
        table = self._tables[key.pages][: key.sequences, :, : key.pages]
        attention = {
            kind: AttentionBatch(parts.query_start, parts.context_lens, table[:, place], key.tokens)
            for place, kind in enumerate(KINDS)
        }
        slots = {kind: parts.slots[place] for place, kind in enumerate(KINDS)}
        return ForwardBatch(parts.tokens, parts.positions, attention, slots, None)

    def lay_tables(self, key: PromptKey) -> None:
        """The page tables from the list of pages, on the device. Past its own pages a sequence's row goes on with the
        next one's: nobody looks."""
        parts = self._parts(key)
        table = self._tables[key.pages]
        places = parts.first_pages[:, :, None] + self._columns[: table.shape[2]]
        torch.take(parts.pages, places.clamp_(max=len(parts.pages) - 1), out=table[: key.sequences])

    def rows(self, key: PromptKey) -> Tensor:
        """The tokens that give logits."""
        return self._parts(key).rows

    def tail_batch(self, rows: int, pages: int, kind: LayerKind) -> AttentionBatch:
        """The tokens that give logits, as queries of their sequences, of a step whose tables are so wide."""
        parts = self._parts(PromptKey(1, 1, pages))  # they are at the same place in every step
        table = self._tables[pages][:, KINDS.index(kind)].index_select(0, parts.row_sequences[:rows])
        return AttentionBatch(self._starts[: rows + 1], parts.row_lens[:rows], table[:, :pages], 1)

    def _parts(self, key: PromptKey) -> _Parts[Tensor]:
        return _Parts.of(self._there, self._there.view(torch.int32), key, self.most_rows)
