"""The tensors of a step, at fixed places on the device, so that a CUDA graph is captured once and replayed.

The tokens of all sequences are laid end to end in one pinned buffer, which goes to the device in one copy. Page tables
follow as far as they have changed (``tables``).

    logit rows | their sequences | their lengths || tokens | positions | slots of each kind | starts | lengths | states
    in steps with prompts; fixed places          ||                      places depend on the step's key

*States* are slots of layers with states: the slot that each sequence reads, then, sequence by sequence, the slots that
it writes after its own token and after each draft. Other models have none.

A step is filled up to the sizes of its key with *padding*: sequences of up to ``longest`` tokens in the scratch page,
then sequences without tokens. So a step gives the same result in any key that holds it.

For a step that is launched before the last one is read, the device works out where its sequences are (``ahead``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from microscale.engine.ahead import Ahead
from microscale.engine.graph_sizes import power_of_two
from microscale.engine.page_ledger import pages_for
from microscale.engine.page_tables import PageTables, Staging
from microscale.engine.pages import NOWHERE, PagePool
from microscale.engine.work import Work
from microscale.models.batch import ForwardBatch
from microscale.models.config import PAGED, LayerKind
from microscale.models.recorded import Step
from microscale.planning.following import Standing, move_on
from microscale.planning.ops import AttentionBatch, StateBatch

if TYPE_CHECKING:
    from torch import Tensor

LINES = 2 + len(PAGED)
"""Tokens, positions, slots of each kind."""
MAX_VIEWS = 1024
"""Keys whose views are kept. Steps that no graph holds have any size."""


def aligned(words: int) -> int:
    """int64 words in whole units of 16 bytes: kernels are compiled for tensors that begin at one."""
    return words + words % 2


@dataclass(frozen=True)
class _Views:
    """Where a step of one key is: NumPy arrays on the host, tensors on the device."""

    lines: Any  # [LINES, tokens] int64
    starts: Any  # [sequences + 1] int32
    lens: Any  # [sequences] int32
    states: Any  # [(1 + written) * sequences] int32, or none
    end: int
    """Words up to the end of the step."""
    tokens: Tensor  # [tokens], on the device
    batch: ForwardBatch
    standing: Standing


class StepInputs:
    """The tensors of every step of one runner."""

    def __init__(
        self,
        pools: Mapping[LayerKind, PagePool],
        page_size: int,
        *,
        max_tokens: int,
        max_sequences: int,
        max_rows: int,
        max_pages: int,
        device: torch.device,
        draft_tokens: int = 0,
    ) -> None:
        """All of these include padding. ``max_rows``: tokens of a step with prompts that give logits; ``max_pages``:
        per sequence. ``draft_tokens``: the longest draft."""
        self._page_size = page_size
        self.tables = PageTables({kind: pools[kind] for kind in PAGED}, page_size, max_sequences, max_pages, device)
        self._pages = self.tables.pages()
        self._states = pools.get(LayerKind.LINEAR)
        self.max_rows = max_rows
        rows, row_lens = aligned(max_rows), aligned(-(-max_rows // 2))
        self._first = 2 * rows + row_lens
        """Words before the tokens."""
        lens = aligned(-(-(max_sequences + 1) // 2))
        self._written = power_of_two(1 + draft_tokens)
        """Slots that a sequence may write: padding has as many tokens."""
        per_sequence = 2 if self._states is None else 3 + self._written
        self._staging = Staging(self._first + LINES * aligned(max_tokens) + per_sequence * lens, device)
        self._row_parts = [
            (buffer[:max_rows], buffer[rows:][:max_rows], buffer.view(torch.int32)[4 * rows :][:max_rows])
            for buffer in (self._staging.host, self._staging.on_device)
        ]
        self._row_starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._places = Staging(max_sequences, device)
        """Where in a step tokens go that only the device knows."""
        self._known: dict[Step, _Views] = {}

    def fill(
        self, schedule: Sequence[Work], key: Step, tokens: Tensor | None = None, ahead: Ahead | None = None
    ) -> None:
        """Lay the schedule out as ``key`` has it, and begin the copies. ``tokens``: those of the parts that are
        ``ahead``, in their order, which only the device knows. ``ahead``: what else only the device knows."""
        views = self._views(key)
        self._staging.wait()
        counts, firsts = [], []
        ids: list[int] = []
        unread: list[int] = []
        for row, work in enumerate(schedule):
            self.tables.show(row, work)
            counts.append(work.count)
            firsts.append(work.first)
            if work.ahead:
                unread.append(len(ids))
                ids += [0] * work.count
            elif work.count == 1:
                ids.append(work.request.tokens[work.first])
            else:
                ids += work.tokens
        for at in range(len(ids), key.tokens, key.longest):
            count = min(key.longest, key.tokens - at)
            self.tables.show_padding(len(counts), pages_for(count, self._page_size))
            counts.append(count)
            firsts.append(0)
        self.tables.flush()
        self._lay_out(views, key, ids, firsts, counts)
        if self._states is not None:
            self._lay_states(self._states, schedule, views.states)
        if key.rows is not None:
            self._lay_rows(schedule, views)
        self._staging.send(self._first if key.rows is None else 0, views.end)
        if tokens is not None:
            self._take_over(tokens, unread, views.tokens)
        if ahead is not None:
            move_on(ahead, views.standing, self._pages)
            if views.batch.states is not None:
                read, write = (slots[: len(schedule)] for slots in (views.batch.states.read, views.batch.states.write))
                torch.gather(write, 1, ahead.accepted[:, None], out=read[:, None])

    def _take_over(self, tokens: Tensor, places: Sequence[int], into: Tensor) -> None:
        """Copy tokens that only the device knows to their places in the step."""
        if places[-1] == len(places) - 1:  # they come first in the step
            into[: len(places)].copy_(tokens)
            return
        self._places.wait()
        self._places.host[: len(places)] = torch.tensor(places)
        self._places.send(0, len(places))
        into.index_copy_(0, self._places.on_device[: len(places)], tokens.long())

    def _lay_states(self, slots: PagePool, schedule: Sequence[Work], states: Any) -> None:
        """The slots of all sequences; the scratch slot where there is none."""
        states[:] = slots.num_pages
        sequences = len(states) // (1 + self._written)
        read, write = states[:sequences], states[sequences:].reshape(sequences, -1)
        for row, work in enumerate(schedule):
            only_read, *written = slots.pages_of(work.request.request_id)
            assert only_read == NOWHERE or not work.ahead  # a sequence that decodes reads what it has written
            read[row] = written[0] if only_read == NOWHERE else only_read
            write[row, : len(written)] = written

    def _lay_out(
        self, views: _Views, key: Step, ids: Sequence[int], firsts: Sequence[int], counts: Sequence[int]
    ) -> None:
        """``firsts`` and ``counts``: of all sequences that have tokens. A prompt has thousands: no loop over them."""
        lines, starts, lens = views.lines, views.starts, views.lens
        filled = len(counts)
        starts[0] = 0
        np.cumsum(counts, out=starts[1 : filled + 1])
        starts[filled + 1 :] = key.tokens
        np.add(firsts, counts, out=lens[:filled], casting="unsafe")
        lens[filled:] = 0
        lines[0, : len(ids)] = ids
        lines[0, len(ids) :] = 0
        rows = np.repeat(np.arange(filled), counts)
        lines[1] = np.arange(key.tokens)
        lines[1] += np.subtract(firsts, starts[:filled])[rows]
        pages, offsets = np.divmod(lines[1], self._page_size)
        for slots, table in zip(lines[2:], self.tables.host.values(), strict=True):
            np.multiply(table[rows, pages], self._page_size, out=slots, dtype=np.int64)
            np.add(slots, offsets, out=slots)

    def _lay_rows(self, schedule: Sequence[Work], views: _Views) -> None:
        """The last tokens of sequences whose next token is due, drafts included, each as a query of its own; then, as
        often as there is room, the first token."""
        wanted = [(row, back) for row, work in enumerate(schedule) for back in range(work.num_logits - 1, -1, -1)]
        count = len(wanted)
        rows, sequences, lens = (part.numpy() for part in self._row_parts[0])
        rows[:count] = [views.starts[row + 1] - 1 - back for row, back in wanted]
        sequences[:count] = [row for row, _ in wanted]
        lens[:count] = [views.lens[row] - back for row, back in wanted]
        rows[count:] = 0
        sequences[count:] = 0
        lens[count:] = views.lens[0]

    def batch(self, key: Step) -> ForwardBatch:
        """The step as the model takes it. The tensors are the same at every call; all tokens give logits."""
        return self._views(key).batch

    def logit_rows(self) -> Tensor:
        """[max_rows]: the tokens of a step with prompts that give logits."""
        return self._row_parts[1][0]

    def tail_queries(self, rows: int, pages: int, kind: LayerKind) -> AttentionBatch:
        """The first of these tokens, as queries of their sequences."""
        _, sequences, lens = (part[:rows] for part in self._row_parts[1])
        table = self.tables.of(kind, self.tables.num_rows, pages).index_select(0, sequences)
        return AttentionBatch(self._row_starts[: rows + 1], lens, table, 1)

    def _views(self, key: Step) -> _Views:
        views = self._known.get(key)
        if views is None:
            if len(self._known) >= MAX_VIEWS:
                self._known.clear()
            views = self._known[key] = self._make_views(key)
        return views

    def _make_views(self, key: Step) -> _Views:
        starts = self._first + LINES * aligned(key.tokens)
        lens = starts + aligned(-(-(key.sequences + 1) // 2))
        states = lens + aligned(-(-key.sequences // 2))
        num_states = 0 if self._states is None else (1 + self._written) * key.sequences
        end = states + aligned(-(-num_states // 2))

        def parts(buffer: Tensor) -> list[Tensor]:
            lines = buffer[self._first : starts].view(LINES, -1)[:, : key.tokens]
            halves = buffer.view(torch.int32)
            places = ((starts, key.sequences + 1), (lens, key.sequences), (states, num_states))
            return [lines, *(halves[2 * place :][:count] for place, count in places)]

        lines, query_start, context_lens, states_of = parts(self._staging.on_device)
        token_ids, positions, *slots = lines
        attention = {}
        for kind in PAGED:
            table = self.tables.of(kind, key.sequences, key.pages)
            attention[kind] = AttentionBatch(query_start, context_lens, table, key.longest, verify=key.verify)
        state_batch = None
        if self._states is not None:
            read, write = states_of[: key.sequences], states_of[key.sequences :].view(key.sequences, -1)
            state_batch = StateBatch(query_start, context_lens, read, write, key.longest, key.verify)
        slots_of = dict(zip(PAGED, slots, strict=True))
        batch = ForwardBatch(token_ids, positions, attention, slots_of, None, state_batch)
        standing = Standing(positions, lines[2:], context_lens, tokens=token_ids)
        on_host = [part.numpy() for part in parts(self._staging.host)]
        return _Views(on_host[0], on_host[1], on_host[2], on_host[3], end, token_ids, batch, standing)
