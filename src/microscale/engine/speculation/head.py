"""``eagle3``, ``dflash`` and ``mtp``: a draft head drafts from what it reads of the target's steps.

Behind each step of the target the head takes in all of its rows, also those of prompts, and drafts the next tokens of
the sequences that drew one. It is launched before the step's tokens are read; its drafts are read after them. Its keys
and values lie in pages under the numbers of the target's full layers (``head_inputs``).

While it rests it takes in nothing, and the pages that are written meanwhile have holes:

    pages of a request    | complete | a step was missed | …    no drafts any more: no page after a hole is complete
    in the prefix cache   | complete | a step was missed |      requests that share only the first one get drafts

A page is complete again when a request that is complete so far begins it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from microscale.engine.graph_sizes import power_of_two
from microscale.engine.graphs import Graphs, graph_memory
from microscale.engine.request import Request
from microscale.engine.speculation.drafter import Context, DraftTarget, LaunchedStep
from microscale.engine.speculation.head_inputs import HeadInputs
from microscale.engine.work import Work
from microscale.models.config import LayerKind
from microscale.models.draft_heads.drafting import DraftHead
from microscale.models.recorded import Step

if TYPE_CHECKING:
    from torch import Tensor

FULL = LayerKind.FULL
GRAPH_ROWS = 1024
"""Above it the target's step takes longer than the host needs to launch the head's kernels one by one."""
FIRST_SEQUENCES = (1, 2, 4, 8)
"""Numbers of sequences whose graphs are captured before the first request."""


@dataclass(frozen=True)
class _Guesses:
    """Drafts after the last step, on their way to the host."""

    rows: Mapping[str, int] = field(default_factory=dict)
    """Request → row."""
    tokens: Tensor | None = None  # [rows, count]
    copied: torch.cuda.Event | None = None
    on_device: Tensor | None = None
    """The same, valid until the head runs again."""

    def read(self) -> list[list[int]]:
        if self.copied is not None:
            self.copied.synchronize()
        return [] if self.tokens is None else self.tokens.tolist()


class HeadDrafter:
    """A head behind one engine."""

    def __init__(self, head: DraftHead, most: int) -> None:
        """``most``: the maximum length of a draft."""
        self._head = head
        self._most = most
        self._guesses = _Guesses()
        self._complete: dict[str, int] = {}
        """Requests that the head has seen completely → how often they were preempted until then."""
        self._holes: set[int] = set()
        """Incomplete pages."""

    @property
    def taps(self) -> tuple[int, ...]:
        return self._head.config.reads.taps

    @property
    def key_lookahead(self) -> int:
        """See ``Limits.key_lookahead``."""
        return int(self._head.rows_hold_next_token)

    def attach(self, target: DraftTarget) -> None:
        """Attach to an engine, before its first step."""
        head, self._team = self._head, target.team
        self._pool, self._page_size = target.pools[FULL], target.limits.page_size
        self._inputs = HeadInputs(target, self._most, head.config.reads.vocab_size, head.device)
        self._kv = head.new_cache(self._inputs.num_pages)
        budget = graph_memory(head.ops.gpu)
        self._graphs = Graphs(head.device, head.ops.uncapturable, enabled=not target.enforce_eager, budget=budget)
        self._padded = self._graphs.enabled
        rows, pin = target.limits.max_num_seqs, head.device.type == "cuda"
        self._host = torch.zeros(rows * self._most, dtype=torch.int64, pin_memory=True) if pin else None

    def first_runs(self) -> int:
        return self._graphs.first_runs

    def prepare(self) -> None:
        """Capture what the first steps need: a few sequences with drafts of full length."""
        if not self._graphs.enabled:
            return
        with nullcontext() if self._team is None else self._team.preparing_drafts():
            for sequences in (FIRST_SEQUENCES[0], *FIRST_SEQUENCES):  # the first one runs as it is
                self._run_padding(sequences)

    def _run_padding(self, sequences: int) -> None:
        """Run a step that contains only padding; it writes to the scratch page."""
        rows = power_of_two(sequences * (1 + self._most))
        if self._inputs.holds(rows, sequences):
            key = self._inputs.sized(rows, sequences, self._most)
            self._inputs.fill(LaunchedStep(()), key)
            self._graphs.run(key, partial(self._draft, key))

    def follows(self, request: Request) -> bool:
        """Whether the head has seen all of the request so far."""
        return self._complete.get(request.request_id) == request.num_preempted

    def follow(self, step: LaunchedStep) -> None:
        """Before ``observe``: note requests that are new in the step, and pages that become complete."""
        for work in step.schedule:
            request = work.request
            if not self.follows(request):
                before = self._pool.pages_of(request.request_id)[: -(-work.first // self._page_size)]
                if not self._holes.isdisjoint(before):
                    self._miss(work)
                    continue
                self._complete[request.request_id] = request.num_preempted
            if self._holes:
                # Pages that begin now. One that began before is complete, or the request would not be.
                self._holes.difference_update(self._pages(work)[bool(work.first % self._page_size) :])

    def rest(self, step: LaunchedStep) -> None:
        """Skip a step."""
        self._guesses = _Guesses()
        for work in step.schedule:
            self._miss(work)

    def _miss(self, work: Work) -> None:
        self._complete.pop(work.request.request_id, None)
        self._holes.update(self._pages(work))

    def _pages(self, work: Work) -> Sequence[int]:
        """Pages that the step may write to."""
        last = (work.end - 1) // self._page_size
        return self._pool.pages_of(work.request.request_id)[work.first // self._page_size : last + 1]

    def observe(self, step: LaunchedStep, most: int) -> None:
        if not any(self.follows(work.request) for work in step.schedule):
            self._guesses = _Guesses()
            return
        with nullcontext() if self._team is None else self._team.drafting(step, most):
            self.take_in(step, most)

    def take_in(self, step: LaunchedStep, most: int) -> None:
        """What ``observe`` does on every rank."""
        count = min(most, self._most)
        if count and not self._head.guesses_in_turn:
            count = self._most  # what a block drafts depends on its length
        rows = sum(work.count for work in step.schedule)
        few = rows <= GRAPH_ROWS
        key = self._inputs.key(step, count, padded=self._padded and few)
        self._inputs.fill(step, key)
        if few:
            guessed = self._graphs.run(key, partial(self._draft, key))
        else:
            with torch.inference_mode():
                guessed = self._draft(key)
        self._guesses = self._to_host(guessed[: len(step.first_rows)], step) if key.longest else _Guesses()

    def _draft(self, key: Step) -> Tensor:
        return self._head.draft(self._inputs.verified(key), self._kv, key.longest)

    def _to_host(self, guessed: Tensor, step: LaunchedStep) -> _Guesses:
        rows = {request_id: row for row, request_id in enumerate(step.first_rows)}
        if self._host is None:
            return _Guesses(rows, guessed, None, guessed)
        host = in_one_piece(self._host, *guessed.shape)
        host.copy_(guessed, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return _Guesses(rows, host, copied, guessed)

    def expects(self, context: Context) -> bool:
        """Whether it drafted for the request behind the last step; otherwise reading that step gives no draft."""
        return context.request.request_id in self._guesses.rows

    def propose(self, contexts: Sequence[Context]) -> list[Sequence[int]]:
        guesses, rows = self._guesses.read(), self._guesses.rows
        places = [rows.get(context.request.request_id) for context in contexts]
        return [[] if row is None else guesses[row][: c.most] for row, c in zip(places, contexts, strict=True)]

    def drafts_ahead(self, requests: Sequence[Request], most: int) -> Tensor | None:
        rows, guessed = self._guesses.rows, self._guesses.on_device
        if guessed is None or [rows.get(request.request_id) for request in requests] != list(range(len(guessed))):
            return None  # they are not all the sequences of the last step, in its order
        return guessed[:, :most]

    def forget(self, request_id: str) -> None:
        """The request has ended. Another one by the same name must not get its drafts."""
        self._complete.pop(request_id, None)
        rows = {name: row for name, row in self._guesses.rows.items() if name != request_id}
        self._guesses = replace(self._guesses, rows=rows)


def in_one_piece(room: Tensor, rows: int, columns: int) -> Tensor:
    """``[rows, columns]`` at the beginning of a flat buffer. Torch copies to a part of a wider matrix through memory
    that is not pinned, and waits for the device: 2.4 to 3 ms in each step of 64 sequences on an H200."""
    return room[: rows * columns].view(rows, columns)
