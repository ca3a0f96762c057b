"""The steps of a draft head after those of its target, on tensors at fixed places.

The head runs before the host has read the step's tokens. So the device works out what depends on them: how many drafts
of each sequence were accepted, and from that its last certain row, its length, and which rows are kept. One copy holds
the rest; page tables follow as far as they have changed (``tables``).

A key is that of any step: ``tokens`` is the number of rows, ``sequences`` those that drew a token, and ``longest`` the
number of guesses for each of them.

    drawn tokens || position | slot | place of the next token    | sequence | place in the draft | next token, if known
    in place     || of each row of the step
                 || last own row | first drawn token | pages held | length | drafts         of each sequence that drew

Where the guesses of a sequence go:

    its own pages    | certain rows      | guesses |            the last one may have room
    scratch pages                                  | guesses |  some for each sequence of a step, the head's own

The next step overwrites guesses in the sequence's own pages, and nothing reads what scratch pages held before. Rows
after the last accepted draft go to the padding's scratch page. So the head's pages hold what the target's do: a request
that shares one, gives it back or is preempted does so for both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from microscale.engine.ahead import Ahead
from microscale.engine.graph_sizes import power_of_two, table_width
from microscale.engine.page_ledger import pages_for
from microscale.engine.page_tables import PageTables, Staging
from microscale.engine.speculation.drafter import DraftTarget, LaunchedStep
from microscale.engine.step_inputs import aligned
from microscale.models.batch import ForwardBatch, LogitRows
from microscale.models.config import LayerKind
from microscale.models.draft_heads.drafting import Verified
from microscale.models.recorded import Step
from microscale.planning.following import NO_TOKEN, Standing, move_on
from microscale.planning.ops import AttentionBatch

if TYPE_CHECKING:
    from torch import Tensor

FULL = LayerKind.FULL
ROW_LINES, SEQUENCE_LINES = 6, 4


class HeadInputs:
    """The tensors of the head's steps."""

    def __init__(self, target: DraftTarget, most: int, vocab: int, device: torch.device) -> None:
        """``most``: the longest draft."""
        assert target.taps is not None  # with a head the model is tapped
        limits = target.limits
        self._pool, self._taps = target.pools[FULL], target.taps.rows
        self._size, self._most, self._vocab = limits.page_size, most, vocab
        self._max_rows, self._max_sequences = self._taps.shape[0], power_of_two(limits.max_num_seqs)
        self._scratch = pages_for(most + 1, self._size) + 1
        longest = min(limits.max_model_len, self._pool.num_pages * self._size)
        # Every row of a table begins at a multiple of 16 bytes.
        self._max_pages = -(-(pages_for(longest, self._size) + self._scratch) // 4) * 4
        self._tables = PageTables({FULL: self._pool}, self._size, self._max_sequences, self._max_pages, device)
        self._pages = self._tables.pages()
        self._drawn = aligned(self._max_sequences * (1 + most) + most)
        words = (
            self._drawn + ROW_LINES * aligned(self._max_rows) + (SEQUENCE_LINES + most) * aligned(self._max_sequences)
        )
        self._staging = Staging(words, device)
        self._on_device = self._staging.on_device
        self._columns = torch.arange(max(self._max_pages, most), device=device)
        self._starts = torch.arange(self._max_sequences + 1, dtype=torch.int32, device=device)
        first = self._pool.num_pages + 1
        self._scratch_pages = torch.arange(first, self.num_pages, self._scratch, device=device)

    @property
    def num_pages(self) -> int:
        """The target's, the padding's scratch page, and the scratch pages of guesses."""
        return self._pool.num_pages + 1 + self._max_sequences * self._scratch

    def holds(self, rows: int, sequences: int) -> bool:
        """Whether there may be a step of this size."""
        return rows <= self._max_rows and sequences <= self._max_sequences

    def key(self, step: LaunchedStep, count: int, *, padded: bool) -> Step:
        """``padded``: to powers of two, so that few graphs do."""
        rows, sequences = sum(work.count for work in step.schedule), len(step.first_rows)
        longest = max(work.end for work in step.schedule) + self._most + 1
        if padded:
            rows, sequences = min(power_of_two(rows), self._max_rows), power_of_two(sequences)
        return self.sized(rows, sequences, count, longest)

    def sized(self, rows: int, sequences: int, count: int, longest: int = 1) -> Step:
        pages = table_width(longest, self._size, self._max_pages)
        return Step(rows, sequences, count if sequences else 0, pages)

    def fill(self, step: LaunchedStep, key: Step) -> None:
        """Lay the step out as ``key`` has it, and begin the copies."""
        self._staging.wait()
        lines = [line + [0] * (len(line) % 2) for line in (*self._rows(step, key), *self._sequences(step, key))]
        numbers = [number for line in lines for number in line]
        end = self._drawn + len(numbers)
        self._staging.host.numpy()[self._drawn : end] = numbers
        self._staging.send(self._drawn, end)
        if step.tokens is not None:
            self._on_device[: step.tokens.shape[0]].copy_(step.tokens)
        if key.longest or step.ahead is not None:
            drew = [work for work in step.schedule if work.request.request_id in step.first_rows]
            for row, work in enumerate(drew):
                self._tables.show(row, work)
            for row in range(len(drew), key.sequences):
                self._tables.show_padding(row)
            self._tables.flush()
        if step.ahead is not None:
            self._move(key, step.ahead)

    def _move(self, key: Step, ahead: Ahead) -> None:
        """On the device, from where the host takes the sequences to be to where they are. All of them drew."""
        lines, each = self._lines(key), self._of_each(key)
        step = Standing(lines[0], lines[1:2], each[SEQUENCE_LINES - 1], drafts=each[SEQUENCE_LINES:])
        move_on(ahead, step, self._pages)

    def _lines(self, key: Step) -> Tensor:
        """int64 [lines, rows] of the rows, on the device."""
        flat = self._on_device[self._drawn :][: ROW_LINES * aligned(key.tokens)]
        return flat.view(ROW_LINES, -1)[:, : key.tokens]

    def _of_each(self, key: Step) -> Tensor:
        """int64 [lines, sequences] of the sequences, on the device."""
        lines = SEQUENCE_LINES + self._most
        flat = self._on_device[self._drawn + ROW_LINES * aligned(key.tokens) :][: lines * aligned(key.sequences)]
        return flat.view(lines, -1)[:, : key.sequences]

    def _rows(self, step: LaunchedStep, key: Step) -> list[list[int]]:
        """The lines of the rows, in the order of the schedule; then padding rows."""
        size, padding = self._size, self._pool.num_pages * self._size
        known_at = self._drawn + (ROW_LINES - 1) * aligned(key.tokens)
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
            given = work.count - drawn
            span = range(work.first, work.first + work.count)
            positions += span
            slots += [pages[at // size] * size + at % size for at in span]
            known += [*request.tokens[work.first + 1 : work.first + given + 1], *[0] * drawn]
            nexts += range(known_at + start, known_at + start + given)
            places += [0] * given + list(range(drawn))
            if first_drawn is None:
                # No token is drawn after its last row: that row is not kept.
                slots[start + given :] = [padding] * drawn
                nexts += range(known_at + start + given, known_at + start + work.count)
            else:
                nexts += range(first_drawn, first_drawn + drawn)
            owners += [sequence if first_drawn is not None else 0] * work.count
            sequence += first_drawn is not None
        spare = key.tokens - len(positions)
        nexts += range(known_at + len(nexts), known_at + key.tokens)
        rest = ((positions, 0), (slots, padding), (owners, 0), (places, 0), (known, 0))
        positions, slots, owners, places, known = (line + [fill] * spare for line, fill in rest)
        return [positions, slots, nexts, owners, places, known]

    def _sequences(self, step: LaunchedStep, key: Step) -> list[list[int]]:
        """The lines of the sequences that drew; then padding sequences, whose one row is the step's first."""
        columns: list[list[int]] = []
        row = 0
        for work in step.schedule:
            first_drawn = step.first_rows.get(work.request.request_id)
            if first_drawn is not None:
                own = work.count - len(work.drafts)
                held = len(self._pool.pages_of(work.request.request_id))
                none = [NO_TOKEN] * (self._most - len(work.drafts))
                columns.append([row + own - 1, first_drawn, held, work.first + own, *work.drafts, *none])
            row += work.count
        padding = [0, 0, 1, 1, *[NO_TOKEN] * self._most]
        columns += [padding] * (key.sequences - len(columns))
        return [list(line) for line in zip(*columns, strict=True)]

    def verified(self, key: Step) -> Verified:
        """The step as the head takes it: all on the device, from where ``fill`` puts things."""
        positions, slots, nexts, owners, places, _ = self._lines(key)
        # What is drawn from broken logits may be no token. Its request ends with this step.
        tokens = self._on_device[nexts].clamp_(0, self._vocab - 1)
        last = LogitRows(nexts[:0], {FULL: self._queries(key, nexts[:0], nexts[:0])})
        if key.sequences:
            own, first_drawn, held, lens, *_ = each = self._of_each(key)
            drawn = self._on_device[first_drawn + self._columns[: self._most, None]]  # [most, sequences]
            accepted = (drawn == each[SEQUENCE_LINES:]).long().cumprod(0).sum(0)
            slots = torch.where(places <= accepted[owners], slots, self._pool.num_pages * self._size)
            if key.longest:
                last = LogitRows(own + accepted, {FULL: self._queries(key, lens + accepted, held)})
        batch = ForwardBatch(tokens, positions, last.attention, {FULL: slots}, last)
        return Verified(batch, self._taps[: key.tokens])

    def _queries(self, key: Step, lens: Tensor, held: Tensor) -> AttentionBatch:
        """Sequences of these lengths; after the pages that each holds come its scratch pages."""
        sequences = lens.shape[0]
        columns, table = self._columns[: key.pages], self._tables.of(FULL, sequences, key.pages)
        beyond = columns - held[:, None]
        pages = torch.where(beyond < 0, table, (beyond + self._scratch_pages[:sequences, None]).int())
        return AttentionBatch(self._starts[: sequences + 1], lens.int(), pages, 1)
