"""The steps of a draft head behind those of its target, from tensors that stay where they are.

The head runs before anybody has read the step's tokens. So the device finds out what depends on them: how many drafts
of each sequence were accepted, and from that its last certain row, its length, and which rows are kept. One copy tells
it the rest; page tables are brought up to date as everywhere (``tables``).

    drawn tokens || position | slot | where the next token stands | sequence | place in the draft | next token, if known
    in place     || of each row of the step
                 || last own row | first drawn token | pages held | length | drafts         of each sequence that drew

Where the guesses of a sequence go:

    its own pages    | certain rows      | guesses |            the last one may have room
    scratch pages                                  | guesses |  some for each sequence of a step, the head's own

The next step writes over guesses in pages of the sequence's own, and nobody looks at what scratch pages held before.
Rows behind the last accepted draft go to the page that is nobody's. So the head's pages hold what the target's do, and
whoever shares one, gives it back or is preempted does so for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from microscale.backends.following import NO_TOKEN, Standing, move_on
from microscale.backends.ops import AttentionBatch
from microscale.engine.speculation.drafter import Launched, Target
from microscale.engine.step.ahead import Ahead
from microscale.engine.step.graphs import table_width
from microscale.engine.step.holdings import pages_for
from microscale.engine.step.tables import PageTables
from microscale.models.batch import ForwardBatch, LogitRows
from microscale.models.config import LayerKind
from microscale.models.draft_heads.drafting import Verified

if TYPE_CHECKING:
    from torch import Tensor

FULL = LayerKind.FULL
ROW_LINES, SEQUENCE_LINES = 6, 4


@dataclass(frozen=True)
class HeadKey:
    """What a captured step depends on."""

    rows: int
    sequences: int
    """That drew a token."""
    pages: int
    """Of a sequence, at most."""
    count: int
    """Guesses for each sequence."""


def _power(number: int) -> int:
    """The power of two from ``number`` on; 0 stays."""
    return 1 << (number - 1).bit_length() if number else 0


def _even(words: int) -> int:
    """int64 words in whole units of 16 bytes: kernels are compiled for tensors that begin at one."""
    return words + words % 2


class HeadInputs:
    """The tensors of the head's steps."""

    def __init__(self, target: Target, most: int, vocab: int, device: torch.device) -> None:
        """``most``: tokens of a draft."""
        assert target.taps is not None  # whoever has a head taps the model
        limits = target.limits
        self._pool, self._taps = target.pools[FULL], target.taps.rows
        self._size, self._most, self._vocab = limits.page_size, most, vocab
        self._max_rows, self._max_sequences = self._taps.shape[0], _power(limits.max_num_seqs)
        self._scratch = pages_for(most + 1, self._size) + 1
        longest = min(limits.max_model_len, self._pool.num_pages * self._size)
        # Every row of a table begins at a multiple of 16 bytes.
        self._max_pages = -(-(pages_for(longest, self._size) + self._scratch) // 4) * 4
        self._tables = PageTables(target.pools, self._size, self._max_sequences, self._max_pages, device)
        self._drawn = _even(self._max_sequences * (1 + most) + most)
        words = self._drawn + ROW_LINES * _even(self._max_rows) + (SEQUENCE_LINES + most) * _even(self._max_sequences)
        pin = device.type == "cuda"
        self._there = torch.zeros(words, dtype=torch.int64, device=device)
        self._host = [torch.zeros(words, dtype=torch.int64, pin_memory=pin) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._host] if pin else []
        self._columns = torch.arange(max(self._max_pages, most), device=device)
        self._starts = torch.arange(self._max_sequences + 1, dtype=torch.int32, device=device)
        first = self._pool.num_pages + 1
        self._scratch_pages = torch.arange(first, self.num_pages, self._scratch, device=device)

    @property
    def num_pages(self) -> int:
        """The target's, the one that is nobody's, and the scratch pages."""
        return self._pool.num_pages + 1 + self._max_sequences * self._scratch

    def holds(self, rows: int, sequences: int) -> bool:
        """Whether there may be a step of this size."""
        return rows <= self._max_rows and sequences <= self._max_sequences

    def key(self, step: Launched, count: int, *, padded: bool) -> HeadKey:
        """``padded``: to powers of two, so that few graphs do."""
        rows, sequences = sum(work.count for work in step.schedule), len(step.first_rows)
        longest = max(work.end for work in step.schedule) + self._most + 1
        if padded:
            rows, sequences = min(_power(rows), self._max_rows), _power(sequences)
        return self.sized(rows, sequences, count, longest)

    def sized(self, rows: int, sequences: int, count: int, longest: int = 1) -> HeadKey:
        pages = table_width(longest, self._size, self._max_pages)
        return HeadKey(rows, sequences, pages, count if sequences else 0)

    def fill(self, step: Launched, key: HeadKey) -> None:
        """Lay the step out as ``key`` has it, and begin the copies. It waits until the buffer is free: that of the last
        step may stand in the queue yet."""
        self._host.reverse()
        self._copied.reverse()
        if self._copied:
            self._copied[0].synchronize()
        lines = [line + [0] * (len(line) % 2) for line in (*self._rows(step, key), *self._sequences(step, key))]
        numbers = torch.tensor([number for line in lines for number in line], dtype=torch.int64)
        host, there = self._host[0][: len(numbers)], self._there[self._drawn :][: len(numbers)]
        there.copy_(host.copy_(numbers), non_blocking=True)
        if step.tokens is not None:
            self._there[: step.tokens.shape[0]].copy_(step.tokens)
        if key.count or step.ahead is not None:
            drew = [work for work in step.schedule if work.request.request_id in step.first_rows]
            for row, work in enumerate(drew):
                self._tables.show(FULL, row, work)
            for row in range(len(drew), key.sequences):
                self._tables.show_nobody(FULL, row)
            self._tables.flush()
        if self._copied:
            self._copied[0].record()
        if step.ahead is not None:
            self._move(key, step.ahead)

    def _move(self, key: HeadKey, ahead: Ahead) -> None:
        """On the device, from where the host takes the sequences to be to where they are. All of them drew."""
        lines, each = self._lines(key), self._of_each(key)
        step = Standing(lines[0], lines[1:2], each[SEQUENCE_LINES - 1], drafts=each[SEQUENCE_LINES:])
        move_on(ahead, step, self._tables.pages([FULL]))

    def _lines(self, key: HeadKey) -> Tensor:
        """int64 [lines, rows] of the rows, on the device."""
        flat = self._there[self._drawn :][: ROW_LINES * _even(key.rows)]
        return flat.view(ROW_LINES, -1)[:, : key.rows]

    def _of_each(self, key: HeadKey) -> Tensor:
        """int64 [lines, sequences] of the sequences, on the device."""
        lines = SEQUENCE_LINES + self._most
        flat = self._there[self._drawn + ROW_LINES * _even(key.rows) :][: lines * _even(key.sequences)]
        return flat.view(lines, -1)[:, : key.sequences]

    def _rows(self, step: Launched, key: HeadKey) -> list[list[int]]:
        """The lines of the rows, in the order of the schedule; then rows of nobody."""
        size, nobody = self._size, self._pool.num_pages * self._size
        known_at = self._drawn + (ROW_LINES - 1) * _even(key.rows)
        positions: list[int] = []
        slots: list[int] = []
        nexts: list[int] = []
        owners: list[int] = []
        places: list[int] = []
        known: list[int] = []
        sequence = 0
        for work in step.schedule:
            request, start = work.request, len(positions)
            pages, first_drawn = self._pool.pages_of(request.request_id), step.first_rows.get(request.request_id)
            drawn = 1 + len(work.drafts) if work.wants_logits else 0
            told = work.count - drawn
            span = range(work.first, work.first + work.count)
            positions += span
            slots += [pages[at // size] * size + at % size for at in span]
            known += [*request.tokens[work.first + 1 : work.first + told + 1], *[0] * drawn]
            nexts += range(known_at + start, known_at + start + told)
            places += [0] * told + list(range(drawn))
            if first_drawn is None:
                # Nobody draws the token after its last row: that row is not kept.
                slots[start + told :] = [nobody] * drawn
                nexts += range(known_at + start + told, known_at + start + work.count)
            else:
                nexts += range(first_drawn, first_drawn + drawn)
            owners += [sequence if first_drawn is not None else 0] * work.count
            sequence += first_drawn is not None
        spare = key.rows - len(positions)
        nexts += range(known_at + len(nexts), known_at + key.rows)
        rest = ((positions, 0), (slots, nobody), (owners, 0), (places, 0), (known, 0))
        positions, slots, owners, places, known = (line + [fill] * spare for line, fill in rest)
        return [positions, slots, nexts, owners, places, known]

    def _sequences(self, step: Launched, key: HeadKey) -> list[list[int]]:
        """The lines of the sequences that drew; then sequences of nobody, whose one row is the step's first."""
        found: list[list[int]] = []
        row = 0
        for work in step.schedule:
            first_drawn = step.first_rows.get(work.request.request_id)
            if first_drawn is not None:
                own = work.count - len(work.drafts)
                held = len(self._pool.pages_of(work.request.request_id))
                none = [NO_TOKEN] * (self._most - len(work.drafts))
                found.append([row + own - 1, first_drawn, held, work.first + own, *work.drafts, *none])
            row += work.count
        nobody = [0, 0, 1, 1, *[NO_TOKEN] * self._most]
        found += [nobody] * (key.sequences - len(found))
        return [list(line) for line in zip(*found, strict=True)]

    def verified(self, key: HeadKey) -> Verified:
        """The step as the head takes it: all on the device, from where ``fill`` puts things."""
        positions, slots, nexts, owners, places, _ = self._lines(key)
        # What is drawn from broken logits may be no token. Its request ends with this step.
        tokens = self._there[nexts].clamp_(0, self._vocab - 1)
        last = LogitRows(nexts[:0], {FULL: self._queries(key, nexts[:0], nexts[:0])})
        if key.sequences:
            own, first_drawn, held, lens, *_ = each = self._of_each(key)
            drawn = self._there[first_drawn + self._columns[: self._most, None]]  # [most, sequences]
            accepted = (drawn == each[SEQUENCE_LINES:]).long().cumprod(0).sum(0)
            slots = torch.where(places <= accepted[owners], slots, self._pool.num_pages * self._size)
            if key.count:
                last = LogitRows(own + accepted, {FULL: self._queries(key, lens + accepted, held)})
        batch = ForwardBatch(tokens, positions, last.attention, {FULL: slots}, last)
        return Verified(batch, self._taps[: key.rows])

    def _queries(self, key: HeadKey, lens: Tensor, held: Tensor) -> AttentionBatch:
        """Sequences of these lengths; behind the pages that each holds come its scratch pages."""
        sequences = lens.shape[0]
        columns, table = self._columns[: key.pages], self._tables.of(FULL, sequences, key.pages)
        beyond = columns - held[:, None]
        pages = torch.where(beyond < 0, table, (beyond + self._scratch_pages[:sequences, None]).int())
        return AttentionBatch(self._starts[: sequences + 1], lens.int(), pages, 1)
